"""verl's Hydra configuration of `verl.trainer.fsdp_sft_trainer`: nested, or keys written with their
dots.

Keys and defaults: volcengine/verl verl/trainer/config/sft_trainer.yaml at b178a3cd56f5; what they
do: verl/trainer/fsdp_sft_trainer.py FSDPSFTTrainer (parameters of model_dtype, bf16 computation,
fp32 reduction, every micro-step reduced, checkpoints not reentrant).
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import OPTIMIZERS, Row, degree, give_step, read_rows, world_size

_OPTIMIZERS = {**OPTIMIZERS, "adamw": "adamw-foreach", "adam": "adamw-fused"}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an SFT file of verl."""
    job.content = {key.lstrip("+"): value for key, value in job.content.items()}
    job.flatten()
    read_rows(
        job,
        (
            Row("model", "model.partial_pretrain"),
            Row("ctx", "data.max_length", 1024),
            Row("optimizer", "optim.optimizer", "adamw-foreach", _OPTIMIZERS),
        ),
    )
    gpus = world_size(job, per_node="trainer.n_gpus_per_node", nodes="trainer.nnodes") or 8
    job.give("gpus", gpus)
    _read_adapter(job)
    _read_batch(job, _read_fsdp(job, gpus))
    clip = job.take("optim.clip_grad")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    on = job.switch("model.enable_gradient_checkpointing", default=True)
    job.give("checkpointing", "full" if on else "none")
    job.give("attention", "flash2")
    job.give("kernels", "liger" if job.switch("model.use_liger") else None)
    return job.finish()


def _read_adapter(job: ForeignJob) -> None:
    rank, alpha = job.take("model.lora_rank"), job.take("model.lora_alpha")
    targets = job.take("model.target_modules") or "all-linear"
    job.give("method", "full" if is_off(rank) else "lora")
    if not is_off(rank):
        job.give("rank", rank)
        job.give("alpha", 16 if alpha is None else alpha)
        job.give("targets", targets)


def _read_fsdp(job: ForeignJob, gpus: int) -> int:
    """Ranks that get data of their own. FSDP wraps the model on one GPU too, and computes as it
    does on several."""
    second = str(job.take("model.strategy") or "fsdp2") == "fsdp2"
    held = dtype_word(job.take("model.fsdp_config.model_dtype")) or "fp32"
    ulysses = degree(job, "ulysses_sequence_parallel_size")
    job.give("precision", "bf16")
    job.give("data_parallel", ["fsdp2" if second else "fsdp1"])
    job.give("sync_each_batch", True)
    job.give("sharded_dtype", held)
    job.give("reduce_dtype", "fp32")
    moves = job.switch("model.fsdp_config.offload_params")
    if job.switch("model.fsdp_config.cpu_offload") and moves:
        job.give("offload", "optimizer,parameters")
    if ulysses > 1:
        job.give("cp", ulysses)
        job.give("cp_kind", "ulysses")
    return max(1, gpus // ulysses)


def _read_batch(job: ForeignJob, ranks: int) -> None:
    each = job.take("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    rows = values.count(4 if each is None else each, "data.micro_batch_size_per_gpu")
    whole = values.count(job.take("data.train_batch_size") or 256, "data.train_batch_size")
    job.give("bs", rows)
    give_step(job, whole, rows=rows, ranks=ranks)
