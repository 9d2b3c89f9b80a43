"""Streams: what is hidden behind computation, what sticks out, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from napkinmath.ir.ledger import Phase
from napkinmath.ir.order import Order
from napkinmath.ir.timeline import Kernel, TimelineSegment
from napkinmath.timing import overlap
from napkinmath.timing.overlap import (
    COMMUNICATION,
    COMMUNICATION_STREAM,
    COPY_STREAM,
)

BESIDE = 0.15  # what a collective takes of kernels beside it


def kernel(name: str, seconds: float, bound: str = "compute") -> Kernel:
    return Kernel(name, "", seconds, 0, 0, bound)


def gather(seconds: float) -> Kernel:
    return kernel("all-gather", seconds, COMMUNICATION_STREAM)


def reduction(seconds: float) -> Kernel:
    return kernel("reduce-scatter", seconds, COMMUNICATION_STREAM)


def segment(phase: Phase, *kernels: Kernel, repeat: int = 1) -> TimelineSegment:
    return TimelineSegment(
        "layer",
        phase,
        repeat,
        [("!", i) for i in range(len(kernels))],
        [],
        list(kernels),
        sum(k.seconds for k in kernels),
    )


def seconds_by_phase(segments: list[TimelineSegment]) -> dict[Phase, dict[str, float]]:
    return overlap.seconds_by_phase(Order([(1, segments)]))


def total(segments: list[TimelineSegment], phase: Phase | None = None) -> float:
    spent = seconds_by_phase(segments)
    return sum(sum(parts.values()) for key, parts in spent.items() if phase is None or key is phase)


def test_without_communication_seconds_are_summed() -> None:
    spent = seconds_by_phase(
        [
            segment(
                Phase.FORWARD,
                kernel("a", 1.0),
                kernel("b", 2.0, "bandwidth"),
                kernel("c", 9.0, COPY_STREAM),
                repeat=3,
            )
        ]
    )
    assert spent == {Phase.FORWARD: {"compute": 3.0, "bandwidth": 6.0, COPY_STREAM: 27.0}}


def test_the_first_gather_is_waited_for_the_others_hide_behind_the_unit_before() -> None:
    layers = segment(Phase.FORWARD, gather(1.0), kernel("matmul", 10.0), repeat=4)
    spent = seconds_by_phase([layers])[Phase.FORWARD]
    slowed = 3 * 1.0 * BESIDE  # three of the four units run beside the gather of the next one
    assert spent == pytest.approx({"compute": 40.0, COMMUNICATION: 1.0 + slowed}, rel=0.01)


def test_gathers_longer_than_computation_set_the_pace() -> None:
    spent = seconds_by_phase(
        [segment(Phase.FORWARD, gather(10.0), kernel("matmul", 1.0), repeat=5)]
    )[Phase.FORWARD]
    assert sum(spent.values()) == pytest.approx(5 * 10.0 + 1.0, rel=0.02)
    assert spent[COMMUNICATION] > spent["compute"]


def test_a_backward_gathers_one_unit_ahead() -> None:
    """The gather stands in the unit before the one that needs it: waited for is what is longer than
    that unit; the last one hides none."""
    layers = [segment(Phase.BACKWARD, gather(3.0), kernel("matmul", 2.0), repeat=3)]
    spent = seconds_by_phase(layers)[Phase.BACKWARD]
    assert spent[COMMUNICATION] == pytest.approx(2 * (3.0 - 2.0) + (2.0 / (1 - BESIDE) - 2.0))


def test_the_last_reduction_sticks_out_before_the_optimizer() -> None:
    layers = segment(Phase.BACKWARD, kernel("matmul", 5.0), reduction(2.0), repeat=4)
    spent = seconds_by_phase([layers, segment(Phase.STEP, kernel("update", 1.0))])
    assert spent[Phase.BACKWARD][COMMUNICATION] == pytest.approx(2.0 + 3 * 2.0 * BESIDE)
    assert spent[Phase.STEP] == {"compute": 1.0}


def test_a_reduction_waits_for_the_one_before() -> None:
    layers = segment(Phase.BACKWARD, kernel("matmul", 1.0), reduction(4.0), repeat=10)
    assert total([layers, segment(Phase.STEP)]) == pytest.approx(10 * 4.0 + 1.0, rel=0.02)


def test_communication_in_line_is_never_hidden() -> None:
    layers = segment(
        Phase.FORWARD, kernel("matmul", 1.0), kernel("all-reduce", 0.5, COMMUNICATION), repeat=8
    )
    assert seconds_by_phase([layers])[Phase.FORWARD] == pytest.approx(
        {"compute": 8.0, COMMUNICATION: 4.0}
    )


def test_gathers_and_reductions_share_the_stream() -> None:
    layers = segment(Phase.BACKWARD, gather(3.0), kernel("matmul", 5.0), reduction(3.0), repeat=20)
    assert total([layers, segment(Phase.STEP)]) == pytest.approx(20 * 6.0, rel=0.1)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0.01, 5), st.floats(0, 5)), min_size=1, max_size=6
    ),
    st.integers(1, 5),
)
def test_a_step_takes_at_least_either_stream_and_at_most_both(
    layers: list[tuple[float, float, float]], repeat: int
) -> None:
    segments = [
        segment(Phase.BACKWARD, gather(a), kernel("matmul", b), reduction(c), repeat=repeat)
        for a, b, c in layers
    ]
    segments.append(segment(Phase.STEP))
    computing, talking = (
        repeat * sum(b for _, b, _ in layers),
        repeat * sum(a + c for a, _, c in layers),
    )
    whole = total(segments)
    assert (
        max(computing, talking) * (1 - 1e-6)
        <= whole
        <= (computing / (1 - BESIDE) + talking) * (1 + 1e-6)
    )


@given(st.floats(0, 3), st.floats(0.1, 3), st.floats(0, 3), st.integers(2, 40))
def test_repetitions_are_what_spelling_them_out_gives(
    a: float, b: float, c: float, repeat: int
) -> None:
    def once(times: int) -> TimelineSegment:
        return segment(Phase.BACKWARD, gather(a), kernel("matmul", b), reduction(c), repeat=times)

    assert total([once(repeat), segment(Phase.STEP)]) == pytest.approx(
        total([once(1) for _ in range(repeat)] + [segment(Phase.STEP)]), rel=1e-6
    )


def test_collectives_over_different_links_run_at_once() -> None:
    """A gather between nodes is under way while tensor-parallel sums take the node's own links."""

    def layer(*, apart: bool) -> TimelineSegment:
        far = Kernel("all-gather", "", 4.0, 0, 0, COMMUNICATION_STREAM, between_nodes=apart)
        return segment(
            Phase.FORWARD,
            far,
            kernel("matmul", 3.0),
            kernel("all-reduce", 2.0, COMMUNICATION),
            repeat=10,
        )

    assert total([layer(apart=True)]) < 10 * (3.0 + 2.0) + 4.0 + 10 * 4.0 * BESIDE + 1e-9
    assert total([layer(apart=False)]) > 10 * (4.0 + 2.0) - 1e-9
