"""Constants of PyTorch's CUDA allocator and of the GPU that stands in where none is named: each once,
for every room and for the profiler."""

from __future__ import annotations

from napkinmath.base.units import MIB

# torch c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp (2.13): kMinBlockSize,
# kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
ALLOCATION_GRANULE = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_LIMIT = 10 * MIB
LARGE_ROUNDING = 2 * MIB
# Multiprocessors of an H100 SXM or H200 (catalog/gpus.json).
DEFAULT_PROCESSORS = 132
