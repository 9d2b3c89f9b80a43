"""Meshes: every way of laying tensor, pipeline, context, expert and data parallelism over a
cluster, and the fastest that fits.

Meshes are priced in full in the order of what they could reach at most (`mesh_bounds`) until none
left can be better, so the answer is that of pricing all.
"""

from __future__ import annotations

from heapq import heappop, heappush

from napkinmath.answers.step_time import clock_on
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.ir.ledger import Phase
from napkinmath.lowering.choices import resolve
from napkinmath.lowering.parallel.pipeline import num_micro_batches
from napkinmath.lowering.parallel.tensor_share import valid_degrees
from napkinmath.lowering.parallel.tensor_style import configured_style
from napkinmath.memory.pipeline_ranks import PipelineRanks, distinct_ranks
from napkinmath.memory.simulate import Scopes, managed_bytes, peak_bytes, running
from napkinmath.models.read import read_teacher
from napkinmath.planning.mesh_bounds import Bounds, fineness, num_tokens
from napkinmath.timing.paging import paging_s
from napkinmath.timing.pipeline_time import slowest_stage, timed_ranks, waiting_s
from napkinmath.timing.schedule import StepTime, phase_times
from napkinmath.timing.stragglers import at_the_slowest_pace

inf = float("inf")
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.config.cluster import Cluster
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.timing.efficiency import Efficiency


class MeshPrice(Record):
    """A mesh with the requested bytes of the rank that needs most, the seconds of a step and the
    tokens of all GPUs a second."""

    config: TrainConfig
    peak_bytes: int
    seconds: float
    tokens_per_s: float

    @property
    def parallel(self) -> ParallelConfig:
        """The mesh."""
        return self.config.parallel


def meshes(
    spec: ModelSpec,
    cluster: Cluster,
    config: TrainConfig,
    *,
    global_batch: int = 0,
    alone: TrainConfig | None = None,
) -> list[TrainConfig]:
    """The configuration under every mesh that the model, the sequence and the cluster allow.

    Tensor-parallel groups stay within a node. `global_batch` counts the samples of a step over
    all ranks (a pair is one): what one data-parallel rank has of it comes as micro-batches; 0
    leaves the accumulation steps as they are. `alone` is the configuration of meshes with one
    data-parallel rank, where types follow the strategy. Raises InputError where none is valid.
    """
    found = list(_meshes(spec, cluster, config, global_batch, alone or config))
    if not found:
        batch = (
            f" of {global_batch} samples in micro-batches of {_samples(config)}"
            if global_batch
            else ""
        )
        raise InputError(
            f"no mesh of {cluster.num_gpus} GPUs{batch} suits {spec.name}; use a number of GPUs and"
            " a batch with more divisors"
        )
    return found


def _meshes(
    spec: ModelSpec,
    cluster: Cluster,
    config: TrainConfig,
    global_batch: int,
    alone: TrainConfig,
) -> Iterator[TrainConfig]:
    gpus, base = cluster.num_gpus, config.parallel
    experts = dict(spec.symbols).get("e", 1) or 1
    most_stages = max(1, spec.num_layers // base.virtual_pipeline_size)  # convolutions: no layers
    style = configured_style(config)
    for tensor in valid_degrees(spec, cluster.gpus_per_node, style=style):
        if gpus % tensor or cluster.gpus_per_node % tensor:
            continue
        for pipeline in divisors_of(gpus // tensor, most_stages):
            for context in divisors_of(gpus // (tensor * pipeline), gpus):
                if not _shares_sequence(config, context):
                    continue
                data = gpus // (tensor * pipeline * context)
                steps = _accumulated(config, global_batch, data)
                if not steps or not _runs(base, pipeline, steps):
                    continue
                for within, expert in _expert_ranks(config, tensor, data * context, experts):
                    if experts % expert:
                        continue
                    of = (
                        alone
                        if _ranks_alike(tensor, context, expert, within, data) == 1
                        else config
                    )
                    yield of.replace(
                        gradient_accumulation_steps=steps,
                        parallel=_mesh(
                            of.parallel,
                            tensor=tensor,
                            pipeline=pipeline,
                            context=context,
                            expert=expert,
                            within=within,
                            data=data,
                        ),
                    )


def _mesh(
    base: ParallelConfig,
    *,
    tensor: int,
    pipeline: int,
    context: int,
    expert: int,
    within: int,
    data: int,
) -> ParallelConfig:
    kind = base.data_parallel
    if _ranks_alike(tensor, context, expert, within, data) == 1:
        kind = DataParallel.NONE
    elif kind is DataParallel.NONE:
        kind = DataParallel.DDP
    chunks = base.virtual_pipeline_size if pipeline > 1 else 1
    schedule = base.pipeline_schedule
    if chunks < schedule.record.usual_chunks:  # nothing to cut into chunks
        schedule = ParallelConfig().pipeline_schedule
    return base.replace(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=within,
        data_parallel_size=data,
        data_parallel=kind,
        sequence_parallel=tensor > 1,
        virtual_pipeline_size=chunks,
        num_micro_batches=0,
        shard_size=0,
        pipeline_schedule=schedule,
    )


def _ranks_alike(tensor: int, context: int, expert: int, within: int, data: int) -> int:
    """Ranks that hold the same weights, of the experts or of all else: what a strategy shards."""
    return max(data * context, data * context * tensor // (expert * (within or tensor)))


def _expert_ranks(
    config: TrainConfig, tensor: int, alike: int, experts: int
) -> Iterator[tuple[int, int]]:
    """(ranks that share an expert, 0 for the tensor-parallel ones; ranks that experts are spread
    over). Where the stack's tensor-parallel ranks send their own tokens, experts are whole on a rank
    unless each already has one alone. `alike` ranks hold the same of all else."""
    given = config.parallel.expert_tensor_parallel_size
    whole = tensor > 1 and not given and find_stack(config.stack).model.fused_experts
    shared = given or tensor
    if alike * tensor % shared == 0:
        for expert in divisors_of(alike * tensor // shared, experts):
            if not whole or expert in (1, experts):
                yield given, expert
    for expert in divisors_of(alike * tensor, experts)[1:] if whole else ():
        yield 1, expert


def _runs(base: ParallelConfig, pipeline: int, steps: int) -> bool:
    """Whether the schedule takes so many micro-batches on so many ranks."""
    needs, chunks = base.pipeline_schedule.record.needs, base.virtual_pipeline_size
    return pipeline == 1 or not needs(pipeline, chunks, steps)


def divisors_of(number: int, most: int) -> list[int]:
    """The divisors of a number that are not above the most."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _shares_sequence(config: TrainConfig, ranks: int) -> bool:
    length = config.sequence_length
    return ranks == 1 or (
        isinstance(length, int) and length % (2 * ranks) == 0 and length // ranks >= 128
    )


def _accumulated(config: TrainConfig, global_batch: int, data: int) -> int:
    """Micro-batches of a data-parallel rank; 0 where the batch does not divide."""
    if not global_batch:
        return config.gradient_accumulation_steps
    rows = data * _samples(config)
    return 0 if global_batch % rows else global_batch // rows


def _samples(config: TrainConfig) -> int:
    """Samples of a micro-batch: a pair is one, of two sequences."""
    batch = config.micro_batch_size
    assert isinstance(batch, int)  # a search has numbers alone
    return batch // config.workload.sequences


# ---------------------------------------------------------------- price


def price_mesh(
    spec: ModelSpec, config: TrainConfig, cluster: Cluster, speed: Efficiency
) -> MeshPrice:
    """Peak and time of a step: of the rank that needs most, of the slowest stage with its
    waiting."""
    policy = resolve(spec, config, cluster.hardware, teacher=read_teacher(config))
    parallel = config.parallel
    clock = clock_on(cluster, parallel, speed, policy)
    stages = parallel.pipeline_parallel_size
    timed = timed_ranks(stages)
    spread = PipelineRanks(spec, policy)
    layers = spread.layers_of_ranks()
    ranks = (
        sorted({*timed, *distinct_ranks(parallel, layers, num_micro_batches(policy))})
        if stages > 1
        else timed
    )
    built = {rank: spread.step(rank) for rank in ranks}
    scopes = Scopes(built[0].symbols)
    peak = max(peak_bytes(step, scopes=scopes) for step in built.values())
    managed = max(managed_bytes(built[rank], scopes) for rank in timed)
    priced = {
        rank: phase_times(running(built[rank], clock, scopes), clock.speed, first_segment=0)
        for rank in timed
    }
    slowest, bubble = slowest_stage(priced.values(), parallel.world_size), 0.0
    if stages > 1:
        usual = sum(
            p.seconds
            for p in priced[stages // 2]
            if p.phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
        )
        count = num_micro_batches(policy)
        bubble = waiting_s(
            parallel.pipeline_schedule, stages, parallel.virtual_pipeline_size, count, usual / count
        )
    slowest = at_the_slowest_pace(slowest, parallel.world_size)
    time = StepTime(
        phases=slowest,
        micro_steps=config.gradient_accumulation_steps,
        bubble_s=bubble,
        paging_s=paging_s(managed, peak, cluster.hardware, speed) if managed else 0.0,
        tokens=num_tokens(config),
        model_flops=0,
        hardware_flops=0,
        peak_flops_per_s=1.0,
    )
    return MeshPrice(
        config=config, peak_bytes=peak, seconds=time.seconds, tokens_per_s=time.tokens_per_s
    )


def fastest(
    spec: ModelSpec,
    config: TrainConfig,
    cluster: Cluster,
    speed: Efficiency,
    *,
    global_batch: int = 0,
    most: int = 1,
    among: list[TrainConfig] | None = None,
    above: float = 0.0,
    bounds: Bounds | None = None,
) -> list[MeshPrice]:
    """The `most` fastest meshes whose requested bytes fit a GPU, fastest first: fewer where fewer
    fit.

    A peak of requested bytes below the memory excludes nothing that fits; whether the winner does
    is for its Estimate to verify. `among` are the meshes to choose from (all of `meshes`), of which
    those that no engine runs are left out; `above`: slower ones are of no interest. Raises
    InputError where none is valid, or each is refused.
    """
    search = MeshSearch(
        bounds or Bounds(spec, cluster, speed),
        meshes(spec, cluster, config, global_batch=global_batch) if among is None else among,
        most=most,
    )
    search.down_to(above)
    if search.refusal is not None:
        raise search.refusal
    return search.found


class MeshSearch:
    """The `most` fastest of some meshes that fit, found bit by bit: `found` are those so far."""

    def __init__(self, bounds: Bounds, among: list[TrainConfig], *, most: int) -> None:
        self.bounds, self.most = bounds, most
        self.found: list[MeshPrice] = []
        self._refused: InputError | None = None
        self._waiting = _Waiting(bounds, among, bounds.cluster.hardware.memory_bytes)

    @property
    def bound(self) -> float:
        """More than this nothing can do that is left and would be among the fastest; 0 where
        nothing is."""
        bound = self._waiting.bound
        return bound if bound > self._slowest else 0.0

    @property
    def refusal(self) -> InputError | None:
        """Why none could be searched, where each was refused."""
        return None if self._waiting.accepted else self._waiting.refused or self._refused

    @property
    def _slowest(self) -> float:
        return self.found[-1].tokens_per_s if len(self.found) == self.most else 0.0

    def down_to(self, above: float) -> None:
        """Prices what could do more than `above`."""
        bounds, waiting = self.bounds, self._waiting
        limit = bounds.cluster.hardware.memory_bytes
        while (mesh := waiting.next(max(above, self._slowest))) is not None:
            try:
                if bounds.bytes(mesh) > limit:
                    continue
                price = price_mesh(bounds.spec, mesh, bounds.cluster, bounds.speed)
            except InputError as error:
                self._refused = self._refused or error
                continue
            if price.peak_bytes <= limit:
                self.found = sorted([*self.found, price], key=lambda p: -p.tokens_per_s)
                del self.found[self.most :]


class _Waiting:
    """Meshes in the order of what they cannot exceed; what is only known of coarser splits is
    measured when its turn comes."""

    def __init__(self, bounds: Bounds, among: list[TrainConfig], limit: int) -> None:
        self.bounds, self.among, self.limit = bounds, among, limit
        self.refused: InputError | None = None
        self.accepted = False
        # (least bound first, number of the mesh, whether it is the mesh's own); coarse splits come
        # before fine ones.
        self._heap = [
            (-inf, number, False)
            for number in sorted(range(len(among)), key=lambda n: fineness(among[n]))
        ]

    @property
    def bound(self) -> float:
        """What the best of those left cannot exceed; 0 where none is."""
        return -self._heap[0][0] if self._heap else 0.0

    def next(self, above: float) -> TrainConfig | None:
        """The mesh that could be the fastest of those left; None where none could do more than
        `above`."""
        while self._heap and -self._heap[0][0] > above:
            bound, number, own = heappop(self._heap)
            mesh = self.among[number]
            if own:
                return mesh
            ceiling = inf if self.bounds.knows(mesh) else self.bounds.ceiling(mesh)
            if ceiling < -bound:
                heappush(self._heap, (-ceiling, number, False))
                continue
            try:
                if self.bounds.stored_bytes(mesh) <= self.limit:
                    heappush(self._heap, (-self.bounds.tokens_per_s(mesh), number, True))
                self.accepted = True
            except InputError as error:
                self.refused = self.refused or error
        return None
