"""Megatron-Bridge's YAML, which is laid over one of its recipes: the model comes from a flag.

Keys: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/config.py ConfigContainer and the
files under examples and tutorials at 067f987df03b; what they mean is Megatron-Core's. A recipe
trains in bf16 with the distributed optimizer (recipes/common.py), and sums gradients
in fp32, but under fp16 (mixed_precision.py); scripts/performance sum them in bf16, as the stack does.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import (
    WITHIN,
    Row,
    degree,
    give_experts,
    give_step,
    read_rows,
    world_size,
)
from napkinmath.inputs.te_optimizer import read_precision_aware

_M, _T = "model.", "train."
_ROWS = (
    Row("ctx", f"{_M}seq_length dataset.seq_length dataset.sequence_length", 4096),
    Row("bs", f"{_T}micro_batch_size", 1),
)
_DEGREES = (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"))
_FP16 = ("16-mixed", "fp16_mixed", "fp16-mixed")
_OPTIMIZERS: dict[str, object] = {"adam": "adamw-fused", "sgd": "sgd", "muon": "muon"}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a Megatron-Bridge file."""
    job.flatten()
    job.refuse("model", "Megatron-Bridge's file says what a recipe changes, not its model")
    job.give("stack", "nemo")
    read_rows(job, _ROWS)
    sizes = {o: degree(job, f"{_M}{name}_parallel_size") for o, name in _DEGREES}
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    gpus = world_size(job) or inner
    job.give("gpus", gpus)
    for option, size in sizes.items():
        job.give(option, size if size > 1 else None)
    sequence = job.switch(f"{_M}sequence_parallel")
    job.give("sequence_parallel", sequence if sizes["tp"] > 1 else None)
    outer = max(1, gpus // (sizes["tp"] * sizes["pp"]))
    experts = f"{_M}expert_model_parallel_size"
    give_experts(job, experts, tensor=sizes["tp"], data=outer, within=f"{_M}{WITHIN}")
    data = max(1, gpus // inner)
    distributed = job.switch("ddp.use_distributed_optimizer", default=True)
    job.give("data_parallel", ["zero1" if distributed else "ddp"] if data > 1 else None)
    summed = job.switch("ddp.grad_reduce_in_fp32", default=_kind(job) not in _FP16)
    job.give("reduce_dtype", "fp32" if summed else "bf16")
    whole = job.take(f"{_T}global_batch_size")
    rows = values.count(job.options["bs"], "train.micro_batch_size")
    if whole is not None:
        step = values.count(whole, "train.global_batch_size")
        give_step(job, step, rows=rows, ranks=data)
    _read_step(job)
    return job.finish()


def _read_step(job: ForeignJob) -> None:
    kind = _kind(job)
    job.give("precision", "fp8" if "fp8" in kind else "fp16" if kind in _FP16 else "bf16")
    read_rows(job, [Row("optimizer", "optimizer.optimizer", words=_OPTIMIZERS)])
    job.options.setdefault("optimizer", "adamw-fused")
    read_precision_aware(job, "optimizer.", job.content.get("optimizer.fp8_recipe"))
    clip = job.take("optimizer.clip_grad")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    adapts = any(key.startswith("peft.") for key in job.content)
    rows = (
        Row("rank", "peft.dim", 32),
        Row("alpha", "peft.alpha", 32),
        Row("dropout", "peft.dropout"),
    )
    if adapts:
        read_rows(job, rows)
        job.give("method", "lora")
        job.give("targets", job.take("peft.target_modules") or "all-linear")
    way = job.take(f"{_M}recompute_granularity")
    job.take(f"{_M}recompute_method", f"{_M}recompute_num_layers")
    job.give("checkpointing", "full" if way == "full" else "none")
    if way == "selective":
        job.leave_out(
            f"{_M}recompute_granularity",
            f"{shown(way)} recomputation is priced as none; give --checkpointing",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="checkpointing",
        )


def _kind(job: ForeignJob) -> str:
    return str(job.take("mixed_precision") or "bf16_mixed").lower()
