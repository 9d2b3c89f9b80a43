"""What is drawn: columns that hold the highest moment, thinning that keeps the peak and shows
nothing that was not there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline
from napkinmath.report import curve, drawn
from napkinmath.report.palette import STACK
from priced import CONFIGS, priced, spelled_out, timelines


@pytest.mark.slow
@given(timelines(), st.integers(1, 40))
def test_columns_reach_the_peak_and_never_exceed_it(timeline: Timeline, number: int) -> None:
    found = drawn.shown(timeline)
    columns = drawn.columns(found, number)
    assert max(columns.totals) == max(timeline.peak().nbytes, 0)
    assert columns.totals[columns.peak_column] == max(columns.totals)
    assert len(columns.totals) == number
    assert all(height >= 0 for heights in columns.heights for height in heights)


@pytest.mark.slow
@given(timelines())
def test_with_a_column_an_event_the_columns_are_the_run(timeline: Timeline) -> None:
    found = drawn.shown(timeline)
    if drawn.has_seconds(found):
        return
    start, end = curve.step_range(timeline)
    assert end == len(timeline.segments)
    totals = spelled_out(timeline, start)
    if not totals:
        return
    columns = drawn.columns(found, len(totals))
    before = spelled_out(timeline)[: -len(totals)]
    levels = [before[-1] if before else 0, *totals]
    assert list(columns.totals) == [max(a, b) for a, b in pairwise(levels)]


@given(timelines())
def test_phases_cover_the_axis_in_order(timeline: Timeline) -> None:
    columns = drawn.columns(drawn.shown(timeline), 10)
    assert columns.spans[0].start == 0
    assert all(a.end == b.start and a.phase is not b.phase for a, b in pairwise(columns.spans))
    assert max(span.nbytes for span in columns.spans) >= max(columns.totals)


@pytest.mark.slow
@given(timelines(), st.integers(1, 40))
def test_the_envelope_on_the_screen_agrees_with_the_picture(
    timeline: Timeline, number: int
) -> None:
    envelope = curve.envelope(timeline, number)
    assert max(envelope.values) == max(timeline.peak().nbytes, 0)
    assert envelope.in_seconds == drawn.has_seconds(drawn.shown(timeline))
    assert [span.phase for span in envelope.spans] == [
        span.phase for span in drawn.columns(drawn.shown(timeline), 3).spans
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("most_events", [20_000, 3_000, 500])
def test_thinning_keeps_the_peak_and_adds_nothing(name: str, most_events: int) -> None:
    timeline = priced(name).timeline
    whole = drawn.shown(timeline)
    thin = drawn.shown(timeline, most_events=most_events)
    assert drawn.num_events(thin.timeline, thin.segments) <= 2.2 * most_events
    assert thin.peak.nbytes == whole.peak.nbytes == timeline.peak().nbytes
    assert thin.timeline.breakdown(thin.peak) == timeline.breakdown(whole.peak)
    if not thin.left_out:
        coarse, fine = drawn.columns(thin, 50), drawn.columns(whole, 50)
        assert coarse.extent == pytest.approx(fine.extent)
        assert max(coarse.totals) == max(fine.totals)


@pytest.mark.slow
@settings(max_examples=60)
@given(timelines(), st.integers(3, 60))
def test_a_thinned_run_never_shows_more_than_there_was(
    timeline: Timeline, most_events: int
) -> None:
    thin = drawn.shown(timeline, most_events=most_events)
    peak = max(timeline.peak().nbytes, 0)
    columns = drawn.columns(thin, 16)
    assert max(columns.totals) == peak
    for role in STACK:
        most = max((t.requested * 60 for t in timeline.tensors if t.role is role), default=0)
        if role in columns.roles:
            assert max(columns.heights[columns.roles.index(role)]) <= most


def test_of_many_equal_micro_steps_the_first_and_the_last_are_drawn() -> None:
    from napkinmath.estimate import estimate
    from priced import LLAMA_7B

    e = estimate(LLAMA_7B, CONFIGS["qlora"].replace(gradient_accumulation_steps=40))
    found = drawn.shown(e.timeline, most_events=100_000)
    assert found.left_out == 37  # the first has segments of its own, of the 39 others two are kept
    assert found.peak.nbytes == e.peak.nbytes
    assert (
        drawn.num_events(found.timeline, found.segments)
        < drawn.num_events(e.timeline, drawn.shown(e.timeline, most_events=10**9).segments) / 5
    )


def test_saving_is_no_part_of_the_step_that_is_drawn() -> None:
    e = priced("full")
    assert any(segment.phase is Phase.SAVE for segment in e.timeline.segments)
    spans = curve.envelope(e.timeline, 40).spans
    assert Phase.SAVE not in {span.phase for span in spans}
    assert spans[0].phase is Phase.FORWARD
    assert curve.envelope(e.timeline, 40).extent == pytest.approx(
        sum(p.device_s for p in e.time.phases if p.phase is not Phase.SAVE)
    )
