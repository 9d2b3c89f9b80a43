"""Option: one thing a user may decide, as every door shows and reads it.

The doors are flags, keys of our own job files, keywords of `napkinmath.estimate()` and the page.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import dtype_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from enum import Enum

    from napkinmath.base.record import Record as Row

    Choices = tuple[str, ...] | Callable[[], Iterable[str]]

else:

    class Row:
        """A Record to type checkers. Every cold command makes ninety, and checking each costs 1%
        of it; a test checks the table instead."""

        def __init__(self, **given: object) -> None:
            self.__dict__.update(given)


# What a value is. ON is a switch that is only ever given to be on.
COUNT, NUMBER, SIZE, SWITCH, ON = "count", "number", "size", "switch", "on"
CHOICE, NAMES, TEXT, MAPPING = "choice", "names", "text", "mapping"
KINDS = (COUNT, NUMBER, SIZE, SWITCH, ON, CHOICE, NAMES, TEXT, MAPPING)
FLAG, JOB, KEYWORD, PAGE = "flag", "job file", "keyword", "page"
DOORS = (FLAG, JOB, KEYWORD, PAGE)


class Option(Row):
    """One option. `help` may say {choices}; `metavar` is what stands for a value there."""

    key: str
    """Its name in a job file and in Python; with dashes it is the flag."""
    help: str
    kind: str = TEXT
    metavar: str = ""
    sets: str = ""
    """Path of the field of a TrainConfig that it sets, or of the machine ('hardware', 'cluster') or
    the argument of estimate() that it makes."""
    aliases: tuple[str, ...] = ()
    """Other names, each good at every door but the page."""
    short: str = ""
    """'-r'."""
    shorthands: tuple[tuple[str, str, str], ...] = ()
    """Flags that are one value each: (flag's name, value, help)."""
    choices: Choices = ()
    members: type[Enum] | None = None
    """The enumeration whose values are the choices."""
    spellings: Mapping[str, str] = {}
    """Other spellings of choices."""
    reader: Callable[[object, str], object] | None = None
    """Reads (value, the flag's name) where the kind alone does not say how."""
    joint: bool = False
    """Read together with other options, by the function that makes its record."""
    low: float = 1
    high: float = 1 << 40
    page_high: int = 0
    """The most that the page takes; 0 is the page's own limit."""
    repeats: bool = False
    """Several values are one request each (--gpu), or contradict each other (--method)."""
    commas: bool = False
    """A comma is part of one value."""
    away: Mapping[str, str] = {}
    """Doors that do not have it, each with the reason."""

    @property
    def flag(self) -> str:
        """'--grad-accum'."""
        return flag_of(self.key)

    def is_at(self, door: str) -> bool:
        """Whether a door has this option."""
        return door not in self.away

    def read(self, value: object) -> object:
        """The value as its field holds it; raises InputError for one that cannot be understood."""
        if self.reader is not None:
            return self.reader(value, self.flag)
        if self.kind == COUNT:
            return values.count(value, self.flag, low=int(self.low), high=int(self.high))
        if self.kind == NUMBER:
            return values.number(value, self.flag, low=self.low, high=self.high)
        if self.members is not None:
            return values.choice(value, self.members, self.flag, dict(self.spellings))
        return _PLAIN[self.kind](value, self.flag)

    def named_choices(self) -> tuple[str, ...]:
        """The values it can have, from the catalog where that has them; () for anything."""
        if self.members is not None:
            return tuple(str(member.value) for member in self.members)
        return tuple(self.choices()) if callable(self.choices) else self.choices

    def meaning(self) -> str:
        """Its help, with the choices spelled out."""
        if "{choices}" not in self.help:
            return self.help
        return self.help.replace("{choices}", ", ".join(self.named_choices()))


_PLAIN: dict[str, Callable[[object, str], object]] = {
    SIZE: values.size,
    SWITCH: values.switch,
    ON: values.switch,
    NAMES: values.names,
    TEXT: values.text,
    CHOICE: values.text,
    MAPPING: values.mapping,
}


def flag_of(key: str) -> str:
    """'grad_accum' -> '--grad-accum', as messages name an option."""
    return "--" + key.replace("_", "-")


def lower_text(value: object, what: str) -> str:
    """A word in lower case."""
    return values.text(value, what).lower()


def dtype(value: object, what: str) -> str:
    """The short name of a type."""
    return dtype_name(values.text(value, what))
