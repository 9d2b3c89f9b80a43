"""What ZeRO stage 3 stores of a run's parameters: partitions that stay, and what gathers make of
them.

Source: DeepSpeed 0.19 runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, UINT8
from napkinmath.base.expr import Bindings, Size, ceil_div
from napkinmath.ir.costs import HOOK_DISPATCHES, Collective, Disk, Dispatch, HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work, allocs
from napkinmath.ir.step import Run, Segment
from napkinmath.lowering.data_parallel.flat import partition
from napkinmath.lowering.data_parallel.stored import packs_on_device
from napkinmath.lowering.data_parallel.streams import GATHERED, lends
from napkinmath.lowering.data_parallel.zero import SOURCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


# Kinds of weights that torch's linear multiplies by.
_MULTIPLIED = ("linear", "head", "projection", "router")


class Partitioned:
    """What stage 3 makes of one run's weights: partitions that stay, and the buffers of a
    gather."""

    __slots__ = (
        "gathered",
        "gradients",
        "kept",
        "moved",
        "multiplied",
        "output",
        "parts",
        "run",
        "small",
        "stay",
    )

    def __init__(self, run: Run, policy: Policy, sizes: dict[str, int], threshold: int) -> None:
        self.run = run
        bind = Bindings({**sizes, **dict(run.stage.symbols)})
        weights = [w for w in run.block.weights if not w.buffer and not w.tied_to]
        self.stay = [w for w in run.block.weights if w.buffer and not w.tied_to]
        self.small = [w for w in weights if not w.constants and bind(w.elements) <= threshold]
        self.parts = _parts(run, weights, policy)
        self.gathered = [
            _tensor(f"gathered {w.tensor.name}", w, w.tensor.axes, w.tensor.role)
            for w in weights
            if w not in self.small
        ]
        products = {w.path for w in weights if w.kind in _MULTIPLIED}
        self.multiplied = [t for t in self.gathered if t.module in products]
        self.moved: Size = 0
        for tensor in self.gathered:
            self.moved = self.moved + tensor.nbytes
        name, size = "all-gather output", (self.moved,)
        self.output = Tensor(
            name, size, UINT8, Role.COMMUNICATION, run.block.name, SOURCE, use=GATHERED
        )
        lends(self.gathered, policy.config.parallel)
        self.gradients = _gradient_partition(run, policy)
        self.kept = 0  # copies of the run, its last ones, that stay gathered until their backward

    def gather(self, policy: Policy, *, backward: bool) -> list[Event]:
        """Partitions are gathered into a flat output, from which each parameter is copied."""
        if not self.gathered:
            return []
        ranks = policy.config.parallel.shard_degree
        zero, offload = policy.config.parallel.zero, policy.config.offload
        costs: list[Cost] = []
        if offload.parameters:
            costs.append(HostCopy(self.moved // ranks, to_host=False, pinned=offload.pinned))
            if "parameters" in policy.config.parallel.nvme:
                costs.append(Disk(self.moved // ranks))
        if backward and zero.hpz_partition_size > 1:
            ranks = zero.hpz_partition_size
        sent = self.moved // 2 if zero.quantized_weights else self.moved
        costs += [Collective("all-gather", sent, ranks=ranks, axis="shard"), Move(2 * self.moved)]
        return [
            (ALLOC, self.output),
            *((ALLOC, t) for t in self.gathered),
            (RUN, Work(None, costs, backward)),
            (FREE, self.output),
        ]

    def hooks(self, *, backward: bool) -> Event:
        """The host's bookkeeping of every parameter, in hooks of its module."""
        count = sum(not w.buffer and not w.tied_to for w in self.run.block.weights)
        hooks = Dispatch(HOOK_DISPATCHES[backward] * count, bookkeeping=True)
        return RUN, Work(None, (hooks,), False)

    def release(self) -> list[Event]:
        """Gathered parameters go."""
        return [(FREE, t) for t in self.gathered]

    def release_but_products(self) -> list[Event]:
        """The same, but for weights of which torch's linears keep a view."""
        return [(FREE, t) for t in self.gathered if t not in self.multiplied]

    def release_products(self) -> list[Event]:
        """Those views go."""
        return [(FREE, t) for t in self.multiplied]


def _parts(run: Run, weights: list[Weight], policy: Policy) -> list[Tensor]:
    """A flat partition of each type, and the rank's rows of packed weights."""
    parallel, on_host = policy.config.parallel, policy.config.offload.parameters
    stored = [w for w in weights if not w.constants]
    found: list[Tensor] = []
    for dtype in dict.fromkeys(w.tensor.dtype for w in stored):
        own = [w for w in stored if w.tensor.dtype is dtype]
        name, role = f"{dtype} partition", Role.WEIGHTS
        found.append(partition(name, own, parallel, dtype, role, run, host=on_host))
    for w in weights:
        if w.constants:
            rows = ceil_div(w.tensor.axes[0], parallel.shard_degree)
            axes = (rows, *w.tensor.axes[1:])
            found.append(_tensor(w.tensor.name, w, axes, Role.WEIGHTS, host=on_host))
    return found


def _gradient_partition(run: Run, policy: Policy) -> Tensor | None:
    """The rank's part of the gradients of a run, in the type in which they add up (stage3.py
    grad_partitions_flat_buffer): the parameters', or fp32 by `data_types.grad_accum_dtype`."""
    trained = run.trained
    if not trained:
        return None
    parallel, on_host = policy.config.parallel, policy.config.offload.optimizer
    dtype = FP32 if parallel.reduce_dtype == "fp32" else trained[0].tensor.dtype
    name = "gradient partition"
    return partition(name, trained, parallel, dtype, Role.GRADIENTS, run, host=on_host)


def _tensor(
    name: str, weight: Weight, axes: tuple[Size, ...], role: Role, *, host: bool = False
) -> Tensor:
    """Something made of a weight, in its type."""
    return Tensor(name, axes, weight.tensor.dtype, role, weight.path, SOURCE, host=host)


def loading(pieces: list[Partitioned], owned: list[Run], policy: Policy) -> list[Segment]:
    """deepspeed.zero.Init: each parameter is whole on the device until its partition is made; then
    fp32 partitions (those `owned`) and gradients' ones.

    A model that was packed on the device is there whole before the first is made: transformers 5.23
    modeling_utils.py get_init_context has no zero.Init for a quantized one.
    """
    found: list[Segment] = []
    splits: list[Segment] = []
    at_once = packs_on_device(policy)
    for piece, mine in zip(pieces, owned, strict=True):
        run = piece.run
        wholes = [_whole(t) for t in piece.gathered]
        loaded = [t for w in run.block.weights if not w.tied_to for t in w.constants]
        loaded += [w.tensor for w in piece.stay]
        events: list[Event] = [(ALLOC, t) for t in piece.parts]
        if at_once and wholes:
            first: list[Event] = [(ALLOC, t) for t in (*wholes, *loaded)]
            found.append(run.segment(f"weights of {run.name}", Phase.LOAD, first))
            events += [(FREE, t) for t in wholes]
        else:
            events += [each for t in wholes for each in ((ALLOC, t), (FREE, t))]
            events += allocs(*loaded)
        events += allocs(*_staying(piece, mine, policy))
        into = splits if at_once else found
        into.append(run.segment(f"partitions of {run.name}", Phase.LOAD, events))
    return found + splits


def _whole(gathered: Tensor) -> Tensor:
    """A parameter as it comes to the device."""
    name = f"whole {gathered.name.removeprefix('gathered ')}"
    return Tensor(name, gathered.axes, gathered.dtype, Role.WEIGHTS, gathered.module)


def _staying(piece: Partitioned, mine: Run, policy: Policy) -> list[Tensor]:
    """What a rank keeps of a run beside its loaded weights and their partitions."""
    run, shards = piece.run, policy.config.parallel.zero.hpz_partition_size
    stay = [_tensor(f"{w.tensor.name}, always whole", w, w.axes, Role.WEIGHTS) for w in piece.small]
    # stage3.py _create_fp32_partitions: partitions of the masters' type are the masters.
    apart = policy.config.offload.optimizer or policy.config.offload.parameters
    stored = set[object]() if apart else {part.dtype for part in piece.parts}
    stay += [w.tensor for w in mine.block.weights if w.tensor.dtype not in stored]
    stay += [piece.gradients] if piece.gradients is not None else []
    if shards > 1 and piece.gathered:
        source, name = f"{SOURCE} zero_hpz_partition_size", "secondary partition"
        size, module = (piece.moved // shards,), run.block.name
        stay.append(Tensor(name, size, UINT8, Role.WEIGHTS, module, source))
    return stay
