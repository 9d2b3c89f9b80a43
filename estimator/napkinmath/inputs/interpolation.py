"""Values that name another key of the same file, as OmegaConf has them."""

from __future__ import annotations

from napkinmath.base import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STEPS = 8  # a chain of names that is longer goes in a circle
_LARGE = 1e18
# Resolvers that trainers register for arithmetic (NeMo-RL nemo_rl/utils/config.py).
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else a,
    "max": max,
}


def interpolated(flat: Mapping[str, object]) -> dict[str, object]:
    """The keys with each whole value of the form '${key}', '${..key}' from its own section,
    '${oc.select:key,default}' or '${mul:1,2}' replaced by what it names; what names nothing stays
    as it is."""
    return {key: _value(flat, key, value, _STEPS) for key, value in flat.items()}


def _value(flat: Mapping[str, object], key: str, value: object, steps: int) -> object:
    if not isinstance(value, str) or not value.startswith("${") or not value.endswith("}"):
        return value
    inner = value[2:-1].removeprefix("oc.select:")
    if not steps or _closes_early(inner):
        return value
    word, colon, arguments = inner.partition(":")
    if colon and word in _ARITHMETIC:
        return _computed(flat, key, word, arguments, steps) or value
    name, comma, default = inner.partition(",")
    name = _absolute(name.strip(), key)
    if name in flat:
        found = flat[name]
        return value if found == value else _value(flat, name, found, steps - 1)
    if comma:
        return None if default.strip() == "null" else default.strip()
    return value


def _closes_early(inner: str) -> bool:
    """Whether the text is two expressions side by side: '${a} of ${b}'."""
    depth = 0
    for letter in inner:
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return True
    return False


def _absolute(name: str, key: str) -> str:
    """A name that starts with dots, from the section that it stands in: one dot is that section."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    sections = key.split(".")[:-dots]
    return ".".join([*sections, name[dots:]])


def _computed(
    flat: Mapping[str, object], key: str, word: str, arguments: str, steps: int
) -> object:
    """The number of two arguments; None where one of them is none."""
    numbers: list[float] = []
    for argument in _split(arguments):
        found = _value(flat, key, argument.strip(), steps - 1)
        try:
            numbers.append(values.number(found, key, high=_LARGE))
        except ValueError:
            return None
    if len(numbers) != 2:
        return None
    result = _ARITHMETIC[word](*numbers)
    return int(result) if result == int(result) else result


def _split(text: str) -> list[str]:
    """Parts between commas that stand outside braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
