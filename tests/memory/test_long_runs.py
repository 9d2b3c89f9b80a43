"""A long run on a device that it fills: what is followed from shorter runs comes to the verdict that
playing every event comes to, and stays below the limit."""

from __future__ import annotations

import pytest
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath.memory.allocator_settings import AllocatorSettings
from napkinmath.memory.long_runs import COPIES, TURNS, long_counts
from napkinmath.memory.replay import Replay, _played, replay, replayed

MIB = 1 << 20
TURNS_PLAYED = 5 * TURNS
COPIES_PLAYED = 4 * COPIES
KEPT = MIB // 2  # a tensor of the small pool


def tensor(nbytes: int) -> TensorInfo:
    return TensorInfo("t", Role.ACTIVATIONS, "m", nbytes, nbytes)


def segment(*events: tuple[str, int], repeat: int = 1) -> TimelineSegment:
    return TimelineSegment("s", Phase.FORWARD, repeat, list(events), [])


def run(*, cached: int, turns: int = 1, copies: int = 1) -> Timeline:
    """A tensor that comes and goes leaves a segment in the cache; then every copy of every turn keeps
    a small tensor."""
    rows = [(1, [segment(("+", 0), ("-", 0))]), (turns, [segment(("+", 1), repeat=copies)])]
    return Timeline([tensor(cached), tensor(KEPT)], Order(rows), Stamp(origin="analytic"))


RUNS = {
    "turns": run(cached=100 * MIB, turns=TURNS_PLAYED),
    "copies": run(cached=300 * MIB, copies=COPIES_PLAYED),
    "both": run(cached=100 * MIB, turns=2 * TURNS + 8, copies=2 * COPIES + 8),
    "nothing cached": run(cached=KEPT, turns=TURNS_PLAYED),
}


def both_ways(timeline: Timeline, limit: int) -> tuple[Replay, Replay]:
    """(followed from shorter runs, with every event played)."""
    order, sizes = timeline.segments, [t.nbytes for t in timeline.tensors]
    settings = AllocatorSettings(limit_bytes=limit)
    assert long_counts(order, sizes), "the run is too short to be followed"
    return replayed(order, sizes, settings), _played(order, sizes, settings)


@pytest.mark.slow
@pytest.mark.parametrize("what", RUNS)
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95, 1.2])
def test_a_limit_gives_the_verdict_of_every_event(what: str, share: float) -> None:
    whole = replay(RUNS[what])
    limit = int(share * whole.peak_reserved) // (2 * MIB) * 2 * MIB
    found, played = both_ways(RUNS[what], limit)
    assert bool(found.out_of_memory) == bool(played.out_of_memory)
    assert bool(found.num_retries) == bool(played.num_retries)
    assert (found.bytes_missing > 0) == bool(found.out_of_memory)
    names = ("peak_allocated", "peak_reserved", "peak_unreturnable", "end_reserved")
    assert all(0 <= getattr(found, name) <= limit for name in names) or share >= 1
    for name in names[:3]:
        assert getattr(found, name) >= getattr(played, name) - 2 * MIB, name
    if not found.out_of_memory:
        assert found.peak_allocated == played.peak_allocated
    if share >= 1:
        assert found == whole


def test_what_is_cached_is_returned_before_it_fails() -> None:
    """The cache makes room for what is kept: between the two, and not below, the run goes on."""
    timeline, kept = run(cached=60 * MIB, turns=TURNS_PLAYED), TURNS_PLAYED * KEPT
    whole = replay(timeline)
    assert (whole.peak_reserved, whole.peak_unreturnable) == (kept + 60 * MIB, kept)
    for limit, fails in ((kept + 30 * MIB, False), (kept, False), (kept - 2 * MIB, True)):
        found, played = both_ways(timeline, limit)
        assert bool(found.out_of_memory) == bool(played.out_of_memory) == fails
        assert found.num_retries == 1 and found.peak_reserved <= limit


def test_a_longer_run_costs_no_more() -> None:
    """2^40 turns under a limit: the message says what was missing."""
    found = replay(
        run(cached=100 * MIB, turns=1 << 40), AllocatorSettings(limit_bytes=80 * 1024 * MIB)
    )
    assert found.out_of_memory and "\n" not in found.out_of_memory
    missing = (1 << 40) * KEPT - 80 * 1024 * MIB
    assert found.bytes_missing == pytest.approx(missing, rel=1e-6)
