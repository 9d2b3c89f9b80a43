"""The optimizer on the host: masters, states and gradients in host memory, the updated parameters
copied back.

Gradients leave as they are made (lowering/gradient_hooks.py) and are accumulated there; the stack's
own buffers stay on the device, and are copied to the host in the step. The update
is one vectorised pass, and a second one that casts the parameter. Sources: ZeRO-Offload (arXiv 2101.06840), DeepSpeed
ops/adam/cpu_adam.py; torchao optim/cpu_offload.py; Megatron-LM
core/optimizer/cpu_offloading/hybrid_optimizer.py _set_sub_optimizer_grads.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import ceil_div
from napkinmath.catalog.optimizers import applied_to
from napkinmath.ir.costs import HostCopy, HostPass
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run, Update, segments
from napkinmath.lowering.gradient_buffers import main_gradient
from napkinmath.lowering.optimizer_traffic import one_pass_bits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.catalog.optimizer_states import Optimizer
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def lower_host_update(row: Optimizer, owners: list[Run], policy: Policy) -> Update:
    """Host tensors at load and at the first step, and the copies of updated parameters."""

    def kept(run: Run) -> list[Event]:
        found = [(_host("master", w), _gradient(w, policy)) for w in run.trained]
        buffers = [t for w in run.trained for t in main_gradient(w, policy)]
        return [(ALLOC, t) for t in (*buffers, *(t for pair in found for t in pair))]

    def states(run: Run) -> list[Event]:
        return [(ALLOC, t) for t in _states(run, row)]

    def updated(run: Run) -> list[Event]:
        return [*_buffers_copied(run, policy), *_passes(run, row), *_copied_back(run, policy)]

    return Update(
        row,
        clip=[],
        zero=[],
        load=segments("host copies", Phase.LOAD, owners, kept),
        states=segments("states on the host", Phase.STEP, owners, states),
        work=segments("updated parameters", Phase.STEP, owners, updated),
    )


def _states(run: Run, row: Optimizer) -> list[Tensor]:
    return [
        _host(state.name, w)
        for w in run.trained
        for state in applied_to(row, w.axes, w.kind).states
        if state.elements is None and not state.below
    ]


def _gradient(weight: Weight, policy: Policy) -> Tensor:
    """As wide as the parameter, or as the fp32 copy that buffers are copied for."""
    name = f"gradient of {weight.tensor.name}"
    dtype = FP32 if policy.keeps_main_gradients else weight.tensor.dtype
    return Tensor(name, weight.axes, dtype, Role.GRADIENTS, weight.path, host=True)


def _buffers_copied(run: Run, policy: Policy) -> list[Event]:
    """What the stack summed on the device, on its way to the host."""
    if not policy.keeps_main_gradients:
        return []
    bits, pinned = policy.main_gradient_dtype.bits, policy.config.offload.pinned
    summed = [w for w in run.trained if policy.shards or w.tensor.dtype is not FP32]
    sizes = [ceil_div(w.elements * bits, 8) for w in summed]
    return [
        (RUN, Work(None, (HostCopy(size, to_host=True, pinned=pinned),), False)) for size in sizes
    ]


def _passes(run: Run, row: Optimizer) -> list[Event]:
    """The update in fp32, and the new parameter read and written in its own type."""
    bits = one_pass_bits(row) + FP32.bits
    return [
        (RUN, Work(None, (HostPass(ceil_div(w.elements * bits, 8) + w.tensor.nbytes),), False))
        for w in run.trained
    ]


def _copied_back(run: Run, policy: Policy) -> list[Event]:
    """Updated parameters on their way to the device, but for layers that are streamed."""
    offload = policy.config.offload
    if offload.parameters and run.stage.checkpointed:
        return []
    copies = (HostCopy(w.tensor.nbytes, to_host=False, pinned=offload.pinned) for w in run.trained)
    return [(RUN, Work(None, (copy,), False)) for copy in copies]


def _host(name: str, weight: Weight) -> Tensor:
    """An fp32 tensor of a parameter's shape in host memory."""
    return Tensor(
        f"{name} of {weight.tensor.name}",
        weight.axes,
        FP32,
        Role.MASTER if name == "master" else Role.OPTIMIZER,
        weight.path,
        host=True,
    )
