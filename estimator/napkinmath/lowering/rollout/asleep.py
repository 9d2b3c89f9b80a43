"""Host memory of an engine whose weights wait there while the policy trains."""

from __future__ import annotations

from napkinmath.base.units import MIB, pinned_block

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.rollout.plan import EnginePlan

# torch c10/cuda/CUDACachingAllocator.cpp get_allocation_size: from 10 MiB on a segment of its own in
# steps of 2 MiB; smaller tensors share segments of 20 MiB, those up to 1 MiB of 2 MiB.
_OWN_SEGMENT, _STEP, _SHARED_SEGMENT, _SMALL = 10 * MIB, 2 * MIB, 20 * MIB, MIB


def asleep_bytes(plan: EnginePlan) -> int:
    """What a rank's weights take of the host at sleep level 1: as many bytes, or a pinned block for each
    segment of the device's allocator, a power of two of bytes (vLLM 0.11)."""
    if not plan.engine.sleeps_in_powers_of_two:
        return plan.weight_bytes
    return sum(
        layer.count * sum(map(_pinned, (layer.other_bytes, *(p.nbytes for p in layer.products))))
        for layer in plan.model.layers
    )


def _pinned(nbytes: int) -> int:
    """Of a tensor: its segment, or its share of one, in pinned memory."""
    if nbytes >= _OWN_SEGMENT:
        return pinned_block(-(-nbytes // _STEP) * _STEP)
    if nbytes > _SMALL:
        return nbytes * pinned_block(_SHARED_SEGMENT) // _SHARED_SEGMENT
    return nbytes
