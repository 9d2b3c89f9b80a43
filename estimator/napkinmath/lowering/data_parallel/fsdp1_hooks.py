"""What FSDP1 does differently where layers are frozen, or checkpointed from around their units.

A unit without a gradient of its own is resharded by a hook on its inputs. Where reentrant
checkpointing recomputes the unit itself, these inputs are leaves, and the hook refers to the node
that accumulates their gradients: leaf and gradient stay until the whole backward is over. Such a
recomputation also lets its parameters go at its end, and they are gathered once more for the
backward. Adapters, flat parameters of their own within the layer, come between two layers in the
order by which the next one is asked for early, so it is asked for as the last adapter goes
backward. Sources: torch 2.13 distributed/fsdp/_runtime_utils.py
_register_post_backward_reshard_only_hook, _post_forward, _get_handle_to_prefetch, autograd/graph.py
register_multi_grad_hook; transformers checkpointed from around the layer until
GradientCheckpointingLayer came with 4.53 (modeling_layers.py). Real ranks:
tests/parallel/test_real_ranks.py.
"""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, Role, Tensor
from napkinmath.ir.step import Run
from napkinmath.lowering.data_parallel.stored import is_sharded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy

_CHECKPOINTS_WITHIN = (4, 53)


def held_by_hook(run: Run, policy: Policy) -> tuple[Tensor, Tensor] | None:
    """(input, its gradient) of a layer, held from its backward on; None where no hook holds
    them."""
    entered, own = run.block.input, own_weights(run, policy)
    if (
        not is_recomputed_around(run, policy)
        or entered is None
        or not entered.requires_grad
        or not own
        or any(w.trainable for w in own)
    ):
        return None
    name, axes, dtype = run.block.name, entered.axes, entered.dtype
    return (
        Tensor("recomputed input held by FSDP's hook", axes, dtype, Role.ACTIVATIONS, name),
        Tensor("gradient held by FSDP's hook", axes, dtype, Role.ACTIVATION_GRADIENTS, name),
    )


def regathers(run: Run, policy: Policy) -> bool:
    """Whether a layer is gathered a third time, between its recomputation and its backward."""
    parallel = policy.config.parallel
    return is_recomputed_around(run, policy) and parallel.reshards and parallel.shard_degree > 1


def is_recomputed_around(run: Run, policy: Policy) -> bool:
    """Whether reentrant checkpointing runs an FSDP1 unit's hooks a second time."""
    fsdp1 = policy.config.parallel.data_parallel is DataParallel.FSDP1
    within = (
        policy.stack.loop.checkpoints_within
        or bool(policy.stack.model.library)
        or policy.stack.model.transformers >= _CHECKPOINTS_WITHIN
    )
    return (
        fsdp1 and policy.reentrant and not within and policy.recomputes and run.stage.checkpointed
    )


def sums_of_views(runs: list[Run], index: int, events: list[Event], policy: Policy) -> list[Event]:
    """Events in which a second gradient of a tied weight is added: its views are no leaves, so the
    sum of both is a third tensor.

    Source: torch csrc/autograd/input_buffer.cpp accumulate, which adds in place only what nobody
    else refers to.
    """
    tied = {weight.tied_to for run in runs for weight in run.block.weights if weight.tied_to}
    shared = [w for w in runs[index].block.weights if w.path in tied and w.trainable]
    if policy.config.parallel.data_parallel is not DataParallel.FSDP1 or not shared:
        return events
    found: list[Event] = []
    for action, payload in events:
        if action == FREE and isinstance(payload, Tensor) and payload.axes == shared[0].axes:
            t, name = payload, "sum of tied gradients"
            if t.role is Role.GRADIENTS:
                total = Tensor(name, t.axes, t.dtype, t.role, t.module, t.source)
                found += [(ALLOC, total), (FREE, total)]
        found.append((action, payload))  # type: ignore[arg-type]
    return found


def has_units_within(run: Run, policy: Policy) -> bool:
    """Whether adapters are flat parameters of their own within a frozen layer's."""
    adapters = any(
        w.trainable and w.tensor.role is Role.ADAPTERS for w in run.block.weights
    ) and not has_flat_adapters(policy)
    return policy.config.parallel.data_parallel is DataParallel.FSDP1 and adapters


def has_flat_adapters(policy: Policy) -> bool:
    """Whether adapters share the flat parameter of their layer: use_orig_params without PEFT's
    wrapping policy, as Fabric has it.

    Source: lightning fabric/strategies/fsdp.py FSDPStrategy; litgpt finetune/lora.py
    auto_wrap_policy={Block}.
    """
    return policy.stack.engine.flat_adapters


def own_weights(run: Run, policy: Policy) -> list[Weight]:
    """What the layer's own flat parameter is made of."""
    return [
        w for w in run.block.weights if is_sharded(w, policy) and w.tensor.role is not Role.ADAPTERS
    ]
