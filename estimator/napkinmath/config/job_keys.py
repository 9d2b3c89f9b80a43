"""JobKeys: what became of every key of a trainer's job file."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.record import Record


class KeyUse(str, Enum):
    """What a key of a job file does to the answer."""

    PRICED = "priced"
    NO_EFFECT = "no effect"
    """Known to change neither memory nor time of a training step, or given as what is off."""
    NOT_PRICED = "not priced"
    """Known to change memory or time, and left out of the figures."""
    UNKNOWN = "unknown"


class Difference(str, Enum):
    """How a run differs from the figures by what is not priced."""

    NONE = ""
    MORE = "more"
    LESS = "less"
    EITHER = "more or less"


class JobKey(Record):
    """One key, dotted where it is nested, with the reason for its use."""

    name: str
    use: KeyUse
    why: str = ""
    memory: Difference = Difference.NONE
    """Memory that a run takes beside what is said; of keys that are not priced."""
    time: Difference = Difference.NONE
    option: str = ""
    """What prices it where it is given beside the file: 'freeze', 'eval_bs'."""


class JobKeys(Record):
    """Every key of a job file of another tool."""

    tool: str
    path: str
    keys: tuple[JobKey, ...] = ()

    def of(self, use: KeyUse) -> tuple[JobKey, ...]:
        """The keys of one use, in the order of the file."""
        return tuple(key for key in self.keys if key.use is use)

    @property
    def takes_more(self) -> bool:
        """Whether memory is asked for that is not priced."""
        return Difference.MORE in self.changes("memory")

    def changes(self, what: str) -> frozenset[Difference]:
        """How memory or time ('memory', 'time') differ by what is not priced."""
        found = {getattr(key, what) for key in self.of(KeyUse.NOT_PRICED)} - {Difference.NONE}
        return (
            frozenset({Difference.MORE, Difference.LESS})
            if Difference.EITHER in found
            else frozenset(found)
        )
