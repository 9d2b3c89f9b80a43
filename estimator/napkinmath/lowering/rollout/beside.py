"""An inference engine beside a training: what it holds on the policy's GPUs, or on its own, and the
phases of a step that it adds.

Sources: trl 1.16 generation/vllm_generation.py VLLMGeneration: one engine for
`tensor_parallel_size` ranks in the same process, whose sync_weights materializes one parameter at a
time. vllm 0.11 v1/worker/gpu_worker.py sleep, wake_up: level 1 keeps the weights in host memory,
level 2 drops them. Both free the cache, graphs stay.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, UINT8, find_dtype
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, format_bytes
from napkinmath.catalog.engines import find_engine
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.hardware import Hardware
from napkinmath.ir.costs import Collective, EngineRun, HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment
from napkinmath.lowering.rollout.pages import pages_of
from napkinmath.lowering.rollout.served import Serving, served

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.catalog.engines import Engine
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.config.workload_config import Workload
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.rollout.served import ServedModel

_LOGIT_BYTES = 10  # of a row: 16 bits, their fp32 copy, its softmax


class EnginePlan(Record):
    """An engine of a rollout: one rank's bytes, and how many sequences come to it."""

    model: ServedModel
    engine: Engine
    hardware: Hardware
    apart: bool
    """On GPUs of its own."""
    share: float
    sleep: int
    gpus: int
    """GPUs of all engines that are apart; 0 beside the policy."""
    trained_on: int
    """Data-parallel ranks of the policy."""
    prefill_tokens: int
    sequences: int
    """At once at most."""
    forward_bytes: int
    graph_bytes: int

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
        if not self.apart:
            return self.model.ranks
        return self.trained_on * self.model.ranks / self.gpus

    def fitting(self, tokens: int) -> int:
        """Sequences of so many tokens that the cache holds at once."""
        pages = pages_of(self.model, self.engine.block_tokens)
        return pages.number(self.cache_bytes) // max(1, pages.of_sequence(tokens))


def engine_plan(spec: ModelSpec, config: TrainConfig, hardware: Hardware | None) -> EnginePlan:
    """The engine that a workload asks for. Raises InputError for placements that cannot be, with
    the nearest that can."""
    workload = config.workload
    apart, gpus = _own_gpus(workload)
    machine = apart or hardware
    if machine is None:
        raise InputError(
            f"--rollout {workload.rollout} takes a share of a GPU's memory; name it with --gpu NAME"
        )
    world, ranks = config.parallel.data_parallel_size, workload.rollout_tp
    among = gpus or world
    if among % ranks:
        nearest = [str(n) for n in range(1, among + 1) if among % n == 0]
        raise InputError(
            f"--rollout-tp {ranks} does not divide the {among} GPUs of the engines; use one of"
            f" {', '.join(nearest)}"
        )
    engine = find_engine(workload.rollout)
    dtype = "fp16" if config.precision.value.startswith("fp16") else "bf16"
    model = served(spec, Serving(dtype=dtype, ranks=ranks))
    defaults = engine.defaults_on(machine.gpu)
    share = workload.rollout_memory or (0.9 if apart else 0.3)
    sequences = min(defaults.sequences, 256) if apart is None else defaults.sequences
    chunk = 4096 if apart is None else defaults.prefill_tokens
    first, each = engine.graph_bytes
    plan = EnginePlan(
        model=model,
        engine=engine,
        hardware=machine,
        apart=apart is not None,
        share=share,
        sleep=workload.rollout_sleep,
        gpus=gpus,
        trained_on=world,
        prefill_tokens=chunk,
        sequences=sequences,
        forward_bytes=_forward_bytes(model, chunk, sequences),
        graph_bytes=first + each * engine.captured(min(defaults.graphs_to, sequences)),
    )
    _check_share(plan, config)
    return plan


def _own_gpus(workload: Workload) -> tuple[Hardware | None, int]:
    """(the GPU, how many) of engines that are apart."""
    given = workload.rollout_gpus
    if not given:
        return None, 0
    count, _, name = given.lower().partition("x")
    if not (count.isdigit() and int(count) and name):
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


def _check_share(plan: EnginePlan, config: TrainConfig) -> None:
    """Raises InputError where the share holds no sequence, with the share that does."""
    length = config.sequence_length
    if not isinstance(length, int) or plan.fitting(length) >= 1:
        return
    pages = pages_of(plan.model, plan.engine.block_tokens)
    whole = plan.hardware.memory_bytes
    least = plan.weight_bytes + plan.forward_bytes + pages.of_sequence(length) * pages.block_bytes
    needed = -(-100 * least // whole) / 100
    way = (
        f"--rollout-memory {needed:g} is enough"
        if needed <= 1
        else f"it does not fit {plan.hardware.gpu.name}; split it with --rollout-tp"
    )
    raise InputError(
        f"--rollout-memory {plan.share:g} of {whole / GIB:.1f} GiB holds weights of"
        f" {format_bytes(plan.weight_bytes)} and not the cache of one sequence of {length:,} tokens;"
        f" {way}"
    )


class _Held:
    """The engine's tensors on a rank of the policy."""

    def __init__(self, plan: EnginePlan) -> None:
        def tensor(name: str, nbytes: int, role: Role = Role.ENGINE) -> Tensor:
            return Tensor(name, (nbytes,), UINT8, role, source=plan.engine.source)

        self.weights = tensor("engine weights", plan.weight_bytes)
        self.cache = tensor("engine cache", max(plan.cache_bytes, 0))
        self.graphs = tensor("engine CUDA graphs", plan.graph_bytes)
        self.forward = tensor("engine forward", plan.forward_bytes)


def engine_phases(
    plan: EnginePlan, runs: list[Run], policy: Policy, sizes: tuple[Size, Size, Size]
) -> tuple[list[Segment], list[Segment]]:
    """(what is loaded, what each step's rollout is) for `sizes` of rows, prompt and completion."""
    held = _Held(plan)
    rows, prompt, tokens = sizes
    work: Event = (RUN, Work(None, (EngineRun(plan, rows, prompt, tokens),), False))
    if plan.apart:
        return [], [*_synchronized(plan, runs, policy), _segment("generation", [work])]
    sleeps = plan.sleep > 0
    graphs: list[Event] = [(ALLOC, held.graphs)]
    stays: list[Event] = [] if sleeps else [(ALLOC, held.weights), (ALLOC, held.cache)]
    load = [Segment(f"{plan.engine.name} engine", Phase.LOAD, [*stays, *graphs])]
    if plan.sleep == 1:
        kept = Tensor("engine weights asleep", (plan.weight_bytes,), UINT8, Role.ENGINE, host=True)
        load[0].events.append((ALLOC, kept))
    woken = _copied(plan, to_host=False) if plan.sleep == 1 else []
    rollout: list[Segment] = []
    if sleeps:
        rollout.append(_segment("engine wakes", [(ALLOC, held.weights), *woken]))
    rollout += _synchronized(plan, runs, policy)
    cache: list[Event] = [(ALLOC, held.cache)] if sleeps else []
    run: list[Event] = [*cache, (ALLOC, held.forward), work, (FREE, held.forward)]
    rollout.append(_segment("generation", run))
    if sleeps:
        asleep = _copied(plan, to_host=True) if plan.sleep == 1 else []
        ends: list[Event] = [(FREE, held.cache), *asleep, (FREE, held.weights)]
        rollout.append(_segment("engine sleeps", ends))
    return load, rollout


def _segment(name: str, events: list[Event]) -> Segment:
    return Segment(f"rollout: {name}", Phase.EVALUATE, events)


def _copied(plan: EnginePlan, *, to_host: bool) -> list[Event]:
    """Sleep level 1 keeps the weights in pinned host memory."""
    return [
        (RUN, Work(None, (HostCopy(plan.weight_bytes, to_host=to_host, overlaps=False),), False))
    ]


def _synchronized(plan: EnginePlan, runs: list[Run], policy: Policy) -> list[Segment]:
    """Adapters are merged, then the policy's parameters go to the engine one at a time, gathered
    where they are sharded."""
    found: list[Segment] = []
    for run in runs:
        own = [w for w in run.block.weights if not w.buffer and not w.tied_to]
        merged = [e for w in own for e in _merged(w, policy)]
        sent = [e for w in own for e in _sent(w, plan, policy)]
        for name, events in (("adapters merged in", merged), ("weights to the engine of", sent)):
            if events:
                label = f"rollout: {name} {run.name}"
                found.append(run.segment(label, Phase.EVALUATE, events))
    return found


def _merged(weight: Weight, policy: Policy) -> list[Event]:
    """peft tuners/lora/layer.py get_delta_weight: an adapter's product, in fp32."""
    if not policy.targets(weight.path.removesuffix(".weight"), weight.kind):
        return []
    delta = Tensor("adapters' product", weight.axes, FP32, Role.WORKSPACE, weight.path)
    return [
        (ALLOC, delta),
        (RUN, Work(None, (Move(3 * delta.nbytes, 3),), False)),
        (FREE, delta),
    ]


def _sent(weight: Weight, plan: EnginePlan, policy: Policy) -> list[Event]:
    """One parameter: gathered, copied, dropped."""
    name, dtype = "weight on its way to the engine", find_dtype(plan.model.dtype)
    whole = Tensor(name, weight.axes, dtype, Role.COMMUNICATION, weight.path)
    copy: list[Event] = [(RUN, Work(None, (Move(2 * whole.nbytes),), False))]
    ranks = policy.config.parallel.data_parallel_size if policy.shards else 1
    if ranks == 1:
        return copy
    gather = Collective("all-gather", whole.nbytes, ranks=ranks, axis="data", overlaps=False)
    work: Event = (RUN, Work(None, (gather,), False))
    return [(ALLOC, whole), work, *copy, (FREE, whole)]
