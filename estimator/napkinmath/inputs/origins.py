"""Which key of a file, on which line, says an option: found by reading the file again without the
key, which holds for every reader alike."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Read = Callable[[Mapping[str, object]], Mapping[str, object]]

# Readings of one file; a file of more keys is asked by its sections.
MOST_READINGS = 400
_DEEPEST = 3


def keys_by_option(
    content: Mapping[str, object],
    read: Read,
    options: Mapping[str, object],
    priced: frozenset[str] | set[str] = frozenset(),
) -> dict[str, str]:
    """Option -> the dotted key that says it, for the options that a file says itself.

    That is the key without which the option is another, of several the one that changes least
    beside it; else one that is `priced` and has the option's value.
    """
    options = {option: value for option, value in options.items() if option != "job_keys"}
    leaves = dict(_leaves(content, "", 1))
    if len(leaves) > MOST_READINGS:
        leaves = dict(list(content.items())[:MOST_READINGS])
    changed: dict[str, set[str]] = {}
    for key in leaves:
        try:
            other = read(without(content, key.split(".")))
        except InputError:
            continue
        changed[key] = {option for option in options if other.get(option) != options[option]}
    found: dict[str, str] = {}
    for option in options:
        keys = [key for key in changed if option in changed[key]]
        if keys:
            found[option] = min(keys, key=lambda key: len(changed[key]))
    said = set(found.values())
    for option in [option for option in options if option not in found]:
        same = (key for key in leaves if key in priced and key not in said)
        if key := next((key for key in same if _same(leaves[key], options[option])), ""):
            found[option] = key
            said.add(key)
    return found


def without(content: Mapping[str, object], parts: list[str]) -> dict[str, object]:
    """The content less one key, whose dotted name may have sections before it."""
    for size in range(1, len(parts) + 1):
        key, rest = ".".join(parts[:size]), parts[size:]
        if key not in content:
            continue
        value = content[key]
        left = {name: it for name, it in content.items() if name != key}
        if not rest or not values.is_mapping(value):
            return left
        inner = without(values.mapping(value, key), rest)
        return {name: inner if name == key else it for name, it in content.items()}
    return dict(content)


def _leaves(content: Mapping[str, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        if depth < _DEEPEST and values.is_mapping(value) and value:
            yield from _leaves(values.mapping(value, key), f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _same(given: object, value: object) -> bool:
    return type(given) is not bool and str(given).lower() == str(value).lower()


def line_of(text: str, key: str) -> int:
    """The line, from 1, on which a YAML or JSON text gives a dotted key, or a script its flag; 0
    where none does."""
    import re

    at = 0
    for part in key.split("."):
        word = re.escape(part).replace("_", "[-_]")
        found = re.compile(rf"(?:^|[{{,\s])[\"']?(?:--)?{word}[\"']?\s*[:=\s]", re.M)
        match = found.search(text, at)
        if match is None:
            return 0
        at = match.start() + len(match[0]) - len(match[0].lstrip())
    return text.count("\n", 0, at) + 1
