"""Megatron-DeepSpeed: Megatron-LM's arguments beside DeepSpeed's engine.

Keys: deepspeedai/Megatron-DeepSpeed megatron/arguments.py and deepspeed/__init__.py
add_config_arguments; what they do: megatron/training.py setup_model_and_optimizer (the engine is
built from the file, whose stage has to be that of --zero-stage).
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.job_keys import Difference
from napkinmath.inputs import deepspeed
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.sharding import guess_stage

# What the engine's file says of a step that Megatron's own arguments say too.
_OWN = ("bs", "grad_accum", "global_batch", "precision", "optimizer", "clip", "loss")


ENGINE_KEYS = ("deepspeed", "zero_stage")


def is_engine(job: ForeignJob) -> bool:
    """Whether DeepSpeed's engine trains."""
    return not is_off(job.content.get("deepspeed")) or "zero_stage" in job.content


def read_engine(job: ForeignJob, data: int) -> None:
    """ZeRO of the engine's file, else of --zero-stage; recomputation by either library's code."""
    plain = not is_off(job.take("no_pipeline_parallel"))
    job.give("stack", "megatron-deepspeed-engine" if plain else "megatron-deepspeed")
    job.options.pop("reduce_dtype", None)
    given = job.take("deepspeed_config")
    stage = job.take("zero_stage")
    job.take("deepspeed", "use_distributed_optimizer", "deepspeed_activation_checkpointing")
    if values.is_mapping(given):
        content = values.mapping(given, "deepspeed_config")
        inner = ForeignJob("DeepSpeed", content, job.notes, keys="deepspeed", given=job.given)
        found = deepspeed.read(inner)
        job.options |= {k: v for k, v in found.items() if k not in (*_OWN, "job_keys")}
        job.adopt(inner, "deepspeed_config")
        return
    if stage is None and given is not None:
        guess_stage(job, str(given))
    number = 0 if stage is None else values.count(stage, "--zero-stage", low=0, high=3)
    if number and data > 1:
        job.give("data_parallel", [f"zero{number}"])
    elif data > 1 and "data_parallel" not in job.options:
        job.give("data_parallel", ["ddp"])
    if str(job.take("remote_device") or "none") != "none" or not is_off(job.take("cpu_optimizer")):
        job.give("offload", "optimizer")
    ranks = values.count(job.take("ds_sequence_parallel_size") or 1, "--ds-sequence-parallel-size")
    if ranks > 1:
        job.leave_out(
            "ds_sequence_parallel_size",
            f"sequences over {ranks} ranks; give --cp {ranks} --cp-kind ulysses",
            memory=Difference.LESS,
            time=Difference.EITHER,
            option="cp",
        )
