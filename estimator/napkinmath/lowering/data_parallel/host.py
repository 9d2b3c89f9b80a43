"""The update in host memory of parameters that are stored there (FSDP's CPUOffloadPolicy, ZeRO-Infinity)."""

from __future__ import annotations

from napkinmath.dtypes import FP32
from napkinmath.ledger import ALLOC, FREE, Phase, Role, Tensor
from napkinmath.lowering.optimizer import Update, applied_to, chosen_optimizer, segments, trained

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.policy import Policy
    from napkinmath.step import Run


def update_on_host(owned: list[Run], policy: Policy) -> Update:
    """States beside the parameters, in their type; nothing of it is on the device, and the arithmetic there is not priced."""
    row = chosen_optimizer(policy)

    def states(run: Run) -> list[Tensor]:
        return [
            Tensor(f"{s.name} of {w.tensor.name}", w.axes, s.dtype or FP32, Role.OPTIMIZER, w.path, row.source, host=True)
            for w in trained(run)
            for s in applied_to(row, w).states
            if s.elements is None and not s.below
        ]

    return Update(
        row, load=[], clip=[], work=[],
        states=segments("states on the host", Phase.STEP, owned, lambda run: [(ALLOC, t) for t in states(run)]),
        zero=segments("zero_grad", Phase.STEP, owned, lambda run: [(FREE, t) for t in run.block.gradients]),
    )  # fmt: skip
