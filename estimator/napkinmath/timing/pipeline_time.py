"""Time of a pipelined step: its slowest stage sets the pace, and the others wait while the pipeline
fills and drains.

For how many micro-batches a rank idles is in the schedule's record (config/pipeline_schedules.py).
"""

from __future__ import annotations

from napkinmath.ir.ledger import Phase
from napkinmath.memory.simulate import Scopes, running
from napkinmath.timing.schedule import Clock, StepTime, phase_times
from napkinmath.timing.stragglers import at_the_slowest_pace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from napkinmath.config.pipeline_schedules import PipelineSchedule
    from napkinmath.memory.pipeline_ranks import PipelineRanks
    from napkinmath.timing.schedule import PhaseTime

_PIPELINED = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)


def pipeline_time(ranks: PipelineRanks, clock: Clock) -> tuple[tuple[PhaseTime, ...], float]:
    """(phases of the slowest stage, seconds in which it waits for the others)."""
    from napkinmath.lowering.parallel.pipeline import num_micro_batches

    parallel, count = ranks.policy.config.parallel, num_micro_batches(ranks.policy)
    stages = parallel.pipeline_parallel_size
    built = {rank: ranks.step(rank) for rank in timed_ranks(stages)}
    scopes = Scopes(built[0].symbols)
    priced = {
        rank: phase_times(running(step, clock, scopes), clock.speed, first_segment=0)
        for rank, step in built.items()
    }
    slowest = slowest_stage(priced.values(), parallel.world_size)
    usual, chunks = _busy_s(priced[stages // 2]) / count, parallel.virtual_pipeline_size
    return slowest, waiting_s(parallel.pipeline_schedule, stages, chunks, count, usual)


def pipelined_tokens_per_s(ranks: PipelineRanks, clock: Clock, tokens: int) -> float:
    """Tokens of a step over its seconds at the pace of the slowest rank."""
    phases, bubble = pipeline_time(ranks, clock)
    return _step(phases, ranks.policy.config.parallel.world_size, bubble, tokens).tokens_per_s


def _step(
    phases: tuple[PhaseTime, ...], ranks: int, bubble_s: float = 0.0, tokens: int = 0
) -> StepTime:
    paced = at_the_slowest_pace(phases, ranks)
    return StepTime(
        phases=paced,
        bubble_s=bubble_s,
        tokens=tokens,
        model_flops=0,
        hardware_flops=0,
        peak_flops_per_s=1.0,
    )


def slowest_stage(stages: Iterable[tuple[PhaseTime, ...]], ranks: int) -> tuple[PhaseTime, ...]:
    """The phases of the stage whose step takes longest on the slowest of so many ranks."""
    return max(stages, key=lambda phases: _step(phases, ranks).seconds)


def timed_ranks(stages: int) -> list[int]:
    """The first, a middle and the last stage, which are priced: the others are like the middle
    one."""
    return sorted({0, stages // 2, stages - 1})


def waiting_s(
    schedule: PipelineSchedule, stages: int, chunks: int, micro_batches: int, micro_batch_s: float
) -> float:
    """Seconds that a stage idles in a step, where one micro-batch takes it `micro_batch_s` forward
    and backward."""
    return schedule.record.idle(stages, chunks, micro_batches) * micro_batch_s


def _busy_s(phases: tuple[PhaseTime, ...]) -> float:
    return sum(p.seconds for p in phases if p.phase in _PIPELINED)
