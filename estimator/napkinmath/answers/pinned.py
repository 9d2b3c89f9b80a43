"""What rounding adds to pinned host memory: torch makes each block of it a power of two of bytes.

Sources: deepspeed 0.19 runtime/zero/stage_1_and_2.py (the partitions of fp32 parameters, of their
gradients and of the 16-bit copy, a block each), stage3.py (grad_partitions_flat_buffer,
param_groups_fp16_flat_cpu_memory, a sub-group's fp32 gradients; masters and states are not pinned).
torch 2.13 distributed/fsdp/_fully_shard CPUOffloadPolicy.pin_memory (each parameter's shard) and
fsdp/_init_utils.py (each flat parameter).
"""

from __future__ import annotations

from napkinmath.base.units import pinned_block
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import Role
from napkinmath.ir.timeline import Point

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import TensorInfo

_FLAT_GRADIENTS = "gradient partition"


def kept_on_host(e: Estimate) -> Iterator[tuple[TensorInfo, int]]:
    """(tensor, copies) of a rank that lie in host memory between steps."""
    last = len(e.timeline.segments) - 1
    segment = e.timeline.segments[last]
    end = Point(segment=last, repetition=segment.repeat - 1, event=len(segment.events), nbytes=0)
    for t, copies in zip(e.timeline.tensors, e.timeline.live_counts(end), strict=True):
        if copies > 0 and t.host_bytes and not t.managed:
            yield t, copies


def pinned_rounding(e: Estimate) -> int:
    """Bytes that a rank's pinned blocks take beyond what lies in them."""
    parallel = e.config.parallel
    kind, offload = parallel.data_parallel, e.config.offload
    if not offload.pinned or parallel.nvme or not (offload.optimizer or offload.parameters):
        return 0
    if kind.is_fsdp:
        weights = ((t, n) for t, n in kept_on_host(e) if t.role is Role.WEIGHTS)
        return sum(n * _added(t.host_bytes) for t, n in weights)
    if kind in (DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.ZERO3):
        return sum(map(_added, _blocks(e, is_stage_3=kind is DataParallel.ZERO3)))
    return 0


def _blocks(e: Estimate, *, is_stage_3: bool) -> list[int]:
    """Sizes of DeepSpeed's pinned buffers."""
    sums = dict[tuple[Role, bool], int]()
    for t, n in kept_on_host(e):
        key = t.role, t.name == _FLAT_GRADIENTS
        sums[key] = sums.get(key, 0) + n * t.host_bytes
    pinned = (Role.WEIGHTS,) if is_stage_3 else (Role.WEIGHTS, Role.MASTER, Role.GRADIENTS)
    found = [size for (role, flat), size in sums.items() if role in pinned or flat]
    if is_stage_3:
        own = sums.get((Role.GRADIENTS, False), 0)
        group = 4 * e.config.parallel.zero.sub_group_size
        found += [group] * (own // group) + [own % group]
    return found


def _added(nbytes: int) -> int:
    return pinned_block(nbytes) - nbytes
