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
from napkinmath.lowering.gradient_buffers import main_gradient
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
    if policy.config.offload.optimizer:
        return _host_hook(policy)
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


def _host_hook(policy: Policy) -> GradientHook:
    """Copies to the host what the stack has no buffer on the device for."""
    pinned, summed = policy.config.offload.pinned, _main_gradient_hook(policy)

    def leaves(weight: Weight, gradient: Tensor) -> list[Event]:
        if main_gradient(weight, policy):
            return summed.events(weight, gradient)
        copy = HostCopy(gradient.nbytes, to_host=True, pinned=pinned)
        return [(RUN, Work(None, (copy,), True)), (FREE, gradient)]

    return GradientHook(leaves)


def _main_gradient_hook(policy: Policy) -> GradientHook:
    """Adds to the buffer that lives through the run (Megatron-LM
    distributed/param_and_grad_buffer.py main_grad): of 16-bit parameters, and under the distributed
    optimizer of every one."""
    width = policy.main_gradient_dtype.bits // 8

    def added(weight: Weight, gradient: Tensor) -> list[Event]:
        moved = gradient.nbytes + 2 * width * product(weight.axes)
        return [(RUN, Work(None, (Move(moved),), True)), (FREE, gradient)]

    return GradientHook(added) if policy.shards else GradientHook(added, _is_16_bit)


def _is_16_bit(weight: Weight) -> bool:
    return weight.tensor.dtype is not FP32
