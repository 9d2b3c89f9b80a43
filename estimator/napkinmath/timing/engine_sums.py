"""Seconds of the sums over an engine's tensor-parallel ranks: small ones by its own kernel, in which
ranks read each other's memory, large ones by NCCL."""

from __future__ import annotations

from napkinmath.timing.collectives import collective_s, has_links_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.cluster import Cluster
    from napkinmath.timing.collectives import Fabric

# vLLM's kernel (csrc/custom_all_reduce.cuh): every rank reads all others' messages ("one stage"), two
# ranks always, four below 512 KiB, eight below 256 KiB; else each sums its part and they read the
# parts ("two stages"). Up to 8 MiB (vllm distributed/device_communicators/custom_all_reduce.py
# CustomAllreduce.max_size). SGLang's is the same kernel.
_ONE_STAGE_BELOW = {2: 1 << 40, 4: 512 << 10, 6: 256 << 10, 8: 256 << 10}
_LARGEST = 8 << 20
# Ranks wait for each other before and after; the second stage waits once more. Loads over NVLink
# reach this share of its rate. Fitted to A100's table of vLLM 0.14 (ai-dynamo/aiconfigurator
# custom_allreduce_perf), compared with H100, H200 and B200 by benchmarks/accuracy/decoding.py.
_START_S = 5e-6
_STAGE_S = 2e-6
_LOADED_SHARE = 0.67


def engine_sum_s(nbytes: float, group: Fabric, cluster: Cluster) -> float:
    """Seconds of one sum of `nbytes` over the group's ranks, by the engine's kernel or by NCCL."""
    by_nccl = float(collective_s("all-reduce", nbytes, group))
    own = own_kernel_s(nbytes, group, cluster)
    return by_nccl if own is None else min(own, by_nccl)


def own_kernel_s(nbytes: float, group: Fabric, cluster: Cluster) -> float | None:
    """The same by the engine's kernel; None where it does not run: other counts of ranks, several
    machines, GPUs without links, large messages."""
    gpu, ranks = cluster.hardware.gpu, group.ranks
    link = gpu.gpu_link
    runs = group.nodes == 1 and ranks in _ONE_STAGE_BELOW and nbytes <= _LARGEST
    if not runs or link is None or link.kind != "nvlink" or not has_links_for(gpu, ranks):
        return None
    rate = link.bytes_per_s * _LOADED_SHARE
    if nbytes < _ONE_STAGE_BELOW[ranks]:
        return _START_S + (ranks - 1) * nbytes / rate
    return _START_S + _STAGE_S + 2 * (ranks - 1) / ranks * nbytes / rate
