"""axolotl's YAML: base_model, adapter, sequence_len, micro_batch_size and their neighbours (axolotl
0.19 utils/schemas, utils/config)."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import EXPANDABLE, ForeignJob, attention_word
from napkinmath.inputs.image_keys import read_image_size
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rollouts import (
    give_engine,
    give_old_logprobs,
    give_rolled_length,
    name_rollouts,
    policy_alone_in_a_mesh,
    read_flattened,
    shares_gpus,
)
from napkinmath.inputs.rows import (
    give_both_targets,
    give_parts,
    give_targets,
    kernels_before_compiler,
    name_ligers_loss,
)
from napkinmath.inputs.sharding import read_mesh, read_sharding
from napkinmath.inputs.trained_by import give_workload
from napkinmath.inputs.trainer import read_evaluation

_ADAPTERS = ("lora", "qlora")
_MESH = {
    "tp": ("tensor_parallel_size",),
    "cp": ("context_parallel_size", "sequence_parallel_degree"),
    "replicas": ("dp_replicate_size",),
    "shards": ("dp_shard_size",),
}
_LORA_KERNELS = {
    "lora_mlp_kernel": "mlp",
    "lora_qkv_kernel": "qkv",
    "lora_o_kernel": "o",
    "lora_embedding_kernel": "",  # of adapters on embeddings, which hardly any run has
}
_LIGER = {
    "liger_rms_norm": "norm",
    "liger_rope": "rope",
    "liger_glu_activation": "gate",
    "liger_fused_linear_cross_entropy": "loss",
}
_UNSLOTHS = ("unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o", "unsloth_cross_entropy_loss")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an axolotl file."""
    job.give("model", job.take("base_model"))
    job.give("bs", job.take("micro_batch_size"))
    if "bs" not in job.options:
        job.assume("bs", 1, "axolotl's default")
    job.give("grad_accum", job.take("gradient_accumulation_steps"))
    _read_length(job)
    if job.take("sample_packing") is not None:
        job.give("packing", job.switch("sample_packing"))
    if any(not is_off(job.content.get(key)) for key in ("val_set_size", "test_datasets")):
        size = job.content.get("eval_batch_size")
        read_evaluation(job, "eval_batch_size", job.options["bs"] if size is None else size)
    job.take("pad_to_sequence_len")
    read_image_size(job, "image_size")  # processing_strategies.py: an int is a padded square
    if "image" in job.given:  # loaders/utils.py, loaders/processor.py: where image_size is not said
        job.note(
            "--image is priced as given: axolotl scales images to image_size before, or to the side"
            " that the model's vision_config has; give that size"
        )
    _read_workload(job)
    # core/builders/causal.py, rl.py: the collator of transformers, and TRL's padding_free
    read_flattened(job, "dpo_padding_free" if "rl" in job.content else "batch_flattening")
    _name_padding(job)
    read_sharding(job)
    read_mesh(job, _MESH)
    adapter = job.take("adapter")
    quantized = _read_quantization(job, adapter)
    _read_adapter(job, adapter, quantized=quantized)
    _read_checkpointing(job)
    _read_attention(job)
    _read_kernels(job)
    shards = job.take("tiled_mlp_num_shards")
    if job.switch("tiled_mlp"):  # monkeypatch/tiled_mlp/patch.py tiled_mlp_forward
        job.give("mlp_tiles", shards or "auto")
    job.give("optimizer", job.take("optimizer"))
    clip = job.take("max_grad_norm")
    if clip is not None:
        job.give("clip", clip != 0)
    if job.take("torch_compile") is not None:
        job.give("compile", str(job.take("torch_compile")).lower() != "false")
        kernels_before_compiler(job, "torch_compile")
    _read_precision(job)
    policy_alone_in_a_mesh(job, "rl")
    job.give("allocator", EXPANDABLE)  # utils/__init__.py set_pytorch_cuda_alloc_conf
    return job.finish()


def _read_workload(job: ForeignJob) -> None:
    for key, word in (("reward_model", "reward"), ("process_reward_model", "prm")):
        if job.switch(key):
            give_workload(job, key, word)
    rl = job.take("rl")
    if rl is not None:
        give_workload(job, "rl", rl)
    if job.switch("precompute_ref_log_probs"):
        job.give("reference", False)
    trl, engine = job.section("trl"), job.section("vllm")
    if job.options.get("workload") == "grpo":
        _read_rollouts(job, trl, engine)


def _read_length(job: ForeignJob) -> None:
    length = job.take("sequence_len")
    if length is None:
        job.assume("ctx", 512, "axolotl's sequence_len")
    else:
        job.give("ctx", length)


def _name_padding(job: ForeignJob) -> None:
    """Says that rows are as long as the longest of their batch (core/builders/causal.py
    build_collator), which no file says: at most what is priced."""
    padded, rolls = job.content.get("pad_to_sequence_len"), job.options.get("workload") == "grpo"
    if padded is None or not is_off(padded) or job.options.get("packing") or rolls:
        return
    if "lengths" in job.given:
        return
    job.leave_out(
        "pad_to_sequence_len",
        f"rows of {job.options['ctx']} tokens, the most that sequence_len allows, are priced; a batch"
        " is padded to its longest sequence alone: give --ctx the length that they have",
        memory=Difference.LESS,
        time=Difference.LESS,
        option="ctx",
    )


def _read_rollouts(job: ForeignJob, trl: ForeignJob, engine: ForeignJob) -> None:
    """GRPO's block of TRL's arguments; sequence_len cuts neither prompts nor completions
    (core/trainers/grpo get_blocklist_args_kwargs, utils/data/rl.py _drop_long_sequences), and beta
    is TRL's 0 where none is given (core/builders/rl.py)."""
    answer = ("trl.max_completion_length", trl.take("max_completion_length"))
    limit = engine.take("max_model_len")
    if job.content.get("sequence_len") is not None:
        job.note("sequence_len cuts no sequence of rl: grpo, prompts are taken apart")
    give_rolled_length(job, ("", None), answer, most=limit)
    give_old_logprobs(trl, engine=trl.content.get("use_vllm"))
    job.give("reference", not is_off(trl.take("beta") or job.take("rl_beta", "orpo_alpha")))
    group = trl.take("num_generations")
    if shares_gpus(trl, default="colocate"):
        names = ("gpu_memory_utilization", "tensor_parallel_size")
        share, tp = (engine.take(name) for name in names)
        trl.take("use_vllm", "vllm_mode")
        sleeps = trl.switch("vllm_enable_sleep_mode")
        settings = {
            "rollout_memory": share,
            "rollout_tp": tp,
            "rollout_group": group,
            "rollout_sleep": 2 if sleeps else None,
        }
        give_engine(job, "trl.use_vllm", "vllm", "trl", settings)
    elif not is_off(trl.content.get("use_vllm")):
        name_rollouts(trl, "use_vllm", "vLLM")


def _read_quantization(job: ForeignJob, adapter: object) -> bool:
    four, eight, gptq = job.switch("load_in_4bit"), job.switch("load_in_8bit"), job.switch("gptq")
    if four and eight:
        raise InputError("load_in_4bit and load_in_8bit are both true; keep one of them")
    if adapter == "qlora" and eight:
        raise InputError(
            "adapter: qlora contradicts load_in_8bit: true; use adapter: lora or load_in_4bit: true"
        )
    if adapter == "qlora" or four:
        job.give("quant", "nf4")
        job.give("double_quant", True)
    elif eight and adapter is not None:
        job.give("quant", "int8")
    elif gptq:
        job.give("quant", "gptq-int4")
    if job.switch("quantize_moe_experts") and "quant" in job.options:
        job.give("quantize_experts", True)
        kinds = values.listed(job.options.get("data_parallel"))
        if any(str(kind).startswith("fsdp") for kind in kinds):
            job.leave_out(
                "quantize_moe_experts",
                "experts are priced as sharded once they are loaded; axolotl says that FSDP2 does"
                " not shard every layer (docs/expert_quantization.qmd)",
                memory=Difference.MORE,
            )
    _read_loading(job)
    return "quant" in job.options


def _read_loading(job: ForeignJob) -> None:
    """Where 4-bit weights wait to be sharded: loaders/model.py keeps the device map of a GPU for
    QLoRA, but for `cpu_ram_efficient_loading` under FSDP 2, which is that of the host."""
    kinds = values.listed(job.options.get("data_parallel"))
    if "fsdp2" in kinds and job.options.get("broadcast_loading") and "quant" in job.options:
        job.leave_out(
            "fsdp_config.cpu_ram_efficient_loading",
            "weights are priced as packed whole on every GPU; axolotl packs them in the memory of"
            " one rank's host",
            memory=Difference.LESS,
        )


def _read_adapter(job: ForeignJob, adapter: object, *, quantized: bool) -> None:
    rank, alpha, dropout = job.take("lora_r"), job.take("lora_alpha"), job.take("lora_dropout")
    targets, linear, saved = (
        job.take("lora_target_modules"),
        job.switch("lora_target_linear"),
        job.take("lora_modules_to_save"),
    )
    dora, rslora = job.switch("peft_use_dora"), job.switch("peft_use_rslora")
    autocast_adapters = job.take("peft_autocast_adapter_dtype")
    if adapter is None:
        if quantized:
            raise InputError("a quantized base needs an adapter to train; set adapter: qlora")
        unfrozen = job.take("unfrozen_parameters")
        if unfrozen:
            job.leave_out(
                "unfrozen_parameters",
                "every parameter is priced as trained; give --freeze for what is not",
                memory=Difference.LESS,
                time=Difference.LESS,
                option="freeze",
            )
        return
    if not is_off(job.content.get("unfrozen_parameters")):  # train.py setup_model_and_tokenizer
        job.leave_out(
            "unfrozen_parameters",
            "it decides again what is trained, once the adapter is made",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    if adapter not in _ADAPTERS:
        raise InputError(
            f"adapter {shown(adapter)} is unknown; use lora or"
            f" qlora{suggest(str(adapter), list(_ADAPTERS))}"
        )
    job.give("method", "dora" if dora else "lora")
    job.give("rank", 8 if rank is None else rank)
    job.give("alpha", alpha)
    job.give("dropout", dropout)
    parameters = job.content.get("lora_target_parameters")
    every = linear or (targets is None and not parameters)
    give_targets(job, "all-linear" if every else targets, "lora_target_parameters")
    if targets is not None and linear:
        give_both_targets(job, targets, saved)
    job.give("train_modules", saved)
    if rslora:
        job.give("rslora", True)
    if quantized:
        job.give(
            "kbit", False
        )  # loaders/model.py makes embeddings, head and norms half precision again after the k-bit preparation
    if autocast_adapters is not None and not job.switch("peft_autocast_adapter_dtype"):
        job.give("adapter_dtype", "bf16")


def _read_checkpointing(job: ForeignJob) -> None:
    value = job.take("gradient_checkpointing")
    keywords = job.mapping("gradient_checkpointing_kwargs")
    offloading = str(job.take("activation_offloading") or "").lower() not in ("", "false")
    if isinstance(value, str) and value.lower() in ("unsloth", "offload", "offload_disk"):
        job.give("checkpointing", "offload")
    elif job.switch("gradient_checkpointing"):
        job.give("checkpointing", "offload" if offloading else "full")
    elif job.options.get("checkpointing") == "full":
        return  # fsdp_config.activation_checkpointing: accelerate's wrapper, which is not reentrant
    else:
        job.give("checkpointing", "none")
        job.give("offload", "activations" if offloading else None)
    if job.options["checkpointing"] == "none":
        return
    # utils/config normalize_config: reentrant unless something of this is given
    others = ("unfrozen_parameters", "rl", "gradient_checkpointing_kwargs")
    by_default = all(job.content.get(key) is None for key in others)
    job.give("reentrant", keywords.get("use_reentrant", by_default))


def _read_attention(job: ForeignJob) -> None:
    named = attention_word(job.take("attn_implementation"))
    flags = {
        "flash_attention": "flash2",
        "sdp_attention": "sdpa",
        "xformers_attention": "efficient",
        "eager_attention": "eager",
        "flex_attention": "flex",
        "s2_attention": "flash2",
    }
    chosen = [ours for key, ours in flags.items() if job.switch(key)]
    if len(set(chosen)) > 1:
        raise InputError(
            f"{' and '.join(key for key in flags if job.content.get(key))} are both true; keep one"
            " of them"
        )
    attention = chosen[0] if chosen else named
    job.give("attention", attention)
    full = job.options.get("method") is None and not job.switch("cut_cross_entropy")
    if full and attention in (None, "sdpa", "eager"):
        job.note(
            "without flash attention axolotl keeps embeddings and norms of a full fine-tuning in"
            " fp32: not priced"
        )


def _read_kernels(job: ForeignJob) -> None:
    plugins = job.take("plugins")
    names = [str(plugin).lower() for plugin in values.listed(plugins)]
    cut = job.take("cut_cross_entropy")
    if any("cut_cross_entropy" in name for name in names) and (cut is None or not is_off(cut)):
        job.give("loss", "fused")
    parts = _ligers(job, has_plugin=any("liger" in name for name in names))
    adapted = _adapter_kernels(job)
    give_parts(job, "axolotl" if adapted else "liger", (*parts, *adapted))


def _adapter_kernels(job: ForeignJob) -> list[str]:
    """Projections with their adapters as one operation each, beside the library's norms and loss.
    On where no switch says so, but for reinforcement, 8 bits, a model's own code and FSDP1
    (utils/schemas/config.py check_auto_enable_lora_kernels)."""
    given = [key for key in _LORA_KERNELS if job.take(key) is not None]
    older = [key for key in _UNSLOTHS if job.switch(key)]
    by_default = (
        (job.options.get("method") not in (None, "full") and not given and not older)
        and is_off(job.content.get("rl"))
        and is_off(job.content.get("trust_remote_code"))
        and (job.options.get("quant") != "int8" or job.content.get("adapter") != "lora")
        and "fsdp1" not in job.options.get("data_parallel", ())  # pyright: ignore[reportOperatorIssue]
    )
    on = list(_LORA_KERNELS) if by_default else [key for key in given if job.switch(key)]
    parts = [_LORA_KERNELS[key] for key in on if _LORA_KERNELS[key]]
    alone = not any(option in job.options for option in ("data_parallel", "tp", "cp"))
    if parts and not older and alone and job.options.get("method") == "lora":
        return parts
    if on or older:
        job.leave_out(
            [*on, *older][0],
            "axolotl's operations for adapted projections are priced as PEFT's linears",
            memory=Difference.LESS,
            time=Difference.LESS,
            of_activations=True,
        )
    return []


def _ligers(job: ForeignJob, *, has_plugin: bool) -> list[str]:
    """Each of its operations has a switch of its own, which nothing reads without the plugin
    (integrations/liger/plugin.py pre_model_load)."""
    on = [key for key in job.content if key.startswith("liger_") and job.switch(key)]
    if not has_plugin:
        if on:
            job.note(f"{on[0]} does nothing without axolotl.integrations.liger.LigerPlugin")
        return []
    if "liger_cross_entropy" in on and job.options.get("loss") != "fused":
        name_ligers_loss(job, "liger_cross_entropy")
    return [part for key, part in _LIGER.items() if key in on]


def _read_precision(job: ForeignJob) -> None:
    """Its switches settle the type of the weights too, whatever torch_dtype says (utils/config
    resolve_dtype)."""
    bf16, fp16 = job.take("bf16"), job.take("fp16")
    job.take("bfloat16", "float32")
    half = job.switch("float16")
    if job.take("torch_dtype", "dtype") is not None:
        job.note("torch_dtype is not read by axolotl: bf16 and fp16 settle the type of the weights")
    if job.switch("fp8"):
        job.give("precision", "fp8")
        return
    if str(bf16).lower() == "full":  # older axolotl's: weights in bf16, no autocast
        job.give("precision", "bf16")
        return
    uses_fp16 = fp16 is not None and job.switch("fp16")
    automatic = str(bf16).lower() == "auto" or (bf16 is None and not uses_fp16 and not half)
    if bf16 is None and automatic:
        job.note(
            "bf16 not given, taken as auto: true, by emulation where a GPU lacks it (torch 2.2)"
        )
    if automatic or (bf16 is not None and job.switch("bf16")) or job.switch("bfloat16"):
        job.give("precision", "bf16-autocast")  # bfloat16 reaches TrainingArguments as bf16 too
    elif uses_fp16:
        job.give("precision", "fp16-autocast")
    elif half or job.switch("load_in_8bit"):
        job.give("precision", "fp16")
    else:
        tf32 = str(job.content.get("tf32", "auto")).lower() in ("auto", "true", "none")
        job.give("precision", "tf32" if tf32 else "fp32")
    job.take("tf32")
