"""Layers that torch.compile leaves as they are.

torch.utils.checkpoint.checkpoint runs without the compiler wherever what it wraps cannot be traced
as one graph (torch utils/checkpoint.py: checkpoint is `@torch._disable_dynamo`; dynamo traces it as
one higher-order operation or not at all). A layer that reads a tensor on the host is such a graph,
so with checkpointing all of it runs eagerly.
"""

from __future__ import annotations

from napkinmath.config.train_config import Attention, RecomputeKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from napkinmath.ir.ledger import Value
    from napkinmath.ir.step import Step
    from napkinmath.ir.tape import Tape
    from napkinmath.lowering.policy import Policy

# transformers modeling_flash_attention_utils.py _flash_attention_forward: 4.45 and 4.48 compare
# neighbouring position ids of any batch, 4.54 makes lengths of them, and since 4.55
# _is_packed_sequence reads them in a batch of one sequence.
_READS_SINCE, _ALONE_SINCE = (4, 44), (4, 55)


def reads_positions(t: Tape, policy: Policy, shared: dict[str, Value]) -> bool:
    """Whether a layer about to be recorded breaks its checkpoint."""
    return _may_read(policy) and _is_turned(shared.values()) and _reads(policy, t.at_least)


def leaves_layers_eager(step: Step, policy: Policy) -> bool:
    """Whether `compile` leaves the checkpointed layers of a step as they are."""
    return (
        _may_read(policy)
        and _reads(policy, policy.reaches)
        and any(run.stage.checkpointed and _is_turned(run.block.externals) for run in step.runs)
    )


def _may_read(policy: Policy) -> bool:
    config, stack = policy.config, policy.stack
    return (
        config.compile
        and policy.recomputes
        and config.recompute.kind is RecomputeKind.FULL
        and config.attention in (Attention.FLASH2, Attention.FLASH3)
        and stack.attention.reads_positions
        and not stack.model.is_transformers_before(_READS_SINCE)
    )


def _is_turned(given: Iterable[Value]) -> bool:
    """Whether a layer is handed tables of rotary positions: decoders that are get position ids."""
    return any("cos" in value.tensor.name for value in given)


def _reads(policy: Policy, reaches: Callable[[str, int], bool]) -> bool:
    """Whether the batch's position ids are read. Packed sequences are one to the model, and padded
    batches ask where their tokens are (_get_unpad_data)."""
    batch = policy.config.batch
    always = policy.stack.model.is_transformers_before(_ALONE_SINCE)
    return always or batch.packing or bool(batch.lengths) or not reaches("b", 2)
