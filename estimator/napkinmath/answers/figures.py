"""The plain figures of an estimate: memory with its ranges, the verdict, GPUs that fit, changes that
would help, findings."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.record import Record


class Range(Record):
    """A figure and the span in which nine of ten measurements are expected."""

    low: float
    value: float
    high: float


class Memory(Record):
    """Peak bytes: `requested` by the program, `allocated` and `reserved` by the allocator, `device`
    as nvidia-smi shows it."""

    requested: int
    allocated: Range
    reserved: Range
    device: Range


class Verdict(str, Enum):
    """Whether a step fits a device; each value has the command's exit code."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "cannot tell"
    NOT_ASKED = "no device named"

    @property
    def exit_code(self) -> int:
        """0 fits or nothing asked, 1 does not fit, 3 cannot tell."""
        return {"fits": 0, "no device named": 0, "does not fit": 1, "cannot tell": 3}[self.value]


class Fit(Record):
    """One GPU's answer: its memory, what the step needs of it, and the verdict."""

    gpu: str
    capacity_bytes: int
    headroom_bytes: int | None
    """None where the step fills the GPU up to its limit: name the GPU to have it replayed."""
    verdict: Verdict


class Change(Record):
    """Something to turn on: what it saves at the peak, and the speed it leaves (ratio of tokens/s;
    None without a GPU)."""

    flag: str
    meaning: str
    saved_bytes: int
    speed_ratio: float | None = None


class Remedy(Record):
    """The smallest set of changes that is enough to fit: flags, what they leave of the device, and
    the speed (ratio of tokens/s; None without known speeds)."""

    flags: tuple[str, ...]
    headroom_bytes: int
    speed_ratio: float | None = None


class Finding(Record):
    """Something off about the configuration, in one sentence, with the bytes it costs where
    known."""

    text: str
    nbytes: int = 0
