"""accelerate's YAML (`accelerate config`): processes, machines, FSDP or DeepSpeed, mixed precision.

Keys: accelerate 1.14 commands/config/cluster.py, utils/dataclasses.py
FullyShardedDataParallelPlugin, ParallelismConfig.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import BF16_CHECKPOINT
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.inputs.deepspeed import AUTO, DEVICES, give_number, of_stage, read_offload
from napkinmath.inputs.sharding import read_deepspeed, read_fsdp, read_mesh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_MESH = {
    which: (f"{name}_size", f"parallelism_config_{name}_size")
    for which, name in (
        ("tp", "tp"),
        ("cp", "cp"),
        ("ulysses", "sp"),
        ("replicas", "dp_replicate"),
        ("shards", "dp_shard"),
    )
}
_DISTRIBUTED = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MULTI_CPU", "MULTI_XPU", "TP")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an accelerate config."""
    kind = str(job.take("distributed_type") or "NO").upper()
    if kind not in _DISTRIBUTED:
        raise InputError(
            f"distributed_type {shown(kind)} is not priced; use one of"
            f" {', '.join(_DISTRIBUTED)}{suggest(kind, list(_DISTRIBUTED))}"
        )
    job.give("gpus", job.take("num_processes"))
    job.give("nodes", job.take("num_machines"))
    precision = str(job.take("mixed_precision") or "no").lower()
    if precision not in ("no", "bf16", "fp16", "fp8"):
        raise InputError(
            f"mixed_precision {shown(precision)} is unknown; use no, bf16, fp16 or fp8"
        )
    if precision != "no":
        job.give(
            "precision", {"bf16": BF16_CHECKPOINT, "fp16": "fp16-amp", "fp8": "fp8"}[precision]
        )
    fsdp, deepspeed = job.section("fsdp_config"), job.section("deepspeed_config")
    if kind == "FSDP" or (fsdp.content and kind == "MULTI_GPU"):
        read_fsdp(job, fsdp)
    elif kind == "DEEPSPEED":
        _read_deepspeed(job, deepspeed)
    read_mesh(job.section("parallelism_config"), _MESH)
    return job.finish()


def _read_deepspeed(job: ForeignJob, section: ForeignJob) -> None:
    if (file := section.take("deepspeed_config_file")) is not None:
        read_deepspeed(job, file)
        return
    given = section.take("zero_stage")
    stage = 2 if given is None else values.whole(given)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"zero_stage {shown(given)} is unknown; use 0, 1, 2 or 3")
    job.give("data_parallel", [f"zero{stage}" if stage else "ddp"])
    give_number(job, "grad_accum", section.take("gradient_accumulation_steps"))
    clipping = section.take("gradient_clipping")
    if clipping is not None and clipping != AUTO:
        job.give("clip", clipping != 0)
    devices = {
        name: str(section.take(key) or "none").lower()
        for name, key in (
            ("optimizer", "offload_optimizer_device"),
            ("parameters", "offload_param_device"),
        )
    }
    for device in devices.values():
        if device not in DEVICES:
            raise InputError(
                f"offload device {shown(device)} is unknown; use one of {', '.join(DEVICES)}"
            )
    read_offload(job, of_stage(job, devices, stage))
