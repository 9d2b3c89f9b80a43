"""Meshes: every way of laying tensor, pipeline, context, expert and data parallelism over a cluster, and the fastest that fits.

Layers cost the same wherever they stand, so one recorded model for each split of a layer (tensor, context, expert degrees) bounds every
mesh that splits layers so: the layers' seconds over the stages and the wait for filling the pipeline from below, the layers' weights,
states and kept activations likewise. Meshes are priced in full in the order of their bounds until none left can be better, so the answer
is that of pricing all.
"""

from __future__ import annotations

from napkinmath.collectives import network_on
from napkinmath.errors import InputError
from napkinmath.expr import Bindings
from napkinmath.ledger import ALLOC, Phase, Tensor, Work
from napkinmath.lowering.choices import resolve
from napkinmath.lowering.parallel.pipeline import num_micro_batches
from napkinmath.lowering.parallel.stage_order import in_flight, layers_per_stage, stage_order
from napkinmath.lowering.parallel.tensor import valid_degrees
from napkinmath.overlap import COMMUNICATION_STREAM, COPY_STREAM
from napkinmath.paging import paging_s
from napkinmath.parallel_config import DataParallel, ParallelConfig, PipelineSchedule
from napkinmath.pipeline_time import waiting_s
from napkinmath.record import Record
from napkinmath.schedule import Clock, StepTime, phase_times
from napkinmath.simulate import peak_bytes, simulate
from napkinmath.stages import distinct_ranks
from napkinmath.step import build_step
from napkinmath.stragglers import at_the_slowest_pace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.cluster import Cluster
    from napkinmath.efficiency import Efficiency
    from napkinmath.model_spec import ModelSpec
    from napkinmath.schedule import PhaseTime
    from napkinmath.step import Segment, Step
    from napkinmath.train_config import TrainConfig


class MeshPrice(Record):
    """A mesh with the requested bytes of the rank that needs most, the seconds of a step and the tokens of all GPUs a second."""

    config: TrainConfig
    peak_bytes: int
    seconds: float
    tokens_per_s: float

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel


def meshes(spec: ModelSpec, cluster: Cluster, config: TrainConfig, *, global_batch: int = 0) -> list[TrainConfig]:
    """The configuration under every mesh that the model, the sequence and the cluster allow.

    Tensor-parallel groups stay within a node. `global_batch` counts the sequences of a step over all ranks: what one data-parallel rank
    has of it comes as micro-batches; 0 leaves the accumulation steps as they are. Raises InputError where none is valid.
    """
    found = list(_meshes(spec, cluster, config, global_batch))
    if not found:
        batch = f" of {global_batch} sequences in micro-batches of {config.micro_batch_size}" if global_batch else ""
        raise InputError(
            f"no mesh of {cluster.num_gpus} GPUs{batch} suits {spec.name}; use a number of GPUs and a batch with more divisors"
        )
    return found


def _meshes(spec: ModelSpec, cluster: Cluster, config: TrainConfig, global_batch: int) -> Iterator[TrainConfig]:
    gpus, base = cluster.num_gpus, config.parallel
    experts = dict(spec.symbols).get("e", 1) or 1
    for tensor in valid_degrees(spec, cluster.gpus_per_node, copies_heads=config.stack.startswith("megatron")):
        if gpus % tensor or cluster.gpus_per_node % tensor:
            continue
        for pipeline in divisors_of(gpus // tensor, spec.num_layers // base.virtual_pipeline_size):
            for context in divisors_of(gpus // (tensor * pipeline), gpus):
                if not _shares_sequence(config, context):
                    continue
                data = gpus // (tensor * pipeline * context)
                steps = _accumulated(config, global_batch, data)
                if not steps or (base.virtual_pipeline_size > 1 and pipeline > 1 and steps % pipeline):
                    continue
                for expert in divisors_of(data * context, experts):
                    if experts % expert == 0:
                        yield config.replace(
                            gradient_accumulation_steps=steps,
                            parallel=_mesh(base, tensor=tensor, pipeline=pipeline, context=context, expert=expert, data=data),
                        )


def _mesh(base: ParallelConfig, *, tensor: int, pipeline: int, context: int, expert: int, data: int) -> ParallelConfig:
    kind = base.data_parallel
    if data * context == 1:
        kind = DataParallel.NONE
    elif kind is DataParallel.NONE:
        kind = DataParallel.DDP
    chunks = base.virtual_pipeline_size if pipeline > 1 else 1
    interleaved = base.pipeline_schedule is PipelineSchedule.INTERLEAVED and chunks == 1
    return base.replace(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, context_parallel_size=context, expert_parallel_size=expert, data_parallel_size=data, data_parallel=kind,
        sequence_parallel=tensor > 1, virtual_pipeline_size=chunks, num_micro_batches=0, shard_size=0,
        pipeline_schedule=PipelineSchedule.ONE_F_ONE_B if interleaved else base.pipeline_schedule,
    )  # fmt: skip


def divisors_of(number: int, most: int) -> list[int]:
    """The divisors of a number that are not above the most."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _shares_sequence(config: TrainConfig, ranks: int) -> bool:
    length = config.sequence_length
    return ranks == 1 or (isinstance(length, int) and length % (2 * ranks) == 0 and length // ranks >= 128)


def _accumulated(config: TrainConfig, global_batch: int, data: int) -> int:
    """Micro-batches of a data-parallel rank; 0 where the batch does not divide."""
    if not global_batch:
        return config.gradient_accumulation_steps
    rows = data * int(config.micro_batch_size)  # pyright: ignore[reportArgumentType]
    return 0 if global_batch % rows else global_batch // rows


# ---------------------------------------------------------------- price


def price_mesh(spec: ModelSpec, config: TrainConfig, cluster: Cluster, speed: Efficiency) -> MeshPrice:
    """Peak and time of a step: of the rank that needs most, of the slowest stage with its waiting."""
    policy = resolve(spec, config, cluster.hardware)
    parallel = config.parallel
    clock = Clock(speed, policy, network_on(cluster, parallel) if cluster.num_gpus > 1 else None)
    stages = parallel.pipeline_parallel_size
    timed = {0, stages // 2, stages - 1}
    ranks = sorted(timed | set(distinct_ranks(parallel, spec.num_layers, num_micro_batches(policy)))) if stages > 1 else [0]
    peak = managed = 0
    priced: dict[int, tuple[PhaseTime, ...]] = {}
    for rank in ranks:
        step = build_step(spec, policy, pipeline_rank=rank)
        peak = max(peak, peak_bytes(step))
        if rank in timed:
            timeline = simulate(step, clock, steps=1)
            priced[rank] = phase_times(timeline, speed, first_segment=timeline.step_starts[-1])
            managed = max(managed, timeline.host_peak(managed=True))
    slowest, bubble = max(priced.values(), key=lambda phases: sum(p.seconds for p in phases)), 0.0
    if stages > 1:
        usual = sum(p.seconds for p in priced[stages // 2] if p.phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
        count = num_micro_batches(policy)
        bubble = waiting_s(parallel.pipeline_schedule, stages, parallel.virtual_pipeline_size, count, usual / count)
    slowest = at_the_slowest_pace(slowest, parallel.world_size)
    time = StepTime(
        phases=slowest, bubble_s=bubble, paging_s=paging_s(managed, peak, cluster.hardware, speed) if managed else 0.0, tokens=_tokens(config), model_flops=0,
        hardware_flops=0, peak_flops_per_s=1.0,
    )  # fmt: skip
    return MeshPrice(config=config, peak_bytes=peak, seconds=time.seconds, tokens_per_s=time.tokens_per_s)


def _tokens(config: TrainConfig) -> int:
    return int(config.micro_batch_size * config.sequence_length) * config.gradient_accumulation_steps * config.parallel.data_parallel_size  # pyright: ignore[reportArgumentType]


def fastest(
    spec: ModelSpec, config: TrainConfig, cluster: Cluster, speed: Efficiency, *, global_batch: int = 0, most: int = 1,
    among: list[TrainConfig] | None = None, above: float = 0.0,
) -> list[MeshPrice]:  # fmt: skip
    """The `most` fastest meshes whose requested bytes fit a GPU, fastest first: fewer where fewer fit.

    A peak of requested bytes below the memory excludes nothing that fits; whether the winner does is for its Estimate to verify. `among`
    are the meshes to choose from (all of `meshes`), of which those that no engine runs are left out; `above`: slower ones are of no
    interest. Raises InputError where none is valid, or each is refused.
    """
    bounds = Bounds(spec, cluster, speed)
    limit = cluster.hardware.memory_bytes
    found: list[MeshPrice] = []
    waiting, refused = _by_bound(bounds, meshes(spec, cluster, config, global_batch=global_batch) if among is None else among)
    for bound, mesh in waiting:
        if bound <= above or (len(found) == most and bound <= found[-1].tokens_per_s):
            break
        try:
            if bounds.bytes(mesh) > limit:
                continue
            price = price_mesh(spec, mesh, cluster, speed)
        except InputError as error:
            refused = refused or error
            continue
        if price.peak_bytes <= limit:
            found = sorted([*found, price], key=lambda p: -p.tokens_per_s)[:most]
    if refused is not None and not waiting:
        raise refused
    return found


def _by_bound(bounds: Bounds, among: list[TrainConfig]) -> tuple[list[tuple[float, TrainConfig]], InputError | None]:
    """(tokens/s that it cannot exceed, mesh), best first, and the first refusal."""
    found: list[tuple[float, TrainConfig]] = []
    refused: InputError | None = None
    for mesh in among:
        try:
            found.append((bounds.tokens_per_s(mesh), mesh))
        except InputError as error:
            refused = refused or error
    return sorted(found, key=lambda item: -item[0]), refused


class LayerBound(Record):
    """What one split of a layer costs at least, over all layers of the model and in its cheapest layer."""

    seconds: float
    """Kernels of one micro-batch through all layers, forward and backward, that nothing can hide."""
    least_s: float
    kept_bytes: int
    """Of the layer that keeps least for its backward."""
    stored_bytes: int
    """Weights and gradients of the smallest layer; 0 where they are shared by data-parallel ranks."""


class Bounds:
    """Lower bounds of seconds and bytes, by the degrees that split a layer."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, speed: Efficiency) -> None:
        self.spec, self.cluster, self.speed = spec, cluster, speed
        self._known: dict[tuple[int, int, int], LayerBound] = {}

    def tokens_per_s(self, config: TrainConfig) -> float:
        """More than this a mesh cannot do."""
        layer, parallel = self._layer(config), config.parallel
        stages, steps = parallel.pipeline_parallel_size, config.gradient_accumulation_steps
        seconds = steps * layer.seconds / stages
        if stages > 1:
            fewest = min(layers_per_stage(self.spec.num_layers, parallel)) * parallel.virtual_pipeline_size
            seconds += waiting_s(parallel.pipeline_schedule, stages, parallel.virtual_pipeline_size, steps, fewest * layer.least_s)
        return _tokens(config) / seconds

    def bytes(self, config: TrainConfig) -> int:
        """Fewer than this its worst rank cannot need: layers with their gradients and what the micro-batches in flight keep."""
        layer, parallel = self._layer(config), config.parallel
        counts = layers_per_stage(self.spec.num_layers, parallel)[:: parallel.pipeline_parallel_size]
        held = in_flight(stage_order(parallel, 0, config.gradient_accumulation_steps)) if parallel.pipeline_parallel_size > 1 else {0: 1}
        return sum(counts) * layer.stored_bytes + max(counts[chunk] * n for chunk, n in held.items()) * layer.kept_bytes

    def _layer(self, config: TrainConfig) -> LayerBound:
        parallel = config.parallel
        key = (parallel.tensor_parallel_size, parallel.context_parallel_size, parallel.expert_parallel_size)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._measure(config)
        return found

    def _measure(self, config: TrainConfig) -> LayerBound:
        parallel = config.parallel.replace(
            pipeline_parallel_size=1, virtual_pipeline_size=1, pipeline_schedule=PipelineSchedule.ONE_F_ONE_B,
            data_parallel_size=config.parallel.data_parallel_size * config.parallel.pipeline_parallel_size,
            data_parallel=DataParallel.DDP if config.parallel.data_parallel is DataParallel.NONE else config.parallel.data_parallel,
        )  # fmt: skip
        policy = resolve(self.spec, config.replace(parallel=parallel, gradient_accumulation_steps=1), self.cluster.hardware)
        step = build_step(self.spec, policy)
        clock = Clock(self.speed, policy, network_on(self.cluster, config.parallel))
        return layer_bound(step, clock, shared=policy.shards)


def layer_bound(step: Step, clock: Clock, *, shared: bool) -> LayerBound:
    """The bound of a step's layers, out of its segments; `shared`: weights and gradients lie on several ranks."""
    bind = Bindings(step.symbols)
    layers = [run for run in step.runs if run.stage.checkpointed]
    names = {run.name for run in layers}
    segments = [segment for _, row in step.micro_steps[:1] for segment in row if segment.name in names]
    seconds: dict[str, float] = {}
    kept: dict[str, int] = {}
    for segment in segments:
        seconds[segment.name] = seconds.get(segment.name, 0.0) + segment.repeat * _seconds(segment, clock, bind)
        if segment.phase is Phase.FORWARD:
            kept[segment.name] = min(kept.get(segment.name, 1 << 62), max(_net(segment, bind), 0))
    stored = [
        sum(bind(t.requested) for t in (*(w.tensor for w in run.block.weights if not w.tied_to), *run.block.gradients)) for run in layers
    ]
    return LayerBound(
        seconds=sum(seconds.get(run.name, 0.0) for run in layers),
        least_s=min(seconds.get(run.name, 0.0) / run.count for run in layers),
        kept_bytes=min(kept.get(run.name, 0) for run in layers),
        stored_bytes=0 if shared else min(stored),
    )


def _seconds(segment: Segment, clock: Clock, bind: Bindings) -> float:
    """Seconds of one repetition's kernels on the compute stream."""
    works = [payload for _, payload in segment.events if isinstance(payload, Work)]
    return sum(k.seconds for work in works for k in clock.kernels(work, bind) if k.bound not in (COMMUNICATION_STREAM, COPY_STREAM))


def _net(segment: Segment, bind: Bindings) -> int:
    """Bytes that one repetition leaves."""
    tensors = [(action, payload) for action, payload in segment.events if isinstance(payload, Tensor)]
    return sum(bind(tensor.requested) * (1 if action == ALLOC else -1) for action, tensor in tensors)
