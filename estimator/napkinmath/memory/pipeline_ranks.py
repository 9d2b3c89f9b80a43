"""The ranks of a pipeline: which one needs the most memory, and every stage's figures; ranks that
are alike are priced once."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.ir.step import build_step, record_runs
from napkinmath.memory.simulate import Scopes, peak_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run, Step
    from napkinmath.lowering.policy import Policy


class StageFigures(Record):
    """One pipeline rank: the layers of its chunks, micro-batches in flight, and its peak."""

    rank: int
    num_layers: int
    in_flight: int
    """The most micro-batches, over its chunks, whose backward has not run."""
    peak_bytes: int
    embeds: bool
    """Holds what comes before the layers."""
    computes_loss: bool
    """Holds what comes after them."""


def worst_step(spec: ModelSpec, policy: Policy, *, steps: int = 2) -> Step:
    """The step of the rank that needs the most memory; the only one where nothing is pipelined."""
    return _worst(spec, policy, steps)[1]


def worst_peak(spec: ModelSpec, policy: Policy, *, steps: int = 2) -> int:
    """The highest requested bytes of any rank."""
    peak, step = _worst(spec, policy, steps)
    return peak or peak_bytes(step, steps=steps)


def _worst(spec: ModelSpec, policy: Policy, steps: int) -> tuple[int, Step]:
    """(peak, step) of the rank with the highest; the peak is left 0 where there is nothing to
    compare."""
    parallel = policy.config.parallel
    if parallel.pipeline_parallel_size == 1:
        return 0, build_step(spec, policy)
    from napkinmath.lowering.parallel.pipeline import num_micro_batches

    ranks = distinct_ranks(parallel, spec.num_layers, num_micro_batches(policy))
    built = [rank_step(spec, policy, rank) for rank in ranks]
    scopes = Scopes(built[0].symbols)
    return max(
        ((peak_bytes(step, steps=steps, scopes=scopes), step) for step in built),
        key=lambda item: item[0],
    )


def rank_step(spec: ModelSpec, policy: Policy, rank: int) -> Step:
    """The step of one pipeline rank, built once for a policy: its memory and its time are asked for
    apart."""
    known, found = policy.rank_steps.get(rank, (None, None))
    if found is None or known is not spec:
        found = build_step(spec, policy, pipeline_rank=rank)
        policy.rank_steps[rank] = (spec, found)
    return found


def distinct_ranks(parallel: ParallelConfig, num_layers: int, micro_batches: int) -> list[int]:
    """Ranks of which one has the highest peak: first, last, and of the others the first with each
    number of layers and in flight.

    Among equal stages without embedding and head, one with more micro-batches in flight needs more;
    so of those with as many layers the one with the most in flight stands for all.
    """
    from napkinmath.lowering.parallel.stage_order import in_flight, stage_order

    stages, last = parallel.pipeline_parallel_size, parallel.pipeline_parallel_size - 1
    layers = layers_of_ranks(parallel, num_layers)
    best: dict[int, tuple[int, int]] = {}
    for rank in range(1, last):
        held = sum(in_flight(stage_order(parallel, rank, micro_batches)).values())
        if layers[rank] not in best or held > best[layers[rank]][0]:
            best[layers[rank]] = (held, rank)
    return sorted({0, last, *(rank for _, rank in best.values())} if stages > 1 else {0})


def layers_of_ranks(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of every pipeline rank, over its chunks."""
    from napkinmath.lowering.parallel.stage_order import layers_per_stage

    counts = layers_per_stage(num_layers, parallel)
    stages = parallel.pipeline_parallel_size
    return [sum(counts[rank::stages]) for rank in range(stages)]


def stage_figures(spec: ModelSpec, policy: Policy, *, steps: int = 2) -> tuple[StageFigures, ...]:
    """Every pipeline rank's figures."""
    from napkinmath.lowering.parallel.pipeline import num_micro_batches
    from napkinmath.lowering.parallel.stage_order import in_flight, stage_order

    parallel = policy.config.parallel
    stages, count = parallel.pipeline_parallel_size, num_micro_batches(policy)
    layers = layers_of_ranks(parallel, spec.num_layers) if stages > 1 else [spec.num_layers]
    found: dict[tuple[int, int, bool, bool], int] = {}
    rows: list[StageFigures] = []
    for rank in range(stages):
        held = max(in_flight(stage_order(parallel, rank, count)).values()) if stages > 1 else 1
        key = (layers[rank], held, rank == 0, rank == stages - 1)
        if key not in found:
            found[key] = peak_bytes(rank_step(spec, policy, rank), steps=steps)
        rows.append(
            StageFigures(
                rank=rank,
                num_layers=layers[rank],
                in_flight=held,
                peak_bytes=found[key],
                embeds=key[2],
                computes_loss=key[3],
            )
        )
    return tuple(rows)


class WholeModel:
    """The runs of the model on one GPU with their sizes, of which parameters are counted; no rank
    has them all."""

    __slots__ = ("runs", "symbols")

    def __init__(self, spec: ModelSpec, policy: Policy) -> None:
        from napkinmath.lowering.policy import Policy as Alone

        config = policy.config.replace(parallel=ParallelConfig())
        alone = Alone(config, policy.stack, sdpa_choice=policy.sdpa_choice)
        self.runs: list[Run] = record_runs(spec, alone)[0]
        self.symbols: dict[str, object] = {
            **dict(spec.symbols),
            "b": config.micro_batch_size,
            "s": config.sequence_length,
        }
