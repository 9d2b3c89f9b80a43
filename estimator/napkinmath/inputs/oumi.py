"""oumi's training YAML: model, training, peft, fsdp and deepspeed over TRL and the HF Trainer.

Keys and defaults: oumi-ai/oumi src/oumi/core/configs/training_config.py and params/*_params.py at
d8ed07778d79; the trainers' arguments follow from them in TrainingParams.to_hf. Weights are in
torch_dtype_str, and nothing is cast unless mixed_precision_dtype says so.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.foreign import ForeignJob, attention_word, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rollouts import give_old_logprobs, give_rolled_length, name_rollouts
from napkinmath.inputs.rows import Row, give_targets, kernels_before_compiler, read_rows
from napkinmath.inputs.sharding import STRATEGIES, guess_stage
from napkinmath.inputs.trainer import read_evaluation

_TRAINERS: dict[str, object] = {
    "hf": "sft",
    "oumi": "sft",
    "trl_sft": "sft",
    "trl_dpo": "dpo",
    "trl_kto": "kto",
    "trl_grpo": "grpo",
    "trl_gkd": "distill",
    "trl_gold": "distill",
    "verl_grpo": "grpo",
}
_K = "training.trainer_kwargs."
_T, _P, _F, _D = "training.", "peft.", "fsdp.", "deepspeed."
_ROWS = (
    Row("model", "model.model_name"),
    Row("ctx", f"model.model_max_length {_K}max_length {_K}max_seq_length", 2048),
    Row("workload", f"{_T}trainer_type", words=_TRAINERS),
    Row("bs", f"{_T}per_device_train_batch_size", 8),
    Row("grad_accum", f"{_T}gradient_accumulation_steps"),
    Row("optimizer", f"{_T}optimizer", "adamw_torch"),
    Row("packing", "data.train.pack"),
    Row("compile", f"{_T}compile model.compile"),
    Row("completion", f"{_T}gold.max_completion_length"),
    Row("teacher", f"{_T}gkd.teacher_model_name_or_path {_T}gold.teacher_model_name_or_path"),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an oumi training file."""
    job.flatten()
    read_rows(job, _ROWS)
    if job.options.get("workload") == "sft":
        del job.options["workload"]
    clip = job.take(f"{_T}max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    on = job.switch(f"{_T}enable_gradient_checkpointing")
    job.give("checkpointing", "full" if on else "none")
    reentrant = job.take(f"{_T}gradient_checkpointing_kwargs.use_reentrant")
    job.give("reentrant", reentrant if on else None)
    job.give("attention", attention_word(job.take("model.attn_implementation")))
    _read_kernels(job)
    quantized = _read_adapter(job)
    _read_sharding(job)
    _read_precision(job, quantized=quantized)
    if str(job.take(f"{_T}eval_strategy") or "no").lower() != "no":
        size = job.take(f"{_T}per_device_eval_batch_size")
        read_evaluation(job, f"{_T}per_device_eval_batch_size", 8 if size is None else size)
    if job.options.get("workload") == "grpo":
        _read_rollouts(job)
    by_verl = str(job.content.get(f"{_T}trainer_type")).lower() == "verl_grpo"
    if job.switch(f"{_T}grpo.use_vllm", f"{_T}gold.use_vllm") or by_verl:
        name_rollouts(job, f"{_T}grpo.use_vllm", "vLLM")
    return job.finish()


def _read_rollouts(job: ForeignJob) -> None:
    """TRL's GRPO, which model_max_length does not cut (params/grpo_params.py); the rest of TRL's
    arguments is in trainer_kwargs."""
    prompt, answer = (
        (key, job.take(f"{_T}grpo.{key}")) for key in ("max_prompt_length", "max_completion_length")
    )
    give_rolled_length(job, prompt, answer, most=job.options.get("ctx"))
    job.give("reference", not is_off(job.take(f"{_T}trainer_kwargs.beta")))
    engine = job.content.get(f"{_T}grpo.use_vllm")
    give_old_logprobs(job, engine=engine, prefix=f"{_T}trainer_kwargs.")


def _read_kernels(job: ForeignJob) -> None:
    if not job.switch("model.enable_liger_kernel"):
        return
    job.give("kernels", "liger")
    kernels_before_compiler(job, f"{_T}compile")


def _read_adapter(job: ForeignJob) -> bool:
    """Whether the base is quantized."""
    adapts, quantizes = job.switch(f"{_T}use_peft"), job.switch(f"{_P}q_lora")
    bits, nested = job.take(f"{_P}q_lora_bits"), job.switch(f"{_P}use_bnb_nested_quant")
    kind = job.take(f"{_P}bnb_4bit_quant_type") or "fp4"
    frozen, targets = job.take("model.freeze_layers"), job.take(f"{_P}lora_target_modules")
    rows = (
        Row("rank", f"{_P}lora_r", 8),
        Row("alpha", f"{_P}lora_alpha", 8),
        Row("dropout", f"{_P}lora_dropout"),
        Row("train_modules", f"{_P}lora_modules_to_save"),
    )
    if not adapts:
        if quantizes:
            raise InputError("peft.q_lora without training.use_peft; set use_peft: true")
        for row in rows:
            job.take(*row.keys.split())
        job.give("method", "full")
        job.give("freeze", frozen or None)
        return False
    read_rows(job, rows)
    job.give("method", "lora")
    named = None if targets in (None, [], ["all-linear"], "all-linear") else targets
    give_targets(job, named or "all-linear", f"{_P}lora_target_parameters")
    if targets is None:
        job.note("peft.lora_target_modules not given, taken as all-linear")
    if quantizes and bits not in (None, 4, 8):
        raise InputError(f"peft.q_lora_bits {shown(bits)} is not modelled; use 4 or 8")
    if quantizes:
        job.give("quant", "int8" if bits == 8 else str(kind))
        job.give("double_quant", nested if bits != 8 else None)
    return quantizes


def _read_sharding(job: ForeignJob) -> None:
    """FSDP 1 by accelerate, or DeepSpeed; the file does not say over how many GPUs."""
    shards, speeds = job.switch(f"{_F}enable_fsdp"), job.switch(f"{_D}enable_deepspeed")
    strategy = str(job.take(f"{_F}sharding_strategy") or "FULL_SHARD").lower()
    offloads, ahead = job.switch(f"{_F}cpu_offload"), job.take(f"{_F}forward_prefetch")
    before, wrap = job.take(f"{_F}backward_prefetch"), job.take(f"{_F}auto_wrap_policy")
    state = str(job.take(f"{_F}state_dict_type") or "FULL_STATE_DICT").upper()
    if shards:
        if strategy not in STRATEGIES:
            job.refuse("sharding", f"fsdp.sharding_strategy {shown(strategy)} is unknown")
        job.give("data_parallel", ["fsdp1"])
        job.give("sharding", STRATEGIES.get(strategy))
        job.give("offload", "optimizer,parameters" if offloads else None)
        job.give("forward_prefetch", ahead)
        job.give("backward_prefetch", str(before or "BACKWARD_PRE").upper() == "BACKWARD_PRE")
        job.give("wrap", "none" if str(wrap or "NO_WRAP").upper() == "NO_WRAP" else None)
        job.give("full_state_dict", state == "FULL_STATE_DICT" or None)
    _read_deepspeed(job, on=speeds and not shards)


def _read_deepspeed(job: ForeignJob, *, on: bool) -> None:
    path, stage = job.take(f"{_D}deepspeed_config_path"), str(job.take(f"{_D}zero_stage") or "0")
    places = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    devices = {part: job.take(f"{_D}{key}.device") for part, key in places.items()}
    if not on:
        return
    if path is not None:
        guess_stage(job, str(path))
        return
    number = stage[-1:]
    job.give("data_parallel", [f"zero{number}" if number in "123" else "ddp"])
    found = [
        part
        for part, device in devices.items()
        if any(name.startswith(f"{_D}{places[part]}.") for name in job.content)
        and str(device or "cpu").lower() == "cpu"
    ]
    job.give("offload", ",".join(found) or None)


def _read_precision(job: ForeignJob, *, quantized: bool) -> None:
    mixed = str(job.take(f"{_T}mixed_precision_dtype", f"{_F}mixed_precision") or "none").lower()
    held = dtype_word(job.take("model.torch_dtype_str") or "auto")
    held = "bf16" if held == "auto" else held
    if mixed == "bf16":
        job.give("precision", "bf16-amp" if held == "fp32" else "bf16-autocast")
    elif mixed == "fp16":
        job.give("precision", "fp16-autocast" if quantized else "fp16-amp")
    else:
        job.give("precision", held)
