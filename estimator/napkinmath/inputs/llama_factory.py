"""LLaMA-Factory's YAML or JSON: finetuning_type, cutoff_len, quantization_bit over
TrainingArguments (its src/llamafactory/hparams)."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import EXPANDABLE, ForeignJob, attention_word
from napkinmath.inputs.image_keys import read_image_limit
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.parallel_options import number_and_type
from napkinmath.inputs.rollouts import give_reward_model, give_rolled_length, name_epochs
from napkinmath.inputs.sharding import read_sharding
from napkinmath.inputs.trained_by import give_workload
from napkinmath.inputs.trainer import give_layerwise, read_batch, read_step

# BAdam (arXiv 2404.02827), Adam-mini (arXiv 2406.16793).
_FEWER_STATES = {
    "use_badam": "BAdam holds gradients and states of one block at a time",
    "use_adam_mini": "Adam-mini keeps one second moment for a block of a parameter",
}
_KINDS = ("lora", "full", "freeze", "oft")
_METHODS = {
    "bnb": "nf4",
    "bitsandbytes": "nf4",
    "hqq": "hqq-int4",
    "eetq": "eetq-int8",
    "gptq": "gptq-int4",
    "awq": "awq-int4",
}
_EIGHT_BITS = {"nf4": "int8", "hqq-int4": "hqq-int8", "gptq-int4": "gptq-int8"}


# What only a training says: train/tuner.py run_exp; the rest is api, chat, eval, export and webchat.
_TRAINING = ("do_train", "stage", "dataset", "learning_rate", "per_device_train_batch_size")
_OTHERS = ("export_dir", "infer_backend", "predict_with_generate", "do_predict")


_OWN_TRAINERS = ("dpo", "kto", "reward")  # whose memory differs from TRL's


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a LLaMA-Factory file."""
    _check_training(job)
    job.give("model", job.take("model_name_or_path"))
    read_batch(job)
    length = job.take("cutoff_len")
    if length is None:
        job.assume("ctx", 2048, "LLaMA-Factory's cutoff_len")
    else:
        job.give("ctx", length)
    if job.switch("packing", "neat_packing"):
        job.give("packing", True)
    # data/mm_plugin.py _preprocess_image; the default of hparams/model_args.py
    limit = "image_resolution" if "image_resolution" in job.content else "image_max_pixels"
    read_image_limit(job, limit, least="image_min_pixels", default=768 * 768)
    _read_workload(job)
    read_sharding(job)
    kind = job.take("finetuning_type") or "lora"
    quantized = _read_quantization(job)
    if kind not in _KINDS:
        raise InputError(
            f"finetuning_type {shown(kind)} is unknown; use lora, full or"
            f" freeze{suggest(str(kind), list(_KINDS))}"
        )
    if kind == "oft":
        job.leave_out(
            "finetuning_type",
            "orthogonal rotations of each linear's input are priced as LoRA's pairs",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="method",
        )
        kind = "lora"
    if quantized and kind != "lora":
        raise InputError(
            f"quantization_bit with finetuning_type {shown(kind)}: a quantized base needs adapters;"
            " use finetuning_type: lora"
        )
    _read_adapter(job, str(kind))
    _read_checkpointing(job)
    read_step(job)
    _read_low_rank_optimizers(job)
    flash = job.take("flash_attn")  # a switch until 0.7 (hparams/model_args.py)
    flash = {True: "fa2", False: None}[flash] if isinstance(flash, bool) else flash
    job.give("attention", attention_word(flash))
    if job.switch("use_unsloth"):
        job.give("kernels", "unsloth")
    if job.switch("enable_liger_kernel"):
        job.give("kernels", "liger")
    _read_precision(job, kind=str(kind), quantized=quantized)
    gpus = job.options.get("gpus", job.given.get("gpus"))
    if gpus is not None and number_and_type({"gpus": gpus})[0] > 1:
        job.give("allocator", EXPANDABLE)  # launcher.py, where it starts several processes
    return job.finish()


def _check_training(job: ForeignJob) -> None:
    """Raises InputError for a file that chats, exports, predicts or evaluates."""
    if not is_off(job.content.get("do_train")):
        return
    says = any(key in job.content for key in _TRAINING) or "template" not in job.content
    if says and all(is_off(job.content.get(key)) for key in _OTHERS):
        return
    named = shown(job.path) if job.path else "a file"
    raise InputError(
        f"{named} of LLaMA-Factory trains nothing: it lacks do_train: true; give the file of a"
        " training"
    )


def _read_workload(job: ForeignJob) -> None:
    stage = str(job.take("stage") or "sft")
    older = job.take("dpo_loss")  # its name before release 0.8
    loss = job.take("pref_loss") or older
    give_workload(job, "stage", (loss or "sigmoid") if stage == "dpo" else stage)
    if stage == "ppo":
        _read_rollouts(job)
    if job.options.get("workload") in _OWN_TRAINERS:
        job.give("stack", "llama-factory")
    if (reference := job.take("ref_model")) is not None:
        job.leave_out(
            "ref_model",
            f"the reference {shown(reference)} is priced as a copy of the model itself",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )


def _read_rollouts(job: ForeignJob) -> None:
    """PPO of trl 0.9: its value is one more linear on the policy, which scores its rollouts before
    the update (train/ppo/trainer.py, hparams/generating_args.py). That is RLOO's step."""
    job.give("workload", "rloo")
    job.note("the value of ppo is one linear on the policy: priced as rloo, without a critic")
    answer = ("max_new_tokens", job.take("max_new_tokens"))
    give_rolled_length(job, ("cutoff_len", job.options["ctx"]), answer, usual=1024)
    name_epochs(job, "ppo_epochs", 4)
    if str(job.take("reward_model_type") or "lora") == "full":
        give_reward_model(job, "reward_model")
    else:  # adapters on the policy, or a server
        job.take("reward_model")


def _read_quantization(job: ForeignJob) -> bool:
    bits, method = job.take("quantization_bit"), job.take("quantization_method") or "bnb"
    kind = job.take("quantization_type") or "nf4"
    nested = job.switch("double_quantization", default=True)
    if bits is None:
        return False
    width = values.count(bits, "quantization_bit")
    if width not in (4, 8):
        raise InputError(f"quantization_bit {shown(bits)} is not modelled; use 4 or 8")
    if str(method) not in _METHODS:
        raise InputError(
            f"quantization_method {shown(method)} is not modelled; use bnb, hqq, eetq, gptq or awq"
        )
    named = _METHODS[str(method)]
    bnb = named == "nf4"
    if width == 8:
        job.give("quant", _EIGHT_BITS.get(named, named))
        return True
    job.give("quant", str(kind) if bnb else named)
    if bnb:
        job.give("double_quant", nested)
    return True


def _read_adapter(job: ForeignJob, kind: str) -> None:
    rank, alpha, dropout = job.take("lora_rank"), job.take("lora_alpha"), job.take("lora_dropout")
    targets, saved = job.take("lora_target"), job.take("additional_target")
    dora, rslora = job.switch("use_dora"), job.switch("use_rslora")
    frozen = job.take("freeze_trainable_layers"), job.take("freeze_trainable_modules")
    frozen_parts = _frozen_parts(job)
    if kind == "freeze":
        job.leave_out(
            "finetuning_type",
            f"freeze trains {shown(frozen[0] or 2)} layers and is priced as full; give --freeze for"
            " the modules that stay fixed",
            memory=Difference.LESS,
            time=Difference.LESS,
            option="freeze",
        )
    if kind != "lora":
        job.give("method", "full")
        job.give("freeze", frozen_parts or None)
        return
    job.give("method", "dora" if dora else "lora")
    job.give("rank", 8 if rank is None else rank)
    job.give("alpha", alpha)
    job.give("dropout", dropout)
    job.give("targets", "all-linear" if targets in (None, "all", ["all"]) else targets)
    job.give("train_modules", saved)
    job.give("rslora", rslora or None)


def _frozen_parts(job: ForeignJob) -> list[str]:
    """Modules of an image-text model that stay fixed: the tower and the projector, unless said
    (hparams/finetuning_args.py; the modules' names are those of model/model_utils/visual.py)."""
    parts = (
        ("freeze_vision_tower", ("visual", "vision_tower", "vision_model", "audio_tower")),
        ("freeze_multi_modal_projector", ("multi_modal_projector", "merger")),
    )
    return [name for key, names in parts if job.switch(key, default=True) for name in names]


def _read_checkpointing(job: ForeignJob) -> None:
    """On unless disabled, whatever gradient_checkpointing says; reentrant by default."""
    job.take("gradient_checkpointing", "gradient_checkpointing_kwargs")
    job.take("activation_checkpointing", "activation_checkpointing_kwargs")
    off = job.switch("disable_gradient_checkpointing")
    job.give(
        "checkpointing", "none" if off else "offload" if job.switch("use_unsloth_gc") else "full"
    )
    reentrant = job.switch("use_reentrant_gc", default=True)
    if not off:
        job.give("reentrant", reentrant)


def _read_low_rank_optimizers(job: ForeignJob) -> None:
    for name in ("galore", "apollo"):
        layerwise = job.switch(f"{name}_layerwise")
        if job.switch(f"use_{name}"):
            job.give("optimizer", name)
            if job.options.get("method") == "lora":
                job.note(f"use_{name} beside LoRA is refused by the trainer; both are priced")
            if layerwise:
                give_layerwise(job)
    if job.switch("use_muon"):
        job.give("optimizer", "muon")
    for key, why in _FEWER_STATES.items():
        if job.switch(key):
            job.leave_out(
                key,
                f"{why}; AdamW over all parameters is priced",
                memory=Difference.LESS,
                time=Difference.EITHER,
                option="optimizer",
            )


def _read_precision(job: ForeignJob, *, kind: str, quantized: bool) -> None:
    job.take("tf32")
    bf16, fp16, pure = job.switch("bf16"), job.switch("fp16"), job.switch("pure_bf16")
    as_stored = kind == "lora" or quantized or job.switch("use_badam")
    if bf16 and fp16:
        raise InputError("bf16 and fp16 are both true; keep one of them")
    if job.switch("fp8"):
        job.give("precision", "fp8")
    elif pure:
        job.give("precision", "bf16")
    # Trained parameters are upcast to fp32 unless pure_bf16 or BAdam; a LoRA base stays as stored
    # (model/adapter.py init_adapter), which nothing casts where neither type is set.
    elif bf16:
        job.give("precision", "bf16-autocast" if as_stored else "bf16-amp")
    elif fp16:
        job.give("precision", "fp16-autocast" if as_stored else "fp16-amp")
    elif as_stored:
        job.give("precision", "bf16")
        job.note("neither bf16 nor fp16 is set: weights as stored (taken as bf16), no autocast")
    else:
        job.give("precision", "fp32")
        job.note("neither bf16 nor fp16 is set: float32")
