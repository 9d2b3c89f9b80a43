"""What the files of reinforcement learning's trainers share: an engine of its own generates, and
the update of the policy is what is priced."""

from __future__ import annotations

from napkinmath.base.errors import shown
from napkinmath.catalog.models import find_row
from napkinmath.config.job_keys import Difference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_MESH = ("tp", "pp", "cp", "ep")
_OF_WORKLOADS = (
    *("workload", "reference", "reference_at", "teacher", "completion"),
    *("rollout", "rollout_trainer", "rollout_memory", "rollout_tp", "rollout_sleep"),
    *("rollout_gpus", "rollout_sync", "rollout_bucket", "rollout_offload", "rollout_staleness"),
    *("rollout_group", "rollout_draft"),
)


def name_rollouts(job: ForeignJob, key: str, engine: object) -> None:
    """Says that an engine of its own generates what the step trains on: what it holds, and how
    long it takes, are not the figures'."""
    job.leave_out(
        key,
        f"rollouts run on {engine or 'an engine of their own'}, which holds memory of its own and"
        " takes time of its own; give --rollout",
        memory=Difference.EITHER,
        time=Difference.EITHER,
        option="rollout",
    )


def give_reward_model(job: ForeignJob, key: str) -> None:
    """The model that scores answers, by the last part of its path; one that is not known is
    named."""
    given = str(job.take(key) or "")
    name = given.rstrip("/").rpartition("/")[2]
    if not given:
        return
    if find_row(name) is not None:
        job.give("teacher", name)
        return
    job.leave_out(
        key,
        f"the reward model {shown(given)} is not in the catalog; give --teacher",
        memory=Difference.MORE,
        time=Difference.MORE,
        option="teacher",
    )


def policy_alone_in_a_mesh(job: ForeignJob, key: str) -> None:
    """Prices the policy's own update where the mesh is one with which no workload is priced; what
    is held beside the policy is named by the key that asks for it."""
    if any(axis in job.options for axis in _MESH):
        policy_alone(job, key, "with tensor, pipeline, context or expert parallelism ")


def policy_alone(job: ForeignJob, key: str, when: str = "") -> None:
    """Prices the policy's own update, unless a workload is asked for beside the file."""
    if job.is_settled("workload"):
        return
    asked = job.options.get("workload")
    for option in _OF_WORKLOADS:
        job.options.pop(option, None)
    job.leave_out(
        key,
        f"{when}the update of the policy alone is priced, without what {asked} holds beside it",
        memory=Difference.MORE,
        time=Difference.MORE,
    )
