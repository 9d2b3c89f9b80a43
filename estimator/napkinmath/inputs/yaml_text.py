"""YAML of a job file: its events are measured before anything is built, since PyYAML builds by
recursion in C, and aliases and merge keys copy all that they name."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_DEPTH = 64
MAX_NODES = 100_000


def load(text: str, path: str, *, what: str, twice: list[str] | None = None) -> object:
    """The value of a YAML text; InputError, one line, where it is broken, tagged or too large.

    A key given twice is an error too, unless `twice` receives a sentence for each: then the last
    value stands, as with the YAML readers of other tools.
    """
    try:
        import yaml
    except ImportError:
        raise InputError(
            f"{what} {quoted(path)} is YAML, which needs PyYAML; pip install pyyaml, or write it as"
            " .json"
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    untyped: Any = yaml
    try:
        measured = _Measured(f"{what} {quoted(path)}", twice)
        for event in untyped.parse(text, Loader=loader):
            measured.take(yaml, event)
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise InputError(
            f"{what} {quoted(path)} is not plain YAML: {error.problem or error.context}{place};"
            " repair it"
        ) from None
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        # PyYAML's constructors raise these for a value that only looks like a date or a number.
        # What follows ';' is Python's own way out of a number of too many digits.
        lines = str(error).partition(";")[0].splitlines() or [error.__class__.__name__]
        raise InputError(
            f"{what} {quoted(path)} is not plain YAML: {lines[0]}; repair it"
        ) from None
    except RecursionError:
        raise InputError(
            f"{what} {quoted(path)} is nested too deeply; write plain keys and values"
        ) from None


class _Measured:
    """How deep the events read so far go, and to how many values they expand with every alias
    counted as what it names; refuses the first event above a limit."""

    def __init__(self, file: str, twice: list[str] | None) -> None:
        self.file, self.twice = file, twice
        self.open: list[_Collection] = [_Collection(None, is_mapping=False)]
        self.sizes: dict[str, int] = {}

    def take(self, yaml: Any, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.events.CollectionEndEvent):
            ended = self.open.pop()
            self._add(ended.anchor, ended.size, line)
        elif isinstance(event, yaml.events.NodeEvent):
            self._node(yaml, event, line)

    def _node(self, yaml: Any, event: Any, line: int) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise InputError(
                f"{self.file} has the tag {shown(tag, limit=50)} at line {line}; write the value"
                " without a tag"
            )
        if self.open[-1].keys is not None:
            self._in_mapping(event, self.open[-1], line)
        if isinstance(event, yaml.events.CollectionStartEvent):
            is_mapping = isinstance(event, yaml.events.MappingStartEvent)
            self.open.append(_Collection(event.anchor, is_mapping=is_mapping))
            self._below("has more than {} levels", len(self.open) - 1, MAX_DEPTH, line)
        elif isinstance(event, yaml.events.AliasEvent):
            if any(event.anchor == it.anchor for it in self.open) or event.anchor not in self.sizes:
                raise InputError(
                    f"{self.file} has the alias {shown(event.anchor)} at line {line}, which names"
                    " nothing above it or what holds it; write the value itself"
                )
            self._add(None, self.sizes[event.anchor], line)
        else:
            self._add(event.anchor, 1, line)

    def _in_mapping(self, event: Any, mapping: _Collection, line: int) -> None:
        """Every second node of a mapping is a key; a scalar one may not come twice."""
        is_key, mapping.at_key = mapping.at_key, not mapping.at_key
        key = getattr(event, "value", None)
        if not is_key or key is None or mapping.keys is None:
            return
        if key in mapping.keys:
            said = f"{self.file} gives the key {shown(key)} twice, again at line {line}"
            if self.twice is None:
                raise InputError(f"{said}; keep one")
            self.twice.append(said)
        mapping.keys.add(key)

    def _add(self, anchor: str | None, size: int, line: int) -> None:
        if anchor is not None:
            self.sizes[anchor] = size
        self.open[-1].size += size
        self._below("expands to more than {} values", self.open[-1].size, MAX_NODES, line)

    def _below(self, what: str, count: int, limit: int, line: int) -> None:
        if count > limit:
            raise InputError(
                f"{self.file} {what.format(limit)} at line {line}; write plain keys and values"
                " without aliases that multiply them"
            )


class _Collection:
    """An open list or mapping: its expanded size so far, and a mapping's keys."""

    def __init__(self, anchor: str | None, *, is_mapping: bool) -> None:
        self.anchor = anchor
        self.size = 1
        self.keys: set[str] | None = set() if is_mapping else None
        self.at_key = is_mapping
