"""llm-foundry's YAML: Composer's trainer over MPT of its own sizes, or a Hugging Face model.

Keys and defaults: mosaicml/llm-foundry llmfoundry/utils/config_utils.py TrainConfig,
models/mpt/configuration_mpt.py, models/utils/config_defaults.py at 8c8dd48f7216;
mosaicml/composer composer/utils/parallelism.py FSDPConfig, distributed/mosaic_parallelism.py
get_mixed_precision at 6405188805a0 (fp32 parameters, cast where FSDP gathers them).
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import EXPANDABLE, ForeignJob, attention_word, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import Row, give_step, read_rows, world_size
from napkinmath.inputs.sharding import STRATEGIES

_M, _F = "model.", "fsdp_config."
_ALGORITHMS = "algorithms.gradient_clipping."
_OPTIMIZERS: dict[str, object] = {
    "decoupled_adamw": "adamw",
    "adamw": "adamw-foreach",
    "decoupled_lionw": "lion",
    "no_op": "sgd",
}
_ROWS = (
    Row("ctx", "max_seq_len", 2048),
    Row("optimizer", "optimizer.name", words=_OPTIMIZERS),
)
_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "fp8"}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an llm-foundry file."""
    job.flatten()
    job.dismiss("variables.", "names that other keys take", whole=True)
    job.give("stack", "hf-bare")
    _read_allocator(job)
    read_rows(job, _ROWS)
    _read_model(job)
    _read_adapter(job)
    gpus = world_size(job, per_node="n_gpus")
    job.give("gpus", gpus)
    sharded = _read_sharding(job, gpus)
    _read_batch(job, gpus)
    _read_precision(job, sharded=sharded and gpus != 1)
    kind = str(job.take(f"{_ALGORITHMS}clipping_type") or "norm")
    limit = job.take(f"{_ALGORITHMS}clipping_threshold")
    job.give("clip", not is_off(limit) and kind == "norm")
    job.give("compile", True if job.take("compile_config") is not None else None)
    return job.finish()


def _read_allocator(job: ForeignJob) -> None:
    """Settings of torch's allocator: segments expand unless the file says otherwise
    (command_utils/train.py)."""
    expands = job.switch("expandable_segments", default=True)
    largest = job.take("max_split_size_mb")
    entries = [EXPANDABLE] * expands
    if largest is not None:
        entries.append(f"max_split_size_mb:{values.count(largest, 'max_split_size_mb')}")
    job.give("allocator", ",".join(entries) or None)


def _read_model(job: ForeignJob) -> None:
    name = str(job.take(f"{_M}name") or "hf_causal_lm")
    if name == "mpt_causal_lm":
        _read_mpt(job)
        return
    if name not in ("hf_causal_lm", "hf_t5", "fused_mpt_causal_lm"):
        job.refuse("model", f"model.name {shown(name)} of llm-foundry is not one that is priced")
    job.give("model", job.take(f"{_M}pretrained_model_name_or_path"))
    flash = job.switch(f"{_M}use_flash_attention_2")
    word = job.take(f"{_M}config_overrides.attn_config.attn_impl", f"{_M}attn_implementation")
    job.give("attention", "flash2" if flash else attention_word(_attention(word)))


def _attention(word: object) -> object:
    """Its 'torch' is products and a softmax; its 'triton', of releases before 0.5, keeps what
    flash attention keeps (models/layers/flash_attn_triton.py FlashAttnFunc)."""
    return {"torch": "eager", "triton": "flash2"}.get(str(word), word)


def _read_mpt(job: ForeignJob) -> None:
    """Sizes as the family that runs the same operations: without ALiBi and rotation GPT-2's, with
    learned positions and biases; else MPT's."""
    sizes = {
        name: values.count(job.take(f"{_M}{name}") or default, f"model.{name}")
        for name, default in (
            *(("d_model", 2048), ("n_heads", 16), ("n_layers", 24)),
            *(("max_seq_len", 2048), ("vocab_size", 50_368)),
        )
    }
    ratio = values.count(job.take(f"{_M}expansion_ratio") or 4, "model.expansion_ratio")
    tied = job.switch(f"{_M}tie_word_embeddings", default=True)
    alibi, rotates = (job.switch(f"{_M}attn_config.{name}") for name in ("alibi", "rope"))
    plain = not (alibi or rotates or job.switch(f"{_M}no_bias"))
    attention = job.take(f"{_M}attn_config.attn_impl") or "flash"
    job.give("attention", attention_word(_attention(attention)) if plain else None)
    if rotates:
        job.leave_out(
            f"{_M}attn_config.rope",
            "rotated queries and keys are priced as ALiBi's",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    if job.is_settled("model"):
        return
    if not plain:
        job.give("config", {"model_type": "mpt", **sizes, "expansion_ratio": ratio})
        return
    job.give(
        "config",
        {
            "model_type": "gpt2",
            "n_embd": sizes["d_model"],
            "n_head": sizes["n_heads"],
            "n_layer": sizes["n_layers"],
            "n_inner": ratio * sizes["d_model"],
            "n_positions": sizes["max_seq_len"],
            "vocab_size": sizes["vocab_size"],
            "tie_word_embeddings": tied,
            "activation_function": "gelu",
            **{name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")},
        },
    )


def _read_adapter(job: ForeignJob) -> None:
    at = f"{_M}peft_config."
    on = any(key.startswith(at) for key in job.content)
    if not on:
        job.give("method", "full")
        return
    job.give("method", "dora" if job.switch(f"{at}use_dora") else "lora")
    job.take(f"{at}use_rslora")  # a factor of the same sizes
    rows = (
        Row("rank", f"{at}r", 8),
        Row("alpha", f"{at}lora_alpha", 8),
        Row("dropout", f"{at}lora_dropout"),
        Row("targets", f"{at}target_modules", "all-linear"),
    )
    read_rows(job, rows)


def _read_sharding(job: ForeignJob, gpus: int | None) -> bool:
    """Whether FSDP shards the parameters; Composer's, on PyTorch's first version."""
    on = any(key.startswith(_F) for key in job.content)
    checkpoints = job.switch(f"{_F}activation_checkpointing")
    reentrant = job.switch(f"{_F}activation_checkpointing_reentrant", default=True)
    offloads = job.switch(f"{_F}activation_cpu_offload")
    strategy = str(job.take(f"{_F}sharding_strategy") or "FULL_SHARD").lower()
    before = str(job.take(f"{_F}backward_prefetch") or "BACKWARD_POST").upper()
    ahead, limits = job.switch(f"{_F}forward_prefetch"), job.take(f"{_F}limit_all_gathers")
    job.give("checkpointing", ("offload" if offloads else "full") if checkpoints else "none")
    job.give("reentrant", reentrant if checkpoints else None)
    if offloads and not checkpoints:
        job.give("offload", "activations")
    if not on:
        job.give("data_parallel", ["ddp"] if gpus not in (None, 1) else None)
        return False
    if strategy not in STRATEGIES:
        job.refuse("sharding", f"fsdp_config.sharding_strategy {shown(strategy)} is unknown")
    job.give("data_parallel", ["fsdp1"])
    job.give("sharding", STRATEGIES.get(strategy))
    # composer/distributed/dist_strategy.py ddp_sync_context: no_sync for DDP alone
    job.give("sync_each_batch", True)
    job.give("forward_prefetch", ahead or None)
    job.give("backward_prefetch", before == "BACKWARD_PRE")
    job.give("limit_all_gathers", limits)
    return True


def _read_precision(job: ForeignJob, *, sharded: bool) -> None:
    """Parameters stay in fp32; PURE reduces gradients in the type that is computed in."""
    word = str(job.take("precision") or "amp_bf16").lower()
    kind = _PRECISIONS.get(word, dtype_word(word))
    mixed = job.take(f"{_F}mixed_precision")
    reduced = {"PURE": kind, "FULL": "fp32"}.get(str(mixed or "DEFAULT").upper(), "fp32")
    if not sharded:
        job.give("precision", f"{kind}-amp" if kind in ("bf16", "fp16") else kind)
        return
    job.give("precision", kind)
    job.give("sharded_dtype", "fp32")
    job.give("reduce_dtype", reduced)


def _read_batch(job: ForeignJob, gpus: int | None) -> None:
    """`auto` looks for the largest micro-batch that fits; one row is what it needs at least."""
    each, whole = job.take("device_train_microbatch_size"), job.take("global_train_batch_size")
    per_device = job.take("device_train_batch_size")
    if (isinstance(each, str) and each.lower() == "auto") or each is None:
        job.assume("bs", 1, "device_train_microbatch_size: auto takes the largest that fits")
        rows = 1
    else:
        rows = max(1, int(values.number(each, "device_train_microbatch_size", high=1 << 20)))
        job.give("bs", rows)
    if whole is not None:
        give_step(job, values.count(whole, "global_train_batch_size"), rows=rows, ranks=gpus)
    elif per_device is not None:
        step = values.count(per_device, "device_train_batch_size")
        job.give("grad_accum", max(1, step // rows))
    packed = job.take("train_loader.dataset.packing_ratio")
    job.give("packing", True if not is_off(packed) else None)
