"""axolotl's YAML: base_model, adapter, sequence_len, micro_batch_size and their neighbours (axolotl docs/config)."""

from __future__ import annotations

from napkinmath.errors import InputError, shown, suggest
from napkinmath.inputs import values
from napkinmath.inputs.foreign import ForeignJob, attention_word, dtype_word, precision_of

_ADAPTERS = ("lora", "qlora")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an axolotl file."""
    job.give("model", job.take("base_model"))
    job.give("bs", job.take("micro_batch_size"))
    if "bs" not in job.options:
        job.assume("bs", 1, "axolotl's default")
    job.give("grad_accum", job.take("gradient_accumulation_steps"))
    job.give("ctx", job.take("sequence_len"))
    if "ctx" not in job.options:
        job.assume("ctx", 512, "axolotl's sequence_len")
    if job.take("sample_packing") is not None:
        job.give("packing", job.switch("sample_packing"))
    job.take("pad_to_sequence_len", "eval_sample_packing", "strict")
    adapter = job.take("adapter")
    quantized = _read_quantization(job, adapter)
    _read_adapter(job, adapter, quantized=quantized)
    _read_checkpointing(job)
    _read_attention(job)
    _read_kernels(job)
    job.give("optimizer", job.take("optimizer"))
    clip = job.take("max_grad_norm")
    if clip is not None:
        job.give("clip", clip != 0)
    if job.take("torch_compile") is not None:
        job.give("compile", str(job.take("torch_compile")).lower() != "false")
    _read_precision(job, quantized=quantized, adapter=adapter is not None)
    return job.finish()


def _read_quantization(job: ForeignJob, adapter: object) -> bool:
    four, eight, gptq = job.switch("load_in_4bit"), job.switch("load_in_8bit"), job.switch("gptq")
    if four and eight:
        raise InputError("load_in_4bit and load_in_8bit are both true; keep one of them")
    if adapter == "qlora" and eight:
        raise InputError("adapter: qlora contradicts load_in_8bit: true; use adapter: lora or load_in_4bit: true")
    if adapter == "qlora" or four:
        job.give("quant", "nf4")
        job.give("double_quant", True)
    elif eight and adapter is not None:
        job.give("quant", "int8")
    elif gptq:
        job.give("quant", "gptq-int4")
    return "quant" in job.options


def _read_adapter(job: ForeignJob, adapter: object, *, quantized: bool) -> None:
    rank, alpha, dropout = job.take("lora_r"), job.take("lora_alpha"), job.take("lora_dropout")
    targets, linear, saved = job.take("lora_target_modules"), job.switch("lora_target_linear"), job.take("lora_modules_to_save")
    dora, rslora = job.switch("peft_use_dora"), job.switch("peft_use_rslora")
    if adapter is None:
        if quantized:
            raise InputError("a quantized base needs an adapter to train; set adapter: qlora")
        unfrozen = job.take("unfrozen_parameters")
        if unfrozen:
            job.note(f"unfrozen_parameters {shown(unfrozen)} not priced: every parameter is trained; give --freeze for what is not")
        return
    if adapter not in _ADAPTERS:
        raise InputError(f"adapter {shown(adapter)} is unknown; use lora or qlora{suggest(str(adapter), list(_ADAPTERS))}")
    job.give("method", "dora" if dora else "lora")
    job.give("rank", 8 if rank is None else rank)
    job.give("alpha", alpha)
    job.give("dropout", dropout)
    job.give("targets", "all-linear" if linear or targets is None else targets)
    if targets is not None and linear:
        job.note("lora_target_linear and lora_target_modules both given: all linears taken")
    job.give("train_modules", saved)
    if rslora:
        job.give("rslora", True)


def _read_checkpointing(job: ForeignJob) -> None:
    value = job.take("gradient_checkpointing")
    keywords = job.mapping("gradient_checkpointing_kwargs")
    if job.switch("activation_offloading"):
        value = "offload"
    if isinstance(value, str) and value.lower() in ("unsloth", "offload", "offload_disk"):
        job.give("checkpointing", "offload")
    else:
        job.give("checkpointing", "full" if job.switch("gradient_checkpointing") else "none")
    if "use_reentrant" in keywords:
        job.give("reentrant", keywords["use_reentrant"])


def _read_attention(job: ForeignJob) -> None:
    named = attention_word(job.take("attn_implementation"))
    flags = {
        "flash_attention": "flash2",
        "sdp_attention": "sdpa",
        "xformers_attention": "efficient",
        "eager_attention": "eager",
        "flex_attention": "sdpa",
        "s2_attention": "flash2",
    }
    chosen = [ours for key, ours in flags.items() if job.switch(key)]
    if len(set(chosen)) > 1:
        raise InputError(f"{' and '.join(key for key in flags if job.content.get(key))} are both true; keep one of them")
    job.give("attention", chosen[0] if chosen else named)


def _read_kernels(job: ForeignJob) -> None:
    plugins = job.take("plugins")
    names = [str(plugin).lower() for plugin in values.listed(plugins)]
    liger = [key for key in job.content if key.startswith("liger_") and job.switch(key)]
    if any("liger" in name for name in names) or liger:
        job.give("kernels", "liger")
    if any("cut_cross_entropy" in name for name in names) or job.switch("cut_cross_entropy"):
        job.give("loss", "fused")
    if any(job.switch(key) for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")):
        job.give("kernels", "unsloth")
        job.note("lora_*_kernel taken as unsloth's patches, from which they come")
    if job.switch("unsloth_lora_mlp") or job.switch("unsloth_lora_qkv") or job.switch("unsloth_cross_entropy_loss"):
        job.give("kernels", "unsloth")


def _read_precision(job: ForeignJob, *, quantized: bool, adapter: bool) -> None:
    bf16, fp16 = job.take("bf16"), job.take("fp16")
    pure = job.switch("bfloat16") or str(bf16).lower() == "full"
    half = job.switch("float16")
    weights = dtype_word(job.take("torch_dtype", "dtype")) or ("bfloat16" if pure else "float16" if half else "")
    uses_bf16 = not pure and (
        str(bf16).lower() == "auto" or (bf16 is None and fp16 is None and not half) or job.switch("bf16")
        if str(bf16).lower() not in ("auto", "full")
        else str(bf16).lower() == "auto"
    )
    if bf16 is None and uses_bf16:
        job.note("bf16 not given, taken as auto: true on the GPUs that have it")
    uses_fp16 = False if fp16 is None else job.switch("fp16")
    if job.switch("fp8"):
        job.give("precision", "fp8")
        return
    job.give(
        "precision",
        precision_of(
            job,
            bf16=uses_bf16,
            fp16=uses_fp16 and not uses_bf16,
            tf32=job.switch("tf32"),
            weights=weights,
            quantized=quantized,
            adapter=adapter,
        ),
    )
