"""The ruler under a step's curve: every phase that has room for its name, alone or in turn with
others, is drawn."""

from __future__ import annotations

import pytest
from napkinmath import estimate
from napkinmath.config.parallel_config import ParallelConfig, PipelineSchedule
from napkinmath.config.train_config import TrainConfig
from napkinmath.ir.ledger import Phase
from napkinmath.report.curve import Envelope, Span
from napkinmath.report.ruler import in_turn, ruler
from napkinmath.report.table import report_text

F, B, S, LOSS = Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.LOSS
SECONDS = {F: 1.0, B: 2.0, S: 0.5}


def spans(*phases: Phase, length: float = 1.0) -> tuple[Span, ...]:
    return tuple(
        Span(phase=phase, start=i * length, end=(i + 1) * length, nbytes=1)
        for i, phase in enumerate(phases)
    )


@pytest.mark.parametrize(
    ("phases", "groups"),
    [
        ((F, LOSS, B, S), [1, 1, 1, 1]),
        ((F, B, F, B, S), [4, 1]),
        ((F, LOSS, B, F, LOSS, B, S), [6, 1]),
        ((F, B), [1, 1]),
        ((), []),
    ],
)
def test_phases_that_alternate_go_together(phases: tuple[Phase, ...], groups: list[int]) -> None:
    found = in_turn(spans(*phases))
    assert [len(group) for group in found] == groups
    assert [span.phase for group in found for span in group] == list(phases)


@pytest.mark.parametrize("columns", [50, 60, 100])
@pytest.mark.parametrize("times", [2, 8, 40])
def test_phases_in_turn_are_drawn_however_short_each_is(times: int, columns: int) -> None:
    drawn = spans(*(F, B) * times)
    envelope = Envelope(values=(1,), spans=drawn, extent=2.0 * times, in_seconds=True)
    text, short = ruler(envelope, columns, SECONDS)
    assert not short
    assert "forward 1.00 s" in text
    assert "backward 2.00 s" in text
    assert len(text) <= columns


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_every_schedule_is_drawn(schedule: PipelineSchedule) -> None:
    chunks = schedule.record.usual_chunks
    parallel = ParallelConfig(
        pipeline_parallel_size=4, pipeline_schedule=schedule, virtual_pipeline_size=chunks
    )
    config = TrainConfig(parallel=parallel, gradient_accumulation_steps=8, sequence_length=512)
    said = report_text(estimate("tinyllama-1.1b", config, hardware="A100-80"), width=100)
    short = said.partition("too short to draw")[2].partition("\n")[0]
    assert "forward" not in short
    assert "backward" not in short
