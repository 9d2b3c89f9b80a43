"""Words of a command line as keys and values: `--key value`, `--key=value`, `--switch`, Hydra's
`key=value`."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.json_text import loads
from napkinmath.inputs.scripts.source import Computed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.shell import Word

# Keys that name a file of keys: TRL's and alignment-handbook's, nanotron's, torchtitan's, NeMo-RL's.
CONFIGS = ("config", "config_file", "job.config_file")
# How a variable ends that holds several words.
_OF_WORDS = ("ARGS", "ARG", "OPTS", "OPTIONS", "PARAMS", "FLAGS", "EXTRA", "[@]", "[*]", "$@", "$*")
_PLAIN: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}


class Arguments:
    """Arguments as they are read: values by their key, computed ones aside, and what has no key."""

    def __init__(self) -> None:
        self.content: dict[str, object] = {}
        self.computed: dict[str, Computed] = {}
        self.lines: dict[str, int] = {}
        self.elsewhere: dict[str, str] = {}
        """Keys that another file says -> its path."""
        self.free: list[Word] = []
        self.is_loop = False
        """Whether the script they are given to trains in a loop of its own."""

    def set(self, key: str, values: list[Word]) -> None:
        """Sets a key; no value is a switch, several are a list."""
        made = next((word for word in values if word.source), None)
        self.content.pop(key, None)
        self.computed.pop(key, None)
        self.lines[key] = values[0].line if values else self.lines.get(key, 0)
        if made is not None:
            self.computed[key] = Computed(source=made.source, line=made.line)
        elif len(values) > 1:
            self.content[key] = [value_of(word.text) for word in values]
        else:
            self.content[key] = value_of(values[0].text) if values else True


def value_of(text: str) -> object:
    """A word as a number, a boolean, a list or mapping in JSON, or text."""
    lowered = text.strip().lower()
    if lowered in _PLAIN:
        return _PLAIN[lowered]
    for kind in (int, float):
        try:
            return kind(text) if len(text) < 40 else text
        except ValueError:
            pass
    if text[:1] in "{[" and len(text) > 1:
        try:
            return loads(text)
        except (ValueError, RecursionError):
            return _listed(text)
    return text


def _listed(text: str) -> object:
    """Hydra's `[a,b]` as a list."""
    if text.startswith("[") and text.endswith("]"):
        return [value_of(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    return text


def arguments(words: list[Word], *, switches: frozenset[str] = frozenset()) -> Arguments:
    """Reads `--key value ...` as argparse does: a key has the words up to the next one. `switches`
    take no value; names have underscores."""
    found, at = Arguments(), 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("-") or word.text in ("-", "--") or _is_number(word.text):
            found.free.append(word)
            continue
        name, equals, value = word.text.lstrip("-").partition("=")
        key = name.replace("-", "_")
        values: list[Word] = [word._replace(text=value)] if equals else []
        while not equals and key not in switches and at < len(words) and _is_value(words[at]):
            if values and key in CONFIGS:  # `--config FILE key=value ...`
                break
            if is_words(words[at]):
                break
            values.append(words[at])
            at += 1
        found.set(key, values)
        found.lines[key] = word.line
    for word in found.free:  # keys that a run adds are named
        if is_words(word) and word.source not in ("$@", "$*"):
            found.content.setdefault(word.source, True)
    return found


def is_words(word: Word) -> bool:
    """Whether a word that a run makes is further words of the line, by the name of what makes it:
    `$EXTRA_ARGS`, `${OPTIONS[@]}`, and what a branch of the script adds."""
    if word.text.strip():
        return False
    name = word.source.rstrip("}").upper()
    return "to which a branch" in word.source or name.endswith(_OF_WORDS)


def _is_value(word: Word) -> bool:
    return not word.text.startswith("-") or word.text == "-" or _is_number(word.text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def overridden(content: dict[str, object], words: list[Word]) -> Arguments:
    """The content with Hydra's `a.b=value`, `+a.b=value` and `~a.b` applied. Raises InputError for
    a word that is no such thing."""
    found = Arguments()
    for word in words:
        name, equals, value = word.text.lstrip("+").removeprefix("--").partition("=")
        if not equals:
            if not word.text.startswith("~"):
                found.free.append(word)
            continue
        found.set(name, [word._replace(text=value)])
    tree = dict(content)
    for key, value in found.content.items():
        tree = _set_at(tree, key, value, 0)
    found.content = tree
    return found


def _set_at(tree: dict[str, object], key: str, value: object, depth: int) -> dict[str, object]:
    first, _, rest = key.partition(".")
    if not rest:
        return {**tree, first: value}
    if depth > 32:
        raise InputError(f"key {shown(key)} is nested too deeply; write plain keys")
    inner = tree.get(first)
    below: dict[str, object] = dict(inner) if isinstance(inner, dict) else {}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return {**tree, first: _set_at(below, rest, value, depth + 1)}
