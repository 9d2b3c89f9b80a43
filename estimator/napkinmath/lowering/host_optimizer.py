"""The optimizer on the host: masters, states and gradients in host memory, the updated parameters
copied back.

Gradients leave as they are made (lowering/gradient_hooks.py) and are accumulated there. The host's
own arithmetic is not priced. Sources: ZeRO-Offload (arXiv 2101.06840), DeepSpeed
ops/adam/cpu_adam.py; torchao optim/cpu_offload.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run, Update
from napkinmath.lowering.optimizer import applied_to, segments, trained

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.catalog.optimizer_states import Optimizer
    from napkinmath.lowering.policy import Policy


def lower_host_update(row: Optimizer, owners: list[Run], policy: Policy) -> Update:
    """Host tensors at load and at the first step, and the copies of updated parameters."""
    pinned = policy.config.offload.pinned

    def kept(run: Run) -> list[Tensor]:
        return [
            t
            for w in trained(run)
            for t in (
                _host("master", w),
                Tensor(
                    f"gradient of {w.tensor.name}",
                    w.axes,
                    w.tensor.dtype,
                    Role.GRADIENTS,
                    w.path,
                    host=True,
                ),
            )
        ]

    def states(run: Run) -> list[Tensor]:
        return [
            _host(state.name, w)
            for w in trained(run)
            for state in applied_to(row, w).states
            if state.elements is None and not state.below
        ]

    return Update(
        row,
        clip=[],
        zero=[],
        load=segments(
            "host copies", Phase.LOAD, owners, lambda run: [(ALLOC, t) for t in kept(run)]
        ),
        states=segments(
            "states on the host", Phase.STEP, owners, lambda run: [(ALLOC, t) for t in states(run)]
        ),
        work=segments(
            "updated parameters",
            Phase.STEP,
            owners,
            lambda run: (
                [
                    (
                        RUN,
                        Work(
                            None, (HostCopy(w.tensor.nbytes, to_host=False, pinned=pinned),), False
                        ),
                    )
                    for w in trained(run)
                ]
                if not (policy.config.offload.parameters and run.stage.checkpointed)
                else []
            ),
        ),
    )


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
