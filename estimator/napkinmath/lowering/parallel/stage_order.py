"""In which order a pipeline stage runs the forwards and backwards of its micro-batches, and what
the pipeline idles.

Sources: Huang et al. (arXiv 1811.06965, GPipe); Narayanan et al. (arXiv 2104.04473, 1F1B and
interleaved); Qi et al. (arXiv 2401.10241, zero bubble); Megatron-LM
core/pipeline_parallel/schedules.py; torch 2.13 distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import PipelineSchedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig

FORWARD, BACKWARD = "forward", "backward"
Turn = tuple[str, int]  # what runs, and of which of the rank's chunks


def stage_order(
    parallel: ParallelConfig, rank: int, num_micro_batches: int
) -> list[tuple[int, list[Turn]]]:
    """(times, turns) of one rank's step: neighbours that repeat are written once."""
    stages, kind = parallel.pipeline_parallel_size, parallel.pipeline_schedule
    one: list[Turn] = [(FORWARD, 0), (BACKWARD, 0)]
    if parallel.virtual_pipeline_size > 1:
        chunks = parallel.virtual_pipeline_size
        return interleaved_turns(stages, chunks, rank, num_micro_batches)
    if kind is PipelineSchedule.NAIVE:
        return [(num_micro_batches, one)]
    ahead = stages - rank
    if kind in (PipelineSchedule.GPIPE, PipelineSchedule.ZERO_BUBBLE):
        ahead = num_micro_batches if kind is PipelineSchedule.GPIPE else stages
    ahead = min(ahead, num_micro_batches)
    blocks = [(ahead - 1, one[:1]), (num_micro_batches - ahead + 1, one), (ahead - 1, one[1:])]
    return [(times, turns) for times, turns in blocks if times]


def interleaved_turns(
    stages: int, chunks: int, rank: int, num_micro_batches: int
) -> list[tuple[int, list[Turn]]]:
    """Megatron-LM's order: groups of as many micro-batches as there are stages pass through chunk
    after chunk.

    Source: Megatron-LM core/pipeline_parallel/schedules.py
    forward_backward_pipelining_with_interleaving.
    """
    total = num_micro_batches * chunks
    warmup = min(total, 2 * (stages - rank - 1) + (chunks - 1) * stages)

    def chunk(position: int, *, forward: bool) -> int:
        at = position % (stages * chunks) // stages
        return at if forward else chunks - 1 - at

    def pairs(start: int, stop: int) -> list[Turn]:
        return [
            turn
            for i in range(start, stop)
            for turn in (
                (FORWARD, chunk(warmup + i, forward=True)),
                (BACKWARD, chunk(i, forward=False)),
            )
        ]

    steady, period = total - warmup, stages * chunks
    blocks: list[tuple[int, list[Turn]]] = [
        *((1, [(FORWARD, chunk(i, forward=True))]) for i in range(warmup)),
        (steady // period, pairs(0, min(period, steady))),
        (1, pairs(steady - steady % period, steady)),
        *((1, [(BACKWARD, chunk(i, forward=False))]) for i in range(steady, total)),
    ]
    return [(times, turns) for times, turns in blocks if times and turns]


def in_flight(order: list[tuple[int, list[Turn]]]) -> dict[int, int]:
    """The most micro-batches of each chunk whose backward has not run."""
    live: dict[int, int] = {}
    most: dict[int, int] = {}
    for times, turns in order:
        begun, high = dict(live), dict[int, int]()
        for what, chunk in turns:
            live[chunk] = live.get(chunk, 0) + (1 if what == FORWARD else -1)
            high[chunk] = max(high.get(chunk, 0), live[chunk])
        for chunk, count in high.items():  # every time begins with so many more than the one before
            grown = (times - 1) * (live[chunk] - begun.get(chunk, 0))
            live[chunk] += grown
            most[chunk] = max(most.get(chunk, 0), count + max(grown, 0))
    return most


def bubble_fraction(parallel: ParallelConfig, num_micro_batches: int) -> float:
    """Idle over busy time of a pipeline of equal stages, (p-1)/(m·v) but for schedules that fill or
    never overlap.

    Naive: one stage works at a time, p-1. Zero bubble: the weight gradients, a third of a
    micro-batch's work, fill the wait (ZB-H1 of arXiv 2401.10241: (p-1)(f + b - w) against (p-1)(f +
    b + w) with forward, input and weight gradients of one length).
    """
    stages = parallel.pipeline_parallel_size
    if parallel.pipeline_schedule is PipelineSchedule.NAIVE:
        return float(stages - 1)
    share = (stages - 1) / (num_micro_batches * parallel.virtual_pipeline_size)
    return share / 3 if parallel.pipeline_schedule is PipelineSchedule.ZERO_BUBBLE else share


def layers_per_stage(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of every stage, as even as they come; what is left over goes to the stages in the
    middle, which hold no embedding or head.

    Raises InputError where a stage would be without layers.
    """
    stages = parallel.pipeline_parallel_size * parallel.virtual_pipeline_size
    if stages > num_layers:
        virtual = parallel.virtual_pipeline_size
        chunks = f" with virtual_pipeline_size={virtual}" if virtual > 1 else ""
        raise InputError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}{chunks} leaves stages"
            f" without layers: the model has {num_layers}; use at most {num_layers} stages in all"
        )
    each, left = divmod(num_layers, stages)
    counts = [each] * stages
    first = (stages - left) // 2
    for index in range(first, first + left):
        counts[index] += 1
    return counts


def check_micro_batches(parallel: ParallelConfig, num_micro_batches: int) -> None:
    """Raises InputError where an interleaved schedule's groups are not full."""
    stages = parallel.pipeline_parallel_size
    if parallel.virtual_pipeline_size > 1 and num_micro_batches % stages:
        raise InputError(
            f"num_micro_batches={num_micro_batches} is not a multiple of"
            f" pipeline_parallel_size={stages}, which the interleaved schedule needs; use {stages},"
            f" {2 * stages}, {3 * stages}, ..."
        )
