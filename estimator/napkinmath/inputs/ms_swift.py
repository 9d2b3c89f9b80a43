"""ms-swift's YAML: the arguments of `swift sft`, `swift pt` and `swift rlhf` by their names.

Keys and defaults: modelscope/ms-swift swift/arguments (base_args, tuner_args, rlhf_args),
swift/trainers/arguments.py, swift/rlhf_trainers/args_mixin.py at 3602360a5623; the form of
checkpointing is that of swift/trainers/mixin.py. Below them are the Trainer's own keys.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.config.train_config import BITSANDBYTES_4BIT
from napkinmath.inputs.foreign import ForeignJob, attention_word, dtype_word
from napkinmath.inputs.image_keys import dismiss_images, read_image_limit, read_processor_limits
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rollouts import (
    give_rolled_length,
    give_vllm,
    leave_vllm_out,
    name_epochs,
    policy_alone_in_a_mesh,
    read_flattened,
    shares_gpus,
)
from napkinmath.inputs.rows import Row, read_rows, world_size
from napkinmath.inputs.sharding import file_of, read_sharding
from napkinmath.inputs.trained_by import give_workload
from napkinmath.inputs.trainer import read_evaluation, read_step
from napkinmath.models import config_file

_TUNERS: dict[str, object] = {"lora": "lora", "full": "full", "lisa": "full"}
_SERVER = ("vllm_server_host", "vllm_server_base_url")
_OWN_GPUS = ("vllm_device", "num_infer_workers")
_ENGINE_APART = ("sleep_level", "offload_model", "offload_optimizer", "move_model_batches")
_NEXT_TOKEN = ("cross_entropy", "loss_scale")
FROZEN = {
    "freeze_vit": ("visual", "vision_tower", "vision_model", "audio_tower"),
    "freeze_aligner": ("multi_modal_projector", "merger", "aligner"),
    "freeze_llm": ("language_model",),
}
_ROWS = (
    Row("model", "model model_id_or_path"),
    Row("bs", "per_device_train_batch_size batch_size", 1),
    Row("grad_accum", "gradient_accumulation_steps"),
    Row("packing", "packing"),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an ms-swift file."""
    rolls = str(job.content.get("rlhf_type")).lower() in ("grpo", "ppo")  # read_rolled_lengths
    read_rows(job, [Row("ctx", "max_length packing_length", None if rolls else 2048), *_ROWS])
    read_pixels(job)
    read_workload(job)
    quantized = read_quantization(job)
    full = _read_tuner(job)
    check_quantized(quantized=quantized, full=full)
    read_sharding_names(job)
    read_checkpointing_form(job)
    job.give("attention", attention_word(job.take("attn_impl")))
    if job.switch("use_galore"):
        job.give("optimizer", "galore")
    read_step(job)
    if not is_off(job.content.get("split_dataset_ratio")) or job.content.get("val_dataset"):
        size = job.content.get("per_device_eval_batch_size")
        read_evaluation(job, "per_device_eval_batch_size", 1 if size is None else size)
    read_precision(job, full=full)
    read_rolled_lengths(job)
    read_divergence(job)
    read_flattened(job, "padding_free")
    name_plugins(job)
    read_engine(job)
    policy_alone_in_a_mesh(job, "rlhf_type")
    return job.finish()


def read_rolled_lengths(job: ForeignJob) -> None:
    """max_length cuts the prompts of what rolls out, before its completions come (template/base.py
    _truncate, rlhf_trainers/rollout_mixin.py _template_context); GRPO's policy always scores its
    rollouts before the update (rlhf_trainers/grpo_trainer.py old_per_token_logps)."""
    workload = job.options.get("workload")
    if workload not in ("grpo", "rloo", "ppo"):
        return
    keys = ["max_completion_length", "max_new_tokens", "response_length"]
    prompt, answer = job.take("max_length"), job.take(*keys)
    if not is_off(job.content.get("use_vllm")):
        prompt, answer = _within_engine(job, prompt, answer)
    give_rolled_length(job, ("max_length", prompt), (keys[0], answer))
    if workload == "ppo":
        name_epochs(job, "num_ppo_epochs", 4)
        return
    job.give("old_logprobs", True)
    updates = values.count(job.take("num_iterations") or 1, "num_iterations")
    if updates > 1:
        job.leave_out(
            "num_iterations",
            f"rollouts are made once for {updates} updates; once for each is priced",
            time=Difference.LESS,
        )


def _within_engine(job: ForeignJob, prompt: object, answer: object) -> tuple[object, object]:
    """An engine of this process ends a completion where its longest sequence ends
    (swift/infer_engine/infer_engine.py set_default_max_tokens); a server has a limit of its own
    (rlhf_args.py). The longest completion, whose logits count, stands behind a shorter prompt."""
    most = job.take("vllm_max_model_len")
    if most is None or job.content.get("vllm_mode") == "server" or prompt is None:
        return prompt, answer
    whole, first = values.count(most, "vllm_max_model_len"), values.count(prompt, "max_length")
    longest = whole - min(first, whole // 2)
    if answer is not None:
        longest = min(longest, values.count(answer, "max_completion_length"))
    return min(first, whole - longest), longest


def name_plugins(job: ForeignJob) -> None:
    """Python files of the user's own are imported before the run: rewards of what is rolled out,
    else models, losses and trainers (swift/arguments/base_args/base_args.py external_plugins)."""
    rolls = job.options.get("workload") in ("grpo", "rloo", "ppo")
    if is_off(job.content.get("external_plugins")) or rolls:
        return
    job.leave_out(
        "external_plugins",
        "code of the run's own may change its model, loss and trainer, and is not read",
        memory=Difference.EITHER,
        time=Difference.EITHER,
    )


def read_divergence(job: ForeignJob) -> None:
    """A reference of GRPO unless beta is 0 (0.04 where nothing is said)."""
    factor = job.take("beta")
    if job.options.get("workload") == "grpo":
        job.give("reference", factor is None or not is_off(factor))


def read_engine(job: ForeignJob) -> bool:
    """Whether vLLM on the policy's GPUs is priced; what waits on the host while it generates:
    swift/rlhf_trainers/grpo_trainer.py offload_context."""
    usual = _usual_mode(job)
    if not shares_gpus(job, default=usual):
        if is_off(job.content.get("use_vllm")):  # completions are counted one by one
            job.take("num_generations")
        if _holds_no_engine(job, usual):
            job.take(*_ENGINE_APART)
        leave_vllm_out(job, default=usual)
        return False
    moves, states = job.switch("offload_model"), job.switch("offload_optimizer")
    waits = "policy" if moves else "optimizer" if states else None
    sleeps, batches = job.take("sleep_level"), job.take("move_model_batches")
    settings = {
        "rollout_sleep": sleeps,
        "rollout_offload": waits,
        "rollout_batches": batches,  # rollout_mixin.py split_batches
    }
    return give_vllm(job, "ms-swift", settings)


def _holds_no_engine(job: ForeignJob, usual: str) -> bool:
    """Whether no vLLM lies on the policy's GPUs, so that nothing sleeps or waits on the host for it
    (swift/arguments/rlhf_args.py _init_grpo, swift/rlhf_trainers/rollout_mixin.py enable_offload)."""
    mode = str(job.content.get("vllm_mode") or usual)
    return is_off(job.content.get("use_vllm")) or mode == "server"


def _usual_mode(job: ForeignJob) -> str:
    """How vLLM runs where the file does not say: on the policy's GPUs, unless a server's address is
    given (v3.8.2 trainers/arguments.py vllm_mode, llm/argument/rlhf_args.py _init_grpo). Earlier
    releases gave it GPUs of its own (v3.3.0 num_infer_workers, vllm_device)."""
    if job.take(*_OWN_GPUS) is not None:
        return ""
    return "server" if any(job.content.get(key) is not None for key in _SERVER) else "colocate"


def read_pixels(job: ForeignJob) -> None:
    """max_pixels scales images down before the processor (swift/template/vision_utils.py
    rescale_image); the shell's MIN_PIXELS and MAX_PIXELS are the processor's (qwen_vl_utils, by
    swift/model/models/qwen.py patch_qwen_vl_utils)."""
    read_image_limit(job, "max_pixels")
    read_processor_limits(job, "MIN_PIXELS", "MAX_PIXELS")
    dismiss_images(job, "VIDEO_", "FPS")


def check_quantized(*, quantized: bool, full: bool) -> None:
    """Raises InputError for quantized weights that are all trained."""
    if quantized and full:
        raise InputError("quant_bits with tuner_type 'full': use tuner_type: lora")


def read_teacher(job: ForeignJob) -> None:
    """The model that teaches or scores; of several that score, the first."""
    named = values.listed(job.take("teacher_model", "reward_model") or [])
    job.give("teacher", named[0] if named else None)
    if len(named) > 1:
        job.leave_out(
            "reward_model",
            f"of {len(named)} models that score, {shown(named[0])} alone is priced",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def read_workload(job: ForeignJob) -> None:
    """The trainer of `swift rlhf`, by its name or its loss."""
    kind, loss = job.take("rlhf_type"), str(job.take("loss_type") or _NEXT_TOKEN[0])
    task = job.take("task_type")
    read_teacher(job)
    if task not in (None, "causal_lm"):
        job.leave_out(
            "task_type",
            f"{shown(task)} ends in a small head; the head of the language model is priced",
            memory=Difference.LESS,
            time=Difference.LESS,
        )
    elif kind is not None:
        give_workload(job, "rlhf_type", kind)
    elif loss not in _NEXT_TOKEN:
        job.refuse("workload", f"loss_type {shown(loss)} of ms-swift is not priced")


def read_quantization(job: ForeignJob) -> bool:
    """Whether the weights are quantized as they are loaded."""
    bits, method = job.take("quant_bits", "quantization_bit"), job.take("quant_method") or "bnb"
    kind, nested = job.take("bnb_4bit_quant_type") or "nf4", "bnb_4bit_use_double_quant"
    double = job.switch(nested, default=True)
    if is_off(bits):
        return False
    width = values.count(bits, "quant_bits")
    formats = {("bnb", 4): str(kind), ("bnb", 8): "int8", ("hqq", 4): "hqq-int4"}
    found = formats.get((str(method), width))
    if found is None:
        job.refuse("quant", f"quant_method {shown(method)} with {width} bits is not modelled")
    job.give("quant", found)
    if found in BITSANDBYTES_4BIT:
        job.give("double_quant", double)
    return True


def _read_tuner(job: ForeignJob) -> bool:
    """Whether all parameters are trained; LoRA unless said."""
    tuner = Row("method", "tuner_type train_type sft_type", "lora", _TUNERS)
    read_rows(job, [tuner])
    frozen = [
        name
        for key, names in FROZEN.items()
        if job.switch(key, default=key != "freeze_llm")
        for name in names
    ]
    if job.options.get("method") == "full":
        job.give("freeze", frozen or None)
        return True
    job.options["method"] = "dora" if job.switch("use_dora") else "lora"
    rows = (
        Row("rank", "lora_rank", 8),
        Row("alpha", "lora_alpha", 32),
        Row("dropout", "lora_dropout lora_dropout_p", 0.05),
        Row("train_modules", "modules_to_save"),
        Row("rslora", "use_rslora"),
    )
    read_rows(job, rows)
    targets = job.take("target_modules", "lora_target_modules", "target_regex")
    named = [str(name).lower() for name in values.listed(targets)]
    whole = targets is None or "all-linear" in named or "all" in named
    if whole and len(named) > 1:
        job.leave_out(
            "target_modules",
            "all-linear is priced, without what is named beside it",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    job.give("targets", "all-linear" if whole else targets)
    return False


def read_checkpointing_form(job: ForeignJob) -> None:
    """On unless said; reentrant but under DistributedDataParallel, unless said."""
    keywords = _keywords(job.take("gradient_checkpointing_kwargs"))
    on = job.switch("gradient_checkpointing", default=True)
    if job.options.get("checkpointing") == "full":  # FSDP's own, which turns the model's off
        job.give("reentrant", False)
        return
    job.give("checkpointing", "full" if on else "none")
    alone = world_size(job) in (None, 1) or job.options.get("data_parallel") not in (None, ["ddp"])
    job.give("reentrant", keywords.get("use_reentrant", alone) if on else None)


def _keywords(given: object) -> dict[str, object]:
    """A mapping, or the JSON of one."""
    if isinstance(given, str):
        given = config_file.parse(given, "gradient_checkpointing_kwargs", what="value")
    return {} if given is None else values.mapping(given, "gradient_checkpointing_kwargs")


# swift/config/fsdp2.json; swift/arguments/sft_args.py _init_fsdp
_FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": True,
    },
}


def read_sharding_names(job: ForeignJob) -> None:
    """`deepspeed: zero2` names a file of ms-swift's own, in 2023 'default-zero2' and
    'zero2-offload'; `fsdp: fsdp2` another."""
    ulysses = values.count(job.take("sequence_parallel_size") or 1, "sequence_parallel_size")
    if ulysses > 1:
        job.give("cp", ulysses)
        job.give("cp_kind", "ulysses")
    word = str(job.content.get("deepspeed") or "").removeprefix("default-")
    named = word.replace("-", "_").partition("_")
    if named[0] in ("zero0", "zero1", "zero2", "zero3"):
        job.take("deepspeed")
        job.give("data_parallel", ["ddp" if named[0] == "zero0" else named[0]])
        if named[2] == "offload":
            parts = "optimizer,parameters" if named[0] == "zero3" else "optimizer"
            job.give("offload", parts)
        return
    named = str(job.content.get("fsdp") or "")
    if named == "fsdp2" or named.endswith(".json"):
        preset = _FSDP2 if named == "fsdp2" else file_of(job, named, "FSDP's file")
        if preset is None:
            job.refuse("data_parallel", f"the file {shown(named)} of fsdp is not there")
        given = values.mapping(preset or {}, "fsdp")
        inner = {"fsdp_version": 2, **values.mapping(given.get("fsdp_config", {}), "fsdp_config")}
        strategy = given.get("fsdp", "full_shard auto_wrap")
        job.content = {**job.content, "fsdp": strategy, "fsdp_config": inner}
    read_sharding(job)


def read_precision(job: ForeignJob, *, full: bool) -> None:
    """Weights in torch_dtype, computed under the Trainer's bf16 or fp16; fp32 weights mean fp16.
    AUTO was bf16 where the GPU has it."""
    kind = dtype_word(job.take("torch_dtype", "dtype")) or "auto"
    kind = "bf16" if kind == "auto" else kind
    default = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp16"}.get(kind, "")
    bf16 = job.switch("bf16", default=default == "bf16" and not job.content.get("fp16"))
    fp16 = job.switch("fp16", default=default == "fp16" and not bf16)
    if bf16:
        job.give("precision", "bf16-amp" if kind == "fp32" else "bf16-autocast")
    elif fp16:
        job.give("precision", "fp16-amp" if kind == "fp32" or full else "fp16-autocast")
    else:
        job.give("precision", kind)
