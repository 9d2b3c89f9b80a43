"""Distinguish storages by what held them: marks first, then how long they outlived the code that
made them."""

from __future__ import annotations

from collections.abc import Iterable

from napkinmath_profiler.tracing.storage_events import StorageRecord, StorageRole, TracePhase

# What the loop itself makes there and keeps for the next forward is its batch.
BETWEEN_STEPS = (TracePhase.SETUP, TracePhase.ZERO_GRAD, TracePhase.BETWEEN)


def attribute(records: Iterable[StorageRecord], head_module: str | None) -> None:
    """Settle the role of every record that nothing marked.

    In forward: what dies in it was a temporary, what outlives it was held for backward. In backward
    and recompute the same holds for one autograd node or one recomputation. What the loss and the
    output head made are logits.
    """
    for record in records:
        if record.role is None:
            record.role = _role(record, head_module)


def _is_head(record: StorageRecord, head_module: str) -> bool:
    """What the output head makes is logits, but for a cast of its weight."""
    return record.module == head_module and record.op != "aten._to_copy.default"


def _role(record: StorageRecord, head_module: str | None) -> StorageRole:
    if (
        record.phase is TracePhase.LOSS
        or record.of_loss
        or (record.phase is TracePhase.FORWARD and head_module and _is_head(record, head_module))
    ):
        return StorageRole.LOGITS
    same_scope = record.died_scope == record.scope
    if record.phase is TracePhase.FORWARD:
        return (
            StorageRole.TEMPORARIES
            if record.died_phase is TracePhase.FORWARD and same_scope
            else StorageRole.SAVED_ACTIVATIONS
        )
    if record.phase is TracePhase.RECOMPUTE:
        return StorageRole.TEMPORARIES if same_scope else StorageRole.SAVED_ACTIVATIONS
    if record.phase is TracePhase.BACKWARD:
        return StorageRole.TEMPORARIES if same_scope else StorageRole.ACTIVATION_GRADIENTS
    if record.phase in BETWEEN_STEPS:
        return StorageRole.TEMPORARIES if same_scope else StorageRole.INPUTS
    if record.phase in (TracePhase.OPTIMIZER, TracePhase.CLIP):
        return StorageRole.TEMPORARIES
    return StorageRole.UNATTRIBUTED
