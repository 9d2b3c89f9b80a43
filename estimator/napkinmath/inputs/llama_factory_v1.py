"""LLaMA-Factory's YAML of version 1: plugins named in `peft_config`, `quant_config`, `dist_config`
(its src/llamafactory/v1/config, core/model_engine.py, plugins)."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, attention_word
from napkinmath.inputs.sharding import read_deepspeed
from napkinmath.inputs.trained_by import give_workload


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a file of LLaMA-Factory 1."""
    job.give("model", job.take("model"))
    job.give("bs", job.take("micro_batch_size") or 1)
    job.give("global_batch", job.take("global_batch_size"))
    job.give("ctx", job.take("cutoff_len") or 2048)
    adapter = _read_adapter(job, job.section("peft_config"))
    _read_quantization(job, job.section("quant_config"))
    on = job.switch("enable_activation_checkpointing", default=True)
    job.give("checkpointing", "full" if on else "none")
    if (loss := job.take("pref_loss")) is not None:
        give_workload(job, "pref_loss", loss)
    job.give("attention", attention_word(job.take("flash_attn")))
    bf16 = job.switch("bf16", default=True)
    # Full training casts the model to fp32; an adapter's base stays as the checkpoint has it.
    job.give("precision", ("bf16-autocast" if adapter else "bf16-amp") if bf16 else "fp32")
    clip = job.take("max_grad_norm")
    job.give("clip", clip is None or clip != 0)
    name = job.section("optim_config").take("name")
    job.give("optimizer", name)
    _read_mesh(job, job.section("dist_config"))
    return job.finish()


def _read_adapter(job: ForeignJob, section: ForeignJob) -> bool:
    kind = section.take("name")
    if kind == "freeze":
        section.leave_out(
            "freeze_trainable_layers",
            "some layers are trained and all are priced; give --freeze for what stays fixed",
            memory=Difference.LESS,
            time=Difference.LESS,
            option="freeze",
        )
    if kind not in (None, "lora", "freeze"):
        raise InputError(f"peft_config {shown(kind)} is not modelled; use lora")
    if kind != "lora":
        job.give("method", "full")
        return False
    job.give("method", "dora" if section.switch("use_dora") else "lora")
    rank, alpha, dropout = (section.take(key) for key in ("r", "lora_alpha", "lora_dropout"))
    job.give("rank", 8 if rank is None else rank)
    job.give("alpha", 16 if alpha is None else alpha)
    job.give("dropout", 0.05 if dropout is None else dropout)
    targets = section.take("target_modules")
    job.give("targets", "all-linear" if targets in (None, "all") else targets)
    job.give("train_modules", section.take("modules_to_save"))
    if section.switch("use_rslora"):
        job.give("rslora", True)
    return True


def _read_quantization(job: ForeignJob, section: ForeignJob) -> None:
    if section.take("name") is None:
        return
    bits = values.count(section.take("quantization_bit") or 4, "quantization_bit")
    if bits not in (4, 8):
        raise InputError(f"quantization_bit {shown(bits)} is not modelled; use 4 or 8")
    kind = section.take("bnb_4bit_quant_type", "quantization_type") or "nf4"
    job.give("quant", str(kind) if bits == 4 else "int8")


def _read_mesh(job: ForeignJob, section: ForeignJob) -> None:
    kind = section.take("name")
    if kind == "deepspeed":
        read_deepspeed(job, section.take("config_file"))
    elif kind is not None:
        job.give("data_parallel", ["fsdp2"])
        if section.take("reshard_after_forward") is False:
            job.give("reshard", False)
        if section.switch("offload_params"):
            job.give("offload", "optimizer,parameters")
    if kind not in (None, "deepspeed", "fsdp2"):
        section.leave_out(
            "name",
            f"{shown(kind)} is priced as FSDP 2",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    context = values.count(job.take("cp_size") or 1, "cp_size")
    if context > 1:
        job.give("cp", context)
        job.give("cp_kind", job.take("cp_mode"))
    copies = values.count(job.take("mp_replicate_size") or 1, "mp_replicate_size")
    if copies > 1:
        job.give("sharding", "hybrid")
        job.give("shard_size", job.take("mp_shard_size"))
