"""Where products of experts are one kernel, where a loop of products, and where the host waits."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16
from napkinmath.ir.costs import Gemm, HostCopy, Move, Repeated
from napkinmath.timing.attainable import has_wgmma

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.hardware import Gpu
    from napkinmath.ir.costs import Cost


def loops(cost: Cost, gpu: Gpu) -> bool:
    """Whether torch's `grouped_mm` is a loop on this GPU: its kernel is for bf16 and compute
    capability 9 and 10. Elsewhere, and on ROCm, the host reads the offsets and calls one product
    after the other (torch 2.10 aten/src/ATen/native/cuda/GroupedBlas.cpp _grouped_mm_cuda,
    GroupedMMUtils.h _grouped_mm_fallback). A GPU of unknown capability is taken to have it."""
    if not isinstance(cost, Gemm) or not cost.grouped or not gpu.compute_capability:
        return False
    return not (has_wgmma(gpu) and cost.dtype is BF16)


def host_waits(cost: Cost, gpu: Gpu) -> bool:
    """Whether the host reads what the operation gives before it issues the next one, or copies the
    bytes itself: what goes through pageable memory (CUDA driver API, synchronization behavior)."""
    if isinstance(cost, Repeated):
        return host_waits(cost.cost, gpu)
    if isinstance(cost, HostCopy):
        return not cost.pinned
    return cost.waits if isinstance(cost, Move) else loops(cost, gpu)
