"""In which order a pipeline rank runs the forwards and backwards of its micro-batches, and what the
pipeline idles: read off the schedule's record (config/pipeline_schedules.py)."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.pipeline_schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.config.pipeline_schedules import Order, Turn
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.stack import Stack


def stage_order(parallel: ParallelConfig, rank: int, num_micro_batches: int) -> Order:
    """(times, turns) of one rank's step, forwards and backwards alone: neighbours that repeat are
    written once.

    A backward whose weight gradients are left for later is where those are made: what they read is
    kept until then.
    """
    ranks, chunks = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    order = parallel.pipeline_schedule.record.order(ranks, chunks, rank, num_micro_batches)
    halves = ((times, [_half(t) for t in turns if t[0] != INPUTS]) for times, turns in order)
    return [(times, turns) for times, turns in halves if turns]


def _half(turn: Turn) -> Turn:
    return (BACKWARD, turn[1]) if turn[0] == WEIGHTS else turn


def held_stages(parallel: ParallelConfig, rank: int) -> list[int]:
    """The stage of each chunk that a rank holds."""
    schedule = parallel.pipeline_schedule.record
    return schedule.holds(parallel.pipeline_parallel_size, parallel.virtual_pipeline_size, rank)


def num_stages(parallel: ParallelConfig) -> int:
    """Parts that the model is cut into."""
    schedule = parallel.pipeline_schedule.record
    return schedule.num_stages(parallel.pipeline_parallel_size, parallel.virtual_pipeline_size)


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
    """Idle over busy time of a pipeline of equal stages."""
    ranks, chunks = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    idle = parallel.pipeline_schedule.record.idle(ranks, chunks, num_micro_batches)
    return idle / num_micro_batches


def head_in_layers(spec: ModelSpec, stack: Stack) -> float:
    """The head's products as a number of layers', where the stack weighs them to cut stages; else
    0. Key/value heads count as query heads do (nanotron models/llama.py get_block_compute_costs)."""
    sizes = dict(spec.symbols)
    if not stack.engine.weighs_stages or not {"h", "a", "dh", "f", "v"} <= set(sizes):
        return 0.0
    return sizes["v"] / (4 * sizes["a"] * sizes["dh"] + 3 * sizes["f"])


def layers_per_stage(num_layers: int, parallel: ParallelConfig, head: float = 0.0) -> list[int]:
    """Layers of every stage, as even as they come; what is left over goes to the stages in the
    middle, which hold no embedding or head. With a `head` that weighs so many layers, a stage ends
    with the layer that reaches its share, and the last may have the head alone.

    Raises InputError where another stage would be without layers.
    """
    stages = num_stages(parallel)
    if head:
        return _weighed(num_layers, stages, head)
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


def _weighed(num_layers: int, stages: int, head: float) -> list[int]:
    """Source: nanotron models/base.py build_model (thresholds of cumulative costs)."""
    counts, stage = [0] * stages, 0
    for done in range(1, num_layers + 1):
        counts[stage] += 1
        if done > (num_layers + head) * (stage + 1) / stages:
            stage += 1
    if stage < stages - 1:
        raise InputError(
            f"pipeline_parallel_size={stages} leaves stages without layers: this library weighs the"
            f" head as {head:.1f} of {num_layers} layers; use fewer stages"
        )
    return counts


def check_micro_batches(parallel: ParallelConfig, num_micro_batches: int) -> None:
    """Raises InputError where the schedule cannot run so many on so many ranks."""
    ranks, chunks = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    wrong = parallel.pipeline_schedule.record.needs(ranks, chunks, num_micro_batches)
    if wrong:
        raise InputError(wrong)
