"""Host memory of one machine: what its ranks read the checkpoint into, what they keep there while
training, what is on NVMe.

Sources: transformers 5.23 modeling_utils.py from_pretrained (a model in CPU memory, in every
process), integrations/fsdp.py is_fsdp_enabled with is_local_dist_rank_0 (one process a machine
reads, the others hold meta tensors). accelerate 1.14 utils/fsdp_utils.py fsdp2_prepare_model (what
is trained becomes fp32 before it is sharded). transformers integrations/deepspeed.py (under stage 3
a model that is not quantized is made in partitions, and one rank's state dict is scattered).
deepspeed runtime/zero/offload_config.py.
"""

from __future__ import annotations

from napkinmath.base.expr import Bindings
from napkinmath.base.record import Record
from napkinmath.config.parallel_config import ASSUMED_NODE, DataParallel
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import Role, Work
from napkinmath.ir.timeline import Point
from napkinmath.lowering.data_parallel.stored import stored_dtype

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.ledger import Weight

CHECKPOINT_BITS = 16  # as most checkpoints are stored
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

    @property
    def needed(self) -> int:
        """The largest of loading, training and saving."""
        return max(self.loading, self.training + self.saving)

    @property
    def fits(self) -> bool | None:
        """Whether the machine's memory takes it; None where that is not known."""
        return None if not self.capacity else self.needed <= self.capacity


def host_memory(e: Estimate) -> HostMemory:
    """Host memory of a machine for a step on many GPUs."""
    parallel, cluster = e.config.parallel, e.cluster
    ranks = cluster.gpus_per_node if cluster is not None else min(parallel.world_size, ASSUMED_NODE)
    is_stage_3 = parallel.data_parallel is DataParallel.ZERO3
    scattered = is_stage_3 and e.config.quantization is None
    readers = 1 if parallel.broadcast_loading or scattered else ranks
    nvme = nvme_bytes(e)
    return HostMemory(
        ranks=ranks,
        loading=readers * model_bytes(e),
        loading_by=readers,
        training=max(ranks * e.host_bytes - ranks * nvme, 0),
        saving=gathered_bytes(e) if parallel.full_state_dict else 0,
        nvme=ranks * nvme,
        capacity=cluster.host_bytes if cluster is not None else 0,
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
    last = len(e.timeline.segments) - 1
    segment = e.timeline.segments[last]
    end = Point(segment=last, repetition=segment.repeat - 1, event=len(segment.events), nbytes=0)
    return sum(
        t.host_bytes * n
        for t, n in zip(e.timeline.tensors, e.timeline.live_counts(end), strict=True)
        if n > 0 and t.role in chosen
    )
