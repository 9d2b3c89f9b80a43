"""Buffers in which a stack adds up gradients, and which stay through the run (Megatron-LM
distributed/param_and_grad_buffer.py main_grad)."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.ledger import Role, Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Weight
    from napkinmath.lowering.policy import Policy

PARTITION = "partition"  # kind of a weight that is a rank's part of a run's parameters


def main_gradient(weight: Weight, policy: Policy) -> list[Tensor]:
    """The buffer of a 16-bit parameter's gradient, where the stack has some."""
    code, stored = policy.stack.optimizer, weight.tensor.dtype
    if not code.main_gradients or stored is FP32 or weight.kind == PARTITION:
        return []
    name, dtype = f"main gradient of {weight.tensor.name}", policy.main_gradient_dtype
    return [Tensor(name, weight.axes, dtype, Role.GRADIENTS, weight.path, policy.stack.source)]
