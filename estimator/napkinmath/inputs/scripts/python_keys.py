"""Keys of a Trainer's file in the making, from what a script's calls were given."""

from __future__ import annotations

from napkinmath.inputs.scripts.python_values import (
    Made,
    Unknown,
    is_plain,
    items_of,
    without_tuples,
)
from napkinmath.inputs.scripts.source import Computed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LENGTHS = ("max_completion_length", "max_prompt_length", "max_length", "max_seq_length")


class ScriptKeys:
    """Keys with their lines; those that a run works out, and those that are bounds, are apart."""

    def __init__(self) -> None:
        self.content: dict[str, object] = {}
        self.computed: dict[str, Computed] = {}
        self.bounded: dict[str, Computed] = {}
        self.lines: dict[str, int] = {}

    def set(self, key: str, value: Any, line: int) -> None:
        """Sets a key; a value that only a run knows is kept aside."""
        self.lines[key] = line
        for kept in (self.content, self.computed, self.bounded):
            kept.pop(key, None)
        if isinstance(value, Unknown) and value.most and key in LENGTHS:
            self.content[key] = value.most
            self.bounded[key] = Computed(source=value.source, line=value.line)
        elif isinstance(value, Unknown):
            self.computed[key] = Computed(source=value.source, line=value.line)
        elif isinstance(value, Made):
            self.content[key] = value.name
        elif is_plain(value):
            self.content[key] = without_tuples(value)
        else:
            inner = _first_unknown(value)
            self.computed[key] = Computed(
                source=inner.source if inner else "an expression",
                line=inner.line if inner else line,
            )

    def forget_lines(self, path: str) -> None:
        """Keeps no lines of a notebook: a line of joined cells is no line of the file."""
        if path.lower().endswith(".ipynb"):
            self.lines = {}
            self.computed = {key: it.replace(line=0) for key, it in self.computed.items()}

    def take(self, made: Made, names: dict[str, str]) -> None:
        """Sets the keys that a made thing has under other names, and its others under their own."""
        for name, value in made.keys.items():
            line = made.lines.get(name, made.line)
            if name in names:
                if value is not None:
                    self.set(names[name], value, line)
            else:
                self.set(name, value, line)


def _first_unknown(value: Any) -> Unknown | None:
    return next((one for one in items_of(value) or () if isinstance(one, Unknown)), None)
