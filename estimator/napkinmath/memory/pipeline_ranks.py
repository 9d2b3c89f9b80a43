"""The ranks of a pipeline: which one needs the most memory, and every stage's figures; ranks that
are alike are priced once."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.ir.step import side
from napkinmath.lowering.build import build_step, record_model
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.record import record_runs
from napkinmath.memory.simulate import Scopes, peak_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run, Step
    from napkinmath.lowering.record import Recording


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


# What is decided after a model is recorded: the update, and what waits on the host between blocks.
_LATER = ("micro_batch_size", "gradient_accumulation_steps", "optimizer", "offload")
_LATER_OFFLOAD = ("optimizer", "parameters")


class _Recordings:
    """The recordings of one model. One serves every configuration that differs in what is decided
    later alone, on the same side of every size at which the library runs other operations."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[tuple[dict[str, object], Recording]]] = {}

    def of(self, spec: ModelSpec, policy: Policy) -> Recording:
        """The model recorded under a policy."""
        config = policy.config
        sizes: dict[str, object] = {"b": config.micro_batch_size, "s": policy.sequence_length}
        if policy.patch is not None or not all(isinstance(size, int) for size in sizes.values()):
            return record_model(spec, policy)
        key = (
            policy.sdpa_choice,
            policy.cudnn_heads,
            *[value for name, value in config.items() if name not in _LATER],
            *[value for name, value in config.offload.items() if name not in _LATER_OFFLOAD],
        )
        alike = self._known.setdefault(key, [])
        for own, recording in alike:
            if side(recording.thresholds, own) == side(recording.thresholds, sizes):
                return recording
        recording = record_model(spec, policy)
        alike.append((sizes, recording))
        return recording


class PipelineRanks:
    """A model under a policy, spread over the ranks of a pipeline (or whole, as its rank 0).

    The model is recorded once and each rank's step built once: its memory and its time are asked
    for apart.
    """

    __slots__ = ("_recording", "_recordings", "_steps", "policy", "spec")

    def __init__(
        self, spec: ModelSpec, policy: Policy, recordings: _Recordings | None = None
    ) -> None:
        self.spec, self.policy = spec, policy
        self._recordings = recordings or _Recordings()
        self._recording: Recording | None = None
        self._steps: dict[int, Step] = {}

    def under(self, policy: Policy) -> PipelineRanks:
        """The same model under another policy, which shares the recordings. Raises InputError where
        the policy swaps blocks that the model lacks."""
        spec, config = self.spec, policy.config
        if spec.canvas is not None and config.offload.blocks != self.policy.config.offload.blocks:
            from napkinmath.lowering.swapped_blocks import with_swapped

            spec = with_swapped(spec, spec.canvas, config)
        return PipelineRanks(spec, policy, self._recordings)

    def step(self, rank: int = 0) -> Step:
        """The step of one rank; one that is not pipelined is built anew each time."""
        config = self.policy.config
        if rank in self._steps:
            return self._steps[rank]
        if not config.workload.is_plain:  # it may train another head
            step = build_step(self.spec, self.policy, pipeline_rank=rank)
        else:
            if self._recording is None:
                self._recording = self._recordings.of(self.spec, self.policy)
            step = build_step(self.spec, self.policy, pipeline_rank=rank, recording=self._recording)
        if config.parallel.pipeline_parallel_size > 1:
            self._steps[rank] = step
        return step

    def worst_step(self, *, steps: int = 2) -> Step:
        """The step of the rank that needs the most memory; the only one where nothing is
        pipelined."""
        return self._worst(steps)[1]

    def worst_peak(self, *, steps: int = 2) -> int:
        """The highest requested bytes of any rank."""
        peak, step = self._worst(steps)
        return peak or peak_bytes(step, steps=steps)

    def _worst(self, steps: int) -> tuple[int, Step]:
        """(peak, step) of the rank with the highest; the peak is left 0 where there is nothing to
        compare."""
        parallel = self.policy.config.parallel
        if parallel.pipeline_parallel_size == 1:
            return 0, self.step()
        from napkinmath.lowering.parallel.pipeline import num_micro_batches

        count = num_micro_batches(self.policy)
        ranks = distinct_ranks(parallel, self.layers_of_ranks(), count)
        built = [self.step(rank) for rank in ranks]
        scopes = Scopes(built[0].symbols)
        return max(
            ((peak_bytes(step, steps=steps, scopes=scopes), step) for step in built),
            key=lambda item: item[0],
        )

    def layers_of_ranks(self) -> list[int]:
        """Layers of every pipeline rank, over its chunks."""
        from napkinmath.lowering.parallel.stage_order import (
            head_in_layers,
            held_stages,
            layers_per_stage,
        )

        parallel, num_layers = self.policy.config.parallel, self.spec.num_layers
        if parallel.pipeline_parallel_size == 1:
            return [num_layers]
        counts = layers_per_stage(
            num_layers, parallel, head_in_layers(self.spec, self.policy.stack)
        )
        ranks = range(parallel.pipeline_parallel_size)
        return [sum(counts[stage] for stage in held_stages(parallel, rank)) for rank in ranks]


def distinct_ranks(parallel: ParallelConfig, layers: list[int], micro_batches: int) -> list[int]:
    """Ranks of which one has the highest peak: first, last, and of the others the first with each
    number of layers and in flight.

    Among equal stages without embedding and head, one with more micro-batches in flight needs more;
    so of those with as many layers the one with the most in flight stands for all.
    """
    from napkinmath.lowering.parallel.stage_order import in_flight, stage_order

    stages, last = parallel.pipeline_parallel_size, parallel.pipeline_parallel_size - 1
    best: dict[int, tuple[int, int]] = {}
    for rank in range(1, last):
        held = sum(in_flight(stage_order(parallel, rank, micro_batches)).values())
        if layers[rank] not in best or held > best[layers[rank]][0]:
            best[layers[rank]] = (held, rank)
    return sorted({0, last, *(rank for _, rank in best.values())} if stages > 1 else {0})


def stage_figures(ranks: PipelineRanks, *, steps: int = 2) -> tuple[StageFigures, ...]:
    """Every pipeline rank's figures."""
    from napkinmath.lowering.parallel.pipeline import num_micro_batches
    from napkinmath.lowering.parallel.stage_order import (
        held_stages,
        in_flight,
        num_stages,
        stage_order,
    )

    parallel, layers = ranks.policy.config.parallel, ranks.layers_of_ranks()
    stages, count = parallel.pipeline_parallel_size, num_micro_batches(ranks.policy)
    found: dict[tuple[int, int, bool, bool], int] = {}
    rows: list[StageFigures] = []
    for rank in range(stages):
        held = max(in_flight(stage_order(parallel, rank, count)).values()) if stages > 1 else 1
        own = held_stages(parallel, rank)
        embeds, computes_loss = 0 in own, num_stages(parallel) - 1 in own
        key = (layers[rank], held, embeds, computes_loss)
        if key not in found:
            found[key] = peak_bytes(ranks.step(rank), steps=steps)
        figures = StageFigures(
            rank=rank,
            num_layers=layers[rank],
            in_flight=held,
            peak_bytes=found[key],
            embeds=embeds,
            computes_loss=computes_loss,
        )
        rows.append(figures)
    return tuple(rows)


class WholeModel:
    """The runs of the model on one GPU with their sizes, of which parameters are counted; no rank
    has them all."""

    __slots__ = ("runs", "symbols")

    def __init__(self, spec: ModelSpec, policy: Policy) -> None:
        config = policy.config.replace(parallel=ParallelConfig())
        alone = Policy(
            config,
            policy.stack,
            sdpa_choice=policy.sdpa_choice,
            cudnn_heads=policy.cudnn_heads,
        )
        self.runs: list[Run] = record_runs(spec, alone).runs
        self.symbols: dict[str, object] = {
            **dict(spec.symbols),
            "b": config.micro_batch_size,
            "s": config.sequence_length,
        }
