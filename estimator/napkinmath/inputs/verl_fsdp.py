"""FSDP as verl sets it up, in reinforcement and in SFT by its engines: parameters in one type, computed
in another, reduced in fp32 in every micro-step.

Source: volcengine/verl workers/fsdp_workers.py _build_model_optimizer, workers/engine/fsdp/
transformer_impl.py at b178a3cd56f5.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.pins import pinned

_SUMS_LATE = (0, 10)


def give_shards(job: ForeignJob, prefix: str, gpus: int, ulysses: int, *, second: bool) -> None:
    """FSDP 1, or the `second`, by the keys of an engine that begin with `prefix`."""
    size = job.take(f"{prefix}fsdp_size")
    types = {part: f"{prefix}mixed_precision.{part}_dtype" for part in ("param", "reduce")}
    job.take(f"{prefix}mixed_precision.buffer_dtype")  # tables of a rotation alone
    computed = dtype_word(job.take(types["param"])) or dtype_word(job.take(f"{prefix}dtype"))
    job.give("precision", computed or "bf16")
    job.give("data_parallel", ["fsdp2" if second else "fsdp1"])
    job.give("sync_each_batch", not _sums_late(job, prefix))
    job.give("sharded_dtype", dtype_word(job.take(f"{prefix}model_dtype")) or "fp32")
    job.give("reduce_dtype", dtype_word(job.take(types["reduce"])) or "fp32")
    if size is not None and 1 < values.count(size, "fsdp_size", low=-1) < gpus:
        job.give("sharding", "hybrid")
        job.give("shard_size", size)
    if ulysses > 1:
        job.give("cp", ulysses)
        job.give("cp_kind", "ulysses")
    reshard = job.take(f"{prefix}reshard_after_forward")
    job.give("reshard", False if reshard is False and (second or gpus > 1) else None)
    prefetch = job.take(f"{prefix}forward_prefetch")
    job.give("forward_prefetch", None if second else prefetch)


def _sums_late(job: ForeignJob, prefix: str) -> bool:
    """Whether gradients stay whole until the last micro-batch, as they do since July 2026 (verl pull
    requests 7095 and 7458): as the file says, or as the release that is pinned has it. Before, each
    micro-batch reduced (workers/actor/dp_actor.py update_policy)."""
    key = f"{prefix}use_no_sync_for_gradient_accumulation"
    version = pinned(job, "verl")[1]
    return job.switch(key, default=bool(version) and _numbers(version) >= _SUMS_LATE)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
