"""Whether a workload's step has a reference, and whose weights it runs with."""

from __future__ import annotations

from napkinmath.catalog.rollout_trainers import find_rollout_trainer
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.workload_config import Placement, Workload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.policy import Policy


def reference_place(workload: Workload) -> Placement:
    """Where a reference's weights are: as it was said, else as the trainer of rollouts has it."""
    said, trainer = workload.reference_at, workload.rollout_trainer
    if said is not Placement.AUTO or not (workload.rolls_out and trainer):
        return said
    return find_rollout_trainer(trainer).reference_at


def refers(policy: Policy) -> bool:
    """Whether a reference's forward is part of the step: as it was said, else where one has a place
    of its own, or where the trainer's divergence is not 0 by itself."""
    workload = policy.config.workload
    is_said = workload.reference is not None or workload.reference_at is not Placement.AUTO
    if not workload.may_refer or not workload.rolls_out or is_said:
        return workload.may_refer
    trainer = find_rollout_trainer(workload.rollout_trainer or "trl")
    return bool(policy.stack.trainer.divergence) or workload.kind in trainer.refers


def refers_by_adapters(policy: Policy) -> bool:
    """Whether the reference is the policy itself, its adapters switched off."""
    config = policy.config
    apart = config.workload.rolls_out and policy.stack.trainer.copies_reference
    at_zero3 = config.parallel.data_parallel is DataParallel.ZERO3
    return config.adapter is not None and not (apart and at_zero3)


def has_copy(policy: Policy) -> bool:
    """Whether a reference with weights of its own is read beside the policy."""
    refers_here = refers(policy) and not refers_by_adapters(policy)
    place = reference_place(policy.config.workload)
    return refers_here and place not in (Placement.APART, Placement.SWAP)
