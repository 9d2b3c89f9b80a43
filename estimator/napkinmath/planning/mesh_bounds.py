"""What a mesh costs at least, out of one recorded model for each way of splitting a layer (tensor,
context, expert degrees).

Layers cost the same wherever they stand, so a stage takes at least the kernels of its layers that
nothing can hide, and holds at least their weights, states and what they keep of the micro-batches
in flight.
"""

from __future__ import annotations

from napkinmath.answers.step_time import clock_on
from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.ir.step import side
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.lowering.parallel.stage_order import (
    head_in_layers,
    held_stages,
    in_flight,
    layers_per_stage,
    stage_order,
)
from napkinmath.lowering.rollout.plan import engine_plan
from napkinmath.models.read import read_teacher
from napkinmath.planning.layer_costs import MICRO_STEPS, LeastCost, Split, split_of
from napkinmath.timing.pipeline_time import timed_ranks, waiting_s
from napkinmath.timing.rollouts import clock_of, rollout_time
from napkinmath.timing.stragglers import slowest_factor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.config.cluster import Cluster
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Step
    from napkinmath.lowering.policy import Policy
    from napkinmath.timing.efficiency import Efficiency

    SplitKey = tuple[int, int, int, int, bool]

# Splitting a step over more GPUs makes all of them together faster only by smaller tensors being
# found in the cache.
CACHE_GAIN = 1.25


class AlikeSteps:
    """The steps of configurations that are alike but for mesh and micro-batch: one that was built
    serves another micro-batch on the same side of every size at which other operations run."""

    def __init__(self) -> None:
        self._built: dict[TrainConfig, list[tuple[Step, dict[str, object]]]] = {}

    def step(self, spec: ModelSpec, policy: Policy) -> tuple[Step, dict[str, Size]]:
        """The step of a policy, and what its sizes are bound by."""
        config = policy.config
        if not config.workload.is_plain or policy.patch is not None:  # other rules on the batch
            step = build_step(spec, policy)
            return step, step.symbols
        sizes: dict[str, object] = {"b": config.micro_batch_size, "s": policy.sequence_length}
        alike = self._built.setdefault(config.replace(micro_batch_size=1), [])
        for step, own in alike:
            if side(step.thresholds, own) == side(step.thresholds, sizes):
                return step, {**step.symbols, "b": config.micro_batch_size}
        step = build_step(spec, policy)
        alike.append((step, sizes))
        return step, step.symbols


class Bounds:
    """Lower bounds of seconds and bytes of meshes, by the degrees that split a layer; a split is
    measured when a mesh asks for it."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, speed: Efficiency) -> None:
        self.spec, self.cluster, self.speed = spec, cluster, speed
        self._known: dict[SplitKey, Split] = {}
        self._refused: dict[SplitKey, InputError] = {}
        self._rollouts: dict[tuple[int, ...], float] = {}

    # ------------------------------------------------------------ of a mesh

    def tokens_per_s(self, config: TrainConfig) -> float:
        """More than this a mesh cannot do."""
        split, parallel, steps = (
            self.split(config),
            config.parallel,
            config.gradient_accumulation_steps,
        )
        stages, chunks = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
        pace = slowest_factor(parallel.world_size)
        ranks = {rank: self._rank(split, config, rank)[0] for rank in timed_ranks(stages)}
        phases = {rank: cost.seconds(steps) for rank, cost in ranks.items()}
        seconds = max(
            max(pace * sum(device for device, _ in found), sum(host for _, host in found))
            + pace * ranks[rank].update_s
            for rank, found in phases.items()
        )
        if stages > 1:
            usual = sum(max(found) for found in phases[stages // 2]) / steps
            seconds += waiting_s(parallel.pipeline_schedule, stages, chunks, steps, usual)
        rollouts = self._rollouts_s(config)
        beside = config.workload.rollout_gpus  # they may run while the policy trains
        return num_tokens(config) / (max(seconds, rollouts) if beside else seconds + rollouts)

    def bytes(self, config: TrainConfig) -> int:
        """Fewer than this its worst rank cannot need."""
        split, most = self.split(config), 0
        for rank in timed_ranks(config.parallel.pipeline_parallel_size):
            cost, chunks = self._rank(split, config, rank)
            held = self._held(config, rank)
            kept = max(chunk.kept_bytes * held.get(index, 0) for index, chunk in enumerate(chunks))
            most = max(most, cost.stored_bytes + max(kept, cost.gradient_bytes))
        return most

    def stored_bytes(self, config: TrainConfig) -> int:
        """The same without measuring the mesh's split, out of any that cuts weights alike; 0 where
        none has been measured."""
        wanted = _key(config)
        split = next(
            (
                split
                for key, split in self._known.items()
                if (key[0], *key[2:]) == (wanted[0], *wanted[2:])
            ),
            None,
        )
        if split is None:
            return 0
        return max(
            self._rank(split, config, rank)[0].stored_bytes
            for rank in timed_ranks(config.parallel.pipeline_parallel_size)
        )

    def ceiling(self, config: TrainConfig) -> float:
        """The same without measuring the mesh's split, out of coarser ones that have been; infinite
        where none has."""
        wanted = _key(config)
        found = float("inf")
        for key, split in self._known.items():
            if refines(wanted, key):
                device_s = slowest_factor(config.parallel.world_size) * split.whole.least_s
                tokens = (
                    int(config.micro_batch_size * config.sequence_length)  # pyright: ignore[reportArgumentType]
                    * config.parallel.world_size
                    / (key[0] * key[1])
                )
                found = min(found, CACHE_GAIN * tokens / device_s)
        rollouts = self._rollouts_s(config) if found < float("inf") else 0.0
        return min(found, num_tokens(config) / rollouts) if rollouts else found

    def _rollouts_s(self, config: TrainConfig) -> float:
        """Seconds of a step's rollouts in an engine; 0 where none is, or lengths change."""
        if not config.workload.has_engine or config.batch.lengths:
            return 0.0
        batch, length = config.micro_batch_size, config.sequence_length
        assert isinstance(batch, int) and isinstance(length, int)
        rows = batch * config.gradient_accumulation_steps
        key = (rows, length, config.parallel.data_parallel_size, config.parallel.world_size)
        found = self._rollouts.get(key)
        if found is None:
            plan = engine_plan(self.spec, config, self.cluster.hardware)
            tokens = min(config.workload.completion_tokens or -(-length // 2), length)
            clock, prompt = clock_of(plan, self.speed), max(length - tokens, 1)
            found = self._rollouts[key] = rollout_time(plan, clock, rows, prompt, tokens).seconds
        return found

    def reach(self, among: list[TrainConfig], steps: AlikeSteps | None = None) -> float:
        """More than this none of the meshes can do that fits; raises InputError where all are
        refused."""
        best, accepted, refused = 0.0, False, None
        for config in sorted(among, key=fineness):
            if self.stored_bytes(config) > self.cluster.hardware.memory_bytes:
                continue  # whatever its split of the sequence takes
            try:
                if self.ceiling(config) == float("inf"):
                    self.split(config, steps)
            except InputError as error:
                refused = refused or error
                continue
            accepted = True
            known = self.knows(config)
            most = self.tokens_per_s(config) if known else self.ceiling(config)
            if most <= best:
                continue
            least = self.bytes(config) if known else self.stored_bytes(config)
            if least <= self.cluster.hardware.memory_bytes:
                best = most
        if refused is not None and not accepted:
            raise refused
        return best

    def knows(self, config: TrainConfig) -> bool:
        """Whether the split of a mesh has been measured."""
        return _key(config) in self._known

    def _rank(
        self, split: Split, config: TrainConfig, rank: int
    ) -> tuple[LeastCost, list[LeastCost]]:
        """(cost of a rank, of each of its chunks' layers)."""
        stages = config.parallel.pipeline_parallel_size
        chunks, own, last = [split.whole], [0], 0
        if stages > 1:
            head = head_in_layers(self.spec, find_stack(config.stack))
            counts = layers_per_stage(self.spec.num_layers, config.parallel, head)
            own, last = held_stages(config.parallel, rank), len(counts) - 1
            chunks = [split.between(sum(counts[:index]), sum(counts[: index + 1])) for index in own]
        whole = LeastCost()
        for part in [
            *chunks,
            *([split.before] if 0 in own else []),
            *([split.after] if last in own else []),
        ]:
            whole.add(part)
        return whole, chunks

    def _held(self, config: TrainConfig, rank: int) -> dict[int, int]:
        """Micro-batches of each chunk whose backward has not run, at most."""
        if config.parallel.pipeline_parallel_size == 1:
            return {0: 1}
        return in_flight(stage_order(config.parallel, rank, config.gradient_accumulation_steps))

    # ------------------------------------------------------------ of a split

    def split(self, config: TrainConfig, steps: AlikeSteps | None = None) -> Split:
        """The costs under a mesh's split of a layer; raises InputError where an engine refuses
        it."""
        key = _key(config)
        if key in self._refused:
            raise self._refused[key]
        found = self._known.get(key)
        if found is None:
            try:
                found = self._known[key] = self._measure(config, steps or AlikeSteps())
            except InputError as error:
                self._refused[key] = error
                raise
        return found

    def _measure(self, config: TrainConfig, steps: AlikeSteps) -> Split:
        """One recorded model without a pipeline, its stages' ranks beside the data-parallel
        ones."""
        parallel = config.parallel
        alone = parallel.data_parallel is DataParallel.NONE
        whole = parallel.replace(
            pipeline_parallel_size=1,
            virtual_pipeline_size=1,
            pipeline_schedule=ParallelConfig().pipeline_schedule,
            data_parallel_size=(
                1 if alone else parallel.data_parallel_size * parallel.pipeline_parallel_size
            ),
        )
        micro_steps = 1 if config.optimizer_in_backward else MICRO_STEPS
        policy = resolve(
            self.spec,
            config.replace(parallel=whole, gradient_accumulation_steps=micro_steps),
            self.cluster.hardware,
            teacher=read_teacher(config),
        )
        step, symbols = steps.step(self.spec, policy)
        return split_of(step, symbols, clock_on(self.cluster, parallel, self.speed, policy))


def fineness(config: TrainConfig) -> int:
    """Ranks that a layer is spread over."""
    return config.parallel.tensor_parallel_size * config.parallel.context_parallel_size


def refines(fine: SplitKey, coarse: SplitKey) -> bool:
    """Whether a split cuts the pieces of another and can only be slower for it.

    Experts may be faster spread, and attention over more parts of a sequence is another kernel or
    sees less of its window. Ranks that share an expert's products are as many, or cut it as often as
    the rest of the layer is cut.
    """
    alike = (*fine[1:3], *fine[4:]) == (*coarse[1:3], *coarse[4:]) and fine[0] % coarse[0] == 0
    return alike and (fine[3] == coarse[3] or fine[3] * coarse[0] == coarse[3] * fine[0])


def _key(config: TrainConfig) -> SplitKey:
    """What a layer's split depends on: its degrees, and whether there are other ranks to share
    anything with."""
    parallel = config.parallel
    return (
        parallel.tensor_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_parallel_size,
        parallel.expert_tensor_ranks,
        parallel.data_parallel is DataParallel.NONE,
    )


def num_tokens(config: TrainConfig) -> int:
    """Tokens of a step over all ranks."""
    return (
        int(config.micro_batch_size * config.sequence_length)  # pyright: ignore[reportArgumentType]
        * config.gradient_accumulation_steps
        * config.parallel.data_parallel_size
    )


# ---------------------------------------------------------------- out of a step
