"""By how much a step fits its GPU, in words: the headroom, and what the allocator could give back."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import headroom, returnable_bytes
from napkinmath.base.units import GIB, MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Range
    from napkinmath.config.hardware import Hardware

SMALL_CACHE = 64 * MIB  # not worth a word


def margin(estimate: Estimate) -> tuple[str, str]:
    """(by how much the step fits its GPU or does not, what else is to be said of the room)."""
    spare, hardware = headroom(estimate), estimate.hardware
    assert spare is not None and hardware is not None
    of = f"of {in_gib(hardware.memory_bytes)} GiB"
    if estimate.verdict is Verdict.DOES_NOT_FIT:
        lacking = f"{in_gib(-spare.value)} GiB too much for {of[3:]}"
        pieces = f"the allocator's pieces do not go into {of[3:]}"
        return lacking if spare.value < 0 else pieces, _in_pieces(estimate)
    if estimate.verdict is Verdict.UNKNOWN:
        return _unsure_margin(spare, of), _in_pieces(estimate)
    return (
        f"{in_gib(spare.value)} GiB to spare {of} ({in_gib(spare.low)}-{in_gib(spare.high)})",
        _cache(estimate, hardware),
    )


def _cache(estimate: Estimate, hardware: Hardware) -> str:
    if estimate.replay.peak_reserved > hardware.usable_bytes:
        return "only where the allocator returns its cache, which costs time"
    cache = returnable_bytes(estimate)
    return (
        f"the allocator's cache could give back {in_gib(cache)} GiB more"
        if cache >= SMALL_CACHE
        else ""
    )


def _unsure_margin(spare: Range, of: str) -> str:
    if spare.low < 0 < spare.high:
        return (
            f"between {in_gib(-spare.low)} GiB too much and {in_gib(spare.high)} GiB to spare {of}"
        )
    if spare.high <= 0:
        return f"{in_gib(-spare.value)} GiB too much for {of[3:]}, if the allocator keeps its cache"
    return f"{in_gib(spare.value)} GiB to spare {of} ({in_gib(spare.low)}-{in_gib(spare.high)}), in pieces"


def _in_pieces(estimate: Estimate) -> str:
    """Said where the tensors alone would go in, and the allocator's pieces do not."""
    hardware, allocated = estimate.hardware, estimate.memory.allocated.high
    assert hardware is not None
    left = hardware.usable_bytes - allocated
    if left < 0:
        return ""
    advice = (
        ""
        if estimate.settings.expandable_segments
        else "; try --allocator expandable_segments:True"
    )
    return f"tensors alone would leave {in_gib(left)} (fragmentation){advice}"


def in_gib(value: float) -> str:
    """GiB with as many decimals as a reader needs."""
    return f"{value / GIB:,.{1 if abs(value) >= 10 * GIB else 2}f}"
