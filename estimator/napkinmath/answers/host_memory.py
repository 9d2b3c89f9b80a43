"""Host memory of one machine: what its ranks read the checkpoint into, what they keep there while
training, what is on NVMe.

Sources: transformers 5.23 modeling_utils.py from_pretrained (a model in CPU memory, in every
process), integrations/fsdp.py is_fsdp_enabled with is_local_dist_rank_0 (one process a machine
reads, the others hold meta tensors). accelerate 1.14 utils/fsdp_utils.py fsdp2_prepare_model (what
is trained becomes fp32 before it is sharded). transformers integrations/deepspeed.py (under stage 3
a model that is not quantized is made in partitions, and one rank's state dict is scattered).
deepspeed runtime/zero/offload_config.py.
Libraries with stages of their own make a rank's part on the device, and read into it (Megatron-LM
core/dist_checkpointing, nanotron serialize/weights.py).
A reference, a teacher and a reward model are read before the policy leaves for the device (trl 1.16
dpo_trainer.py and grpo_trainer.py __init__, which make them before the Trainer's own; OpenRLHF
cli/train_ppo_ray.py, whose actors read together, the critic's after them).
"""

from __future__ import annotations

from napkinmath.answers.figures import Finding
from napkinmath.answers.parameters import count_parameters
from napkinmath.answers.pinned import kept_on_host, pinned_rounding
from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, format_bytes
from napkinmath.catalog.rollout_trainers import find_rollout_trainer
from napkinmath.config.parallel_config import ASSUMED_NODE, DataParallel
from napkinmath.config.workload_config import Placement
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import Role, Work
from napkinmath.lowering.data_parallel.stored import stored_dtype
from napkinmath.lowering.references import has_copy
from napkinmath.lowering.rollout.asleep import asleep_bytes
from napkinmath.lowering.rollout.plan import EnginePlan
from napkinmath.memory.pipeline_ranks import WholeModel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.ledger import Weight

CHECKPOINT_BITS = 16  # as most checkpoints are stored
# Ray's table of processes of torch and DeepSpeed that had not read their model yet: 1.66 and 1.67 GiB
# (OpenRLHF/OpenRLHF#171).
PROCESS_BYTES = 167 * GIB // 100
_ROLES_ON_NVME = {
    "optimizer": (Role.OPTIMIZER, Role.MASTER, Role.GRADIENTS),
    "parameters": (Role.WEIGHTS, Role.QUANTIZATION, Role.ADAPTERS),
}


class HostMemory(Record):
    """Bytes of one machine: `ranks` processes, at loading and while training; `nvme` on its disks;
    `capacity` 0 where not known."""

    ranks: int
    loading: int
    loading_by: int
    """Processes that hold a whole model while loading."""
    training: int
    saving: int = 0
    """What one process gathers to write, beside what is kept while training."""
    nvme: int = 0
    capacity: int = 0
    share: float = 1.0
    """Of the capacity, that may be taken."""
    asleep: int = 0
    """Weights of engines that wait there while models are read."""
    processes: int = 0
    """Processes on it, each of which takes `PROCESS_BYTES` before it has a model."""

    @property
    def own(self) -> int:
        """Bytes of the processes without their models."""
        return self.processes * PROCESS_BYTES

    @property
    def needed(self) -> int:
        """The largest of loading, training and saving, and the processes themselves."""
        return self.own + max(self.loading + self.asleep, self.training + self.saving)

    @property
    def used(self) -> float:
        """Of what may be taken of the machine's memory, where its capacity is known; else 0."""
        return self.needed / (self.share * self.capacity) if self.capacity else 0.0


def host_memory(e: Estimate) -> HostMemory:
    """Host memory of a machine for a step on many GPUs."""
    parallel, cluster, workload = e.config.parallel, e.cluster, e.config.workload
    ranks = cluster.gpus_per_node if cluster is not None else min(parallel.world_size, ASSUMED_NODE)
    trainer = find_rollout_trainer(workload.rollout_trainer or "trl")
    once = parallel.broadcast_loading or (_reads_once(e) and not _ties(e))
    is_stage_3 = parallel.data_parallel is DataParallel.ZERO3
    scattered = is_stage_3 and e.config.quantization is None
    readers = 1 if once or scattered else ranks
    nvme = nvme_bytes(e)
    kept = max(ranks * (e.host_bytes + pinned_rounding(e) - nvme), 0)
    plan = e.ranks.policy.rollout
    sleeps = isinstance(plan, EnginePlan) and plan.sleep == 1 and trainer.engines_first
    return HostMemory(
        ranks=ranks,
        loading=0 if e.step.policy.stack.engine.own_stages else readers * read_together(e),
        loading_by=readers,
        training=kept,
        saving=gathered_bytes(e) if parallel.full_state_dict else 0,
        nvme=ranks * nvme,
        capacity=cluster.host_bytes if cluster is not None else 0,
        share=trainer.host_share if workload.rolls_out else 1.0,
        asleep=ranks * asleep_bytes(plan) if isinstance(plan, EnginePlan) and sleeps else 0,
        processes=ranks * _processes(e),
    )


def _processes(e: Estimate) -> int:
    """Of a rank: its own, and one for each model beside the policy and for the engine where its trainer
    spreads them so."""
    workload, policy = e.config.workload, e.ranks.policy
    if not (workload.rolls_out and workload.rollout_trainer):
        return 1
    if not find_rollout_trainer(workload.rollout_trainer).own_processes:
        return 1
    plan = policy.rollout
    beside = isinstance(plan, EnginePlan) and not plan.apart
    return sum((1, has_copy(policy), _has_second(e), workload.rule.critic, beside))


def _has_second(e: Estimate) -> bool:
    """Whether a teacher or a reward model is on the policy's GPUs."""
    return (
        e.ranks.policy.teacher is not None and e.config.workload.teacher_at is not Placement.APART
    )


def _reads_once(e: Estimate) -> bool:
    """Whether its trainer of rollouts has one process read a model under FSDP."""
    workload = e.config.workload
    trainer = find_rollout_trainer(workload.rollout_trainer or "trl")
    return workload.rolls_out and trainer.reads_once and e.config.parallel.data_parallel.is_fsdp


def _ties(e: Estimate) -> bool:
    return any(weight.tied_to for run in e.step.runs for weight in run.block.weights)


def read_together(e: Estimate) -> int:
    """What one process, or one of each model, holds of all models that are read before the first of
    them is on the device."""
    policy, rule = e.ranks.policy, e.config.workload.rule
    trained = model_bytes(e) // (2 if rule.critic else 1)  # a critic is as large as the policy
    beside = e.num_parameters * CHECKPOINT_BITS // 8 // (2 if rule.critic else 1)
    found = [beside] if has_copy(policy) else []
    if policy.teacher is not None and _has_second(e):
        whole = WholeModel(policy.teacher, policy)
        found.append(count_parameters(whole)[0] * CHECKPOINT_BITS // 8)
    if _reads_once(e):
        return max(trained, *found, 0)
    return trained + sum(found)


def host_too_small(e: Estimate) -> Finding:
    """What of a machine's memory is too much, and a way out."""
    host, plan = e.host_memory, e.ranks.policy.rollout
    limit = f"{format_bytes(host.capacity)}"
    if host.share < 1:
        limit += f", of which Ray lets its tasks take {host.share:.0%}"
    if host.loading + host.asleep > host.training + host.saving:
        what, way = "loading the models", "take machines with more memory"
        if host.loading_by > 1 and not _reads_once(e):
            way = "let one process of a machine read them (--broadcast-loading)"
    elif host.saving:
        what, way = "saving a full state dict", "save in shards (leave out --full-state-dict)"
    else:
        what, way = "what is kept there while training", "offload less, or put it on NVMe (--nvme)"
    if isinstance(plan, EnginePlan) and plan.sleep == 1:
        way = f"let the engine drop its weights (--rollout-sleep 2), or {way}"
    return Finding(
        text=(
            f"a machine's memory is too small: {what} takes {format_bytes(host.needed)} of {limit};"
            f" {way}"
        ),
        nbytes=host.needed - int(host.share * host.capacity),
    )


def model_bytes(e: Estimate) -> int:
    """What one process holds of the model before it is on the device: in the type of loading, or in
    fp32 what FSDP will train."""
    policy, total = e.step.policy, 0
    top = Bindings(e.step.symbols)
    for run in e.step.runs:
        bind = top.extended(dict(run.stage.symbols))
        for weight in run.block.weights:
            if not weight.tied_to and weight.kind != "adapter":
                total += (
                    run.count
                    * bind(weight.elements)
                    * _loaded_bits(weight, policy.config.parallel.data_parallel.is_fsdp, e)
                    // 8
                )
    return total


def _loaded_bits(weight: Weight, fsdp: bool, e: Estimate) -> int:
    if weight.constants:
        return CHECKPOINT_BITS
    if fsdp and weight.trainable:
        return max(stored_dtype(weight, e.ranks.policy).bits, CHECKPOINT_BITS)
    return max(e.step.policy.loaded_rule.parameters.bits, CHECKPOINT_BITS)


def gathered_bytes(e: Estimate) -> int:
    """What rank 0 has in host memory once a full state dict is gathered: all that saving copies
    there."""
    found = {id(s): s for s in e.step.save}
    top = Bindings(e.step.symbols)
    return sum(
        segment.repeat * top.extended(dict(segment.symbols))(cost.moved)
        for segment in found.values()
        for _, work in segment.events
        if isinstance(work, Work)
        for cost in work.costs
        if isinstance(cost, HostCopy)
    )


def nvme_bytes(e: Estimate) -> int:
    """Of one rank's offloaded tensors, what lies on NVMe: by role, from the timeline's tensors."""
    chosen = {role for name in e.config.parallel.nvme for role in _ROLES_ON_NVME[name]}
    if not chosen:
        return 0
    return sum(n * t.host_bytes for t, n in kept_on_host(e) if t.role in chosen)
