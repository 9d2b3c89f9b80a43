"""What happens to a parameter's gradient the moment it is made: updated at once, added to an fp32
buffer, or sent to the host.

Hooks run when the node that made the gradient is done and its saved tensors are released
(torch/csrc/autograd/engine.cpp evaluate_function), so nothing else of the layer is held for them. A
tied weight's hook runs once both its gradients are summed.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import product
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import HostCopy, Move
from napkinmath.ir.ledger import FREE, RUN, Tensor, Weight, Work
from napkinmath.lowering.optimizer import chosen_optimizer, update_events, updates_in_backward

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


class GradientHook:
    """Ends the life of the gradients it takes: `events` follow the making of a gradient."""

    __slots__ = ("events", "takes")

    def __init__(
        self,
        events: Callable[[Weight, Tensor], list[Event]],
        takes: Callable[[Weight], bool] = lambda weight: True,
    ) -> None:
        self.events, self.takes = events, takes


def gradient_hook(policy: Policy) -> GradientHook | None:
    """The hook of a configuration; None where every gradient stays until zero_grad."""
    if policy.shards:  # the engine takes the gradients
        return _main_gradient_hook(policy) if policy.keeps_main_gradients else None
    row = chosen_optimizer(policy)
    if policy.config.offload.optimizer and not policy.keeps_main_gradients:
        pinned = policy.config.offload.pinned
        return GradientHook(
            lambda weight, gradient: [
                (RUN, Work(None, (HostCopy(gradient.nbytes, to_host=True, pinned=pinned),), True)),
                (FREE, gradient),
            ]
        )
    if updates_in_backward(row, policy):
        return GradientHook(
            lambda weight, gradient: [
                *update_events(row, [weight], policy),
                (FREE, gradient),
            ]
        )
    return _main_gradient_hook(policy) if policy.stack.optimizer.main_gradients else None


def keeps_gradients(policy: Policy) -> bool:
    """Whether gradients are made once and zeroed in place: the stack does so, no hook or engine
    takes them, and they are no views of DDP's buckets."""
    parallel = policy.config.parallel
    viewed = parallel.data_parallel is DataParallel.DDP and parallel.gradient_as_bucket_view
    return (
        policy.stack.optimizer.keeps_gradients
        and not policy.shards
        and not (parallel.replicates and viewed)
        and gradient_hook(policy) is None
    )


def _main_gradient_hook(policy: Policy) -> GradientHook:
    """Adds to the buffer that lives through the run (Megatron-LM
    distributed/param_and_grad_buffer.py main_grad)."""
    width = policy.main_gradient_dtype.bits // 8

    def added(weight: Weight, gradient: Tensor) -> list[Event]:
        moved = gradient.nbytes + 2 * width * product(weight.axes)
        return [(RUN, Work(None, (Move(moved),), True)), (FREE, gradient)]

    return GradientHook(added, _is_16_bit)


def _is_16_bit(weight: Weight) -> bool:
    return weight.tensor.dtype is not FP32
