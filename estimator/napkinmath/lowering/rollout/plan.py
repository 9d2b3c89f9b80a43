"""The placement of an inference engine that generates a step's rollouts: its memory on a rank, and
how many sequences come to it. What the user leaves open is the trainer's own way
(catalog/rollout_trainers.py)."""

from __future__ import annotations

from napkinmath.base.command_line import posix
from napkinmath.base.dtypes import find_dtype
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, format_bytes
from napkinmath.catalog.engines import find_engine
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.quantization import find_format
from napkinmath.catalog.rollout_trainers import find_rollout_trainer
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import BITSANDBYTES_4BIT
from napkinmath.config.workload_config import RolloutOffload, RolloutSync
from napkinmath.lowering.rollout.pages import pages_of
from napkinmath.lowering.rollout.served import Serving, served

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.catalog.engines import Engine
    from napkinmath.catalog.rollout_trainers import RolloutTrainer
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.config.workload_config import Workload
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.weight_format import WeightFormat
    from napkinmath.lowering.rollout.served import ServedModel

DEFAULT_BUCKET = 2 * GIB  # verl's, where --rollout-sync bucket is asked of another trainer
_MORE_RANKS = (2, 4, 8)  # of one engine in a machine
_LOGIT_BYTES = 10  # of a row: 16 bits, their fp32 copy, its softmax


class EnginePlan(Record):
    """An engine of a rollout: one rank's bytes, and how many sequences come to it."""

    model: ServedModel
    engine: Engine
    trainer: RolloutTrainer
    """What decides where the user says nothing."""
    hardware: Hardware
    apart: bool
    """On GPUs of its own."""
    share: float
    sleep: int
    trained_on: int
    """Data-parallel ranks of the policy."""
    among: int
    """GPUs that the engines are spread over."""
    prefill_tokens: int
    sequences: int
    """At once at most."""
    forward_bytes: int
    graph_bytes: int
    sync: RolloutSync
    batches: int
    """In which layers go by `RolloutSync.LAYER`; 0: one by one."""
    bucket_bytes: int
    """Of the buffer of `RolloutSync.BUCKET`."""
    offload: RolloutOffload
    staleness: int
    """Steps that rollouts may be behind; from 1 on they run beside the training."""
    group: int
    """Completions of one prompt."""
    draft: tuple[int, float] | None
    lengths: tuple[int, ...]
    """A sample of whole sequences, sorted; () where all are as long as they may be."""

    @property
    def weight_bytes(self) -> int:
        """Of one rank."""
        return self.model.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """What the share leaves, after weights and one forward."""
        return int(self.share * self.hardware.memory_bytes) - self.weight_bytes - self.forward_bytes

    @property
    def sequences_for_each(self) -> float:
        """Sequences that an engine generates for each that a rank of the policy trains on."""
        return self.trained_on * self.model.ranks / self.among

    @property
    def engines(self) -> int:
        """That generate at once."""
        return self.among // self.model.ranks

    def fitting(self, tokens: int, prompt: int = 0) -> int:
        """Sequences of so many tokens that the cache holds at once; the pages of a `prompt` are
        there once for its group."""
        pages = pages_of(self.model, self.engine.block_tokens)
        shared = pages.of_sequence(prompt) if prompt and self.group > 1 else 0
        own = max(1, pages.of_sequence(tokens) - shared)
        return int(pages.number(self.cache_bytes) / (own + shared / self.group))


def engine_plan(spec: ModelSpec, config: TrainConfig, hardware: Hardware | None) -> EnginePlan:
    """The engine that a workload asks for. Raises InputError for placements that cannot be, with
    the nearest that can."""
    workload = config.workload
    trainer = find_rollout_trainer(workload.rollout_trainer or "trl")
    engine = find_engine(workload.rollout or "vllm")
    apart, gpus = _own_gpus(workload)
    _check_place(trainer, workload)
    machine = apart or hardware
    if machine is None:
        raise InputError(
            f"--rollout {engine.name} takes a share of a GPU's memory; name it with --gpu NAME"
        )
    among = gpus or config.parallel.world_size
    ranks = _ranks(workload, trainer, among)
    if lacking := engine.lacks(machine.gpu, ""):
        raise InputError(f"--rollout {engine.name}: {lacking.replace(' it ', ' GPUs ', 1)}; use hf")
    halves = config.precision.value.startswith("fp16")
    dtype = "fp16" if halves else engine.computes_in(machine.gpu)
    packs = trainer.packed and apart is None
    weights = _packed(config) if packs else None

    def over(count: int, packing: WeightFormat | None) -> ServedModel:
        try:
            return served(spec, Serving(weights=packing, dtype=dtype, ranks=count))
        except InputError as error:  # the degree is the engine's, not the policy's
            raise InputError(f"{error}".replace("tensor_parallel_size", "rollout_tp")) from None

    model = over(ranks, weights)
    defaults = engine.defaults_on(machine.gpu)
    sequences, chunk = defaults.sequences, defaults.prefill_tokens
    if apart is None:
        sequences = min(sequences, trainer.sequences or sequences)
        chunk = trainer.prefill_tokens or chunk
    first, each = engine.graph_bytes
    graphs_to = engine.graphs_to(machine.gpu, spec.family)
    sleep = trainer.sleep if workload.rollout_sleep is None else workload.rollout_sleep
    plan = EnginePlan(
        model=model,
        engine=engine,
        trainer=trainer,
        hardware=machine,
        apart=apart is not None,
        share=workload.rollout_memory or (trainer.own_share if apart else trainer.memory_share),
        sleep=0 if apart else sleep,
        trained_on=config.parallel.data_parallel_size,
        among=among,
        prefill_tokens=chunk,
        sequences=sequences,
        forward_bytes=_forward_bytes(model, chunk, sequences),
        graph_bytes=first + each * engine.captured(min(graphs_to, sequences)),
        sync=_sync(config, trainer),
        batches=workload.rollout_batches,
        bucket_bytes=workload.rollout_bucket or trainer.bucket_bytes or DEFAULT_BUCKET,
        offload=RolloutOffload.NONE if apart else workload.rollout_offload or trainer.offload,
        staleness=_staleness(workload, trainer) if apart else 0,
        group=workload.rollout_group,
        draft=workload.rollout_draft,
        lengths=tuple(sorted(config.batch.lengths)),
    )
    _check_share(plan, config, lambda count, own: over(count, None if own else weights))
    return plan


def _packed(config: TrainConfig) -> WeightFormat | None:
    """A base of 4 bits by bitsandbytes (trl 1.16 vllm_generation.py quantization)."""
    found = find_format(config.quantization.format) if config.quantization is not None else None
    return found if found is not None and found.name in BITSANDBYTES_4BIT else None


def _check_place(trainer: RolloutTrainer, workload: Workload) -> None:
    """Raises InputError where a trainer's engines have GPUs of their own and none are named."""
    if trainer.apart and not workload.rollout_gpus and not workload.rollout_memory:
        raise InputError(
            f"--rollout-trainer {trainer.name} puts its engines on GPUs of their own; add"
            " --rollout-gpus, e.g. 2xH100, or --rollout-memory 0.5 to share the policy's"
        )


def _ranks(workload: Workload, trainer: RolloutTrainer, among: int) -> int:
    """Tensor-parallel ranks of an engine; a trainer's own number only where it divides the GPUs."""
    ranks = workload.rollout_tp or (1 if among % trainer.tp else trainer.tp)
    if among % ranks:
        nearest = [str(n) for n in range(1, among + 1) if among % n == 0]
        raise InputError(
            f"--rollout-tp {ranks} does not divide the {among} GPUs of the engines; use one of"
            f" {', '.join(nearest)}"
        )
    return ranks


def _staleness(workload: Workload, trainer: RolloutTrainer) -> int:
    given = workload.rollout_staleness
    return trainer.staleness if given is None else given


def _sync(config: TrainConfig, trainer: RolloutTrainer) -> RolloutSync:
    given = config.workload.rollout_sync
    if given is None and config.workload.rollout_bucket:
        return RolloutSync.BUCKET
    if given is None and config.workload.rollout_batches:
        return RolloutSync.LAYER
    kind, adapts = config.parallel.data_parallel.value, config.adapter is not None
    return given or trainer.sync_of(kind, adapter=adapts)


def _own_gpus(workload: Workload) -> tuple[Hardware | None, int]:
    """(the GPU, how many) of engines that are apart."""
    given = workload.rollout_gpus
    if not given:
        return None, 0
    count, _, name = given.lower().partition("x")
    if not (count.isdecimal() and int(count) and name):
        raise InputError(f"--rollout-gpus {given!r} is not a number of GPUs; write e.g. 2xH100")
    return find_hardware(name), int(count)


def _forward_bytes(model: ServedModel, chunk: int, sequences: int) -> int:
    """The most that a forward holds: a chunk through the widest product, or all logits."""
    widest = max(
        p.n + p.n // 2 for layer in model.layers for p in layer.products if not p.last_tokens
    )
    size = find_dtype(model.dtype).bits // 8
    return max(
        chunk * size * (widest + 3 * model.hidden), sequences * model.vocabulary * _LOGIT_BYTES
    )


def _check_share(
    plan: EnginePlan, config: TrainConfig, over: Callable[[int, bool], ServedModel]
) -> None:
    """Raises InputError where the share holds no sequence, with what does; `over` is the model over
    so many ranks, on the policy's GPUs or on its own."""
    length = config.sequence_length
    if not isinstance(length, int) or plan.fitting(length) >= 1:
        return
    needed, whole = _least_share(plan, length), plan.hardware.memory_bytes
    given = config.workload.rollout_memory
    way = (
        f"--rollout-memory {needed:g} is enough"
        if needed <= 1
        else _split(plan, length, given or plan.trainer.own_share, over)
    )
    raise InputError(
        f"--rollout-memory {plan.share:g} of {whole / GIB:.1f} GiB holds weights of"
        f" {format_bytes(plan.weight_bytes)} and not the cache of one sequence of {length:,} tokens;"
        f" {way}"
    )


def _least_share(plan: EnginePlan, length: int) -> float:
    """Of the GPU, for weights, one forward and the cache of one sequence."""
    pages = pages_of(plan.model, plan.engine.block_tokens)
    least = plan.weight_bytes + plan.forward_bytes + pages.of_sequence(length) * pages.block_bytes
    return -(-100 * least // plan.hardware.memory_bytes) / 100


def _split(
    plan: EnginePlan, length: int, own_share: float, over: Callable[[int, bool], ServedModel]
) -> str:
    """The fewest ranks of one engine that hold a sequence: on the GPUs that it has, or on its own."""
    name = plan.hardware.gpu.name
    for ranks in _MORE_RANKS:
        own = bool(plan.among % ranks)
        flags = f"--rollout-tp {ranks}"
        if own:
            flags = f"--rollout-gpus {posix(f'{ranks}x{name}')} {flags}"
        try:
            model = over(ranks, own)
        except InputError:  # heads that do not divide
            continue
        held = _forward_bytes(model, plan.prefill_tokens, plan.sequences)
        needed = _least_share(plan.replace(model=model, forward_bytes=held), length)
        if needed > (own_share if own else plan.share):
            flags = f"{flags} --rollout-memory {needed:g}"
        if ranks > plan.model.ranks and needed <= 1:
            return f"it does not fit {name}; {flags} is enough"
    return f"{_MORE_RANKS[-1]} of {name} do not hold it; name larger GPUs with --rollout-gpus"
