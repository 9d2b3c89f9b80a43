"""OLMo's YAML (allenai/OLMo, scripts/train.py): sizes of its own under FSDP 1, DDP or one GPU.

Keys and defaults: allenai/OLMo olmo/config.py at 59a53e3f68e5 (fp32 parameters, cast where FSDP
gathers them; `precision: mixed` reduces in fp32); olmo/model.py OLMoSequentialBlock. OLMo-core's
runs are Python scripts.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import Row, give_step, read_rows, world_size
from napkinmath.inputs.sharding import STRATEGIES

_M, _F = "model.", "fsdp."
_OPTIMIZERS: dict[str, object] = {"adamw": "adamw-foreach", "lionw": "lion"}
_ROWS = (
    Row("ctx", f"{_M}max_sequence_length", 1024),
    Row("bs", "device_train_microbatch_size", 16),
    Row("optimizer", "optimizer.name", "lionw", _OPTIMIZERS),
)
_STRATEGIES = {
    "whole_layer": "full",
    "true": "full",
    "one_in_two": "interleaved:2",
    "one_in_three": "interleaved:3",
    "one_in_four": "interleaved:4",
    "one_in_eight": "interleaved:8",
}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an OLMo file."""
    job.flatten()
    job.give("stack", "hf-bare")
    read_rows(job, _ROWS)
    _read_model(job)
    gpus = world_size(job)
    job.give("gpus", gpus)
    _read_sharding(job, gpus)
    whole = values.count(job.take("global_train_batch_size") or 512, "global_train_batch_size")
    rows = values.count(job.options["bs"], "device_train_microbatch_size")
    give_step(job, whole, rows=rows, ranks=gpus)
    _read_checkpointing(job)
    job.give("clip", not is_off(job.take("max_grad_norm")))
    compiled = job.take("compile.mode", "compile.fullgraph", "compile.backend", "compile.dynamic")
    job.give("compile", True if compiled is not None else None)
    return job.finish()


def _read_model(job: ForeignJob) -> None:
    """Its block as OLMo's or OLMo 2's, which are conversions of it."""

    def size(name: str, default: int) -> int:
        value = job.take(f"{_M}{name}")
        return default if value is None else values.count(value, f"model.{name}")

    hidden, heads, layers = size("d_model", 768), size("n_heads", 12), size("n_layers", 12)
    ratio, inner = size("mlp_ratio", 4), job.take(f"{_M}mlp_hidden_size")
    wide = ratio * hidden if inner is None else values.count(inner, "model.mlp_hidden_size")
    gated = str(job.take(f"{_M}activation_type") or "swiglu").lower()
    one = job.switch(f"{_M}multi_query_attention")
    groups = 1 if one else size("n_kv_heads", heads)
    words, rows = size("vocab_size", 50_257), size("embedding_size", 50_304)
    norm, after = str(job.take(f"{_M}layer_norm_type") or "default"), job.switch(f"{_M}norm_after")
    wide_norm = job.switch(f"{_M}attention_layer_norm")
    clipped = job.take(f"{_M}clip_qkv")
    tied = job.switch(f"{_M}weight_tying", default=True)
    if gated not in ("swiglu", "silu"):
        job.leave_out(
            f"{_M}activation_type",
            f"{shown(gated)} without a gate is priced as a gated MLP of as many weights",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    second = norm == "rms" or wide_norm or after
    if second and not (norm == "rms" and wide_norm and after):
        job.leave_out(
            f"{_M}norm_after",
            "which norms there are is priced as in OLMo 2",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    config: dict[str, object] = {
        "model_type": "olmo2" if second else "olmo",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": layers,
        "intermediate_size": wide // 2,
        "vocab_size": max(words, rows),
        "tie_word_embeddings": tied,
        "max_position_embeddings": values.count(job.options["ctx"], "model.max_sequence_length"),
    }
    if clipped is not None and not second:
        config["clip_qkv"] = clipped
    if not job.is_settled("model"):
        job.give("config", config)
    flash = job.switch(f"{_M}flash_attention")
    job.give("attention", "flash2" if flash else None)


def _read_sharding(job: ForeignJob, gpus: int | None) -> None:
    given = str(job.take("precision") or "fp32").lower()
    kind = dtype_word(given.removeprefix("amp_"))
    strategy = str(job.take("distributed_strategy") or "fsdp").lower()
    reduced = str(job.take(f"{_F}precision") or "pure").lower()
    shards = str(job.take(f"{_F}sharding_strategy") or "FULL_SHARD").lower()
    copies, wrap = (
        job.take(f"{_F}hybrid_sharding_num_model_replicas"),
        job.take(f"{_F}wrapping_strategy"),
    )
    if strategy == "single" or gpus == 1:
        job.give("gpus", 1)
    elif strategy == "ddp":
        job.give("data_parallel", ["ddp"] if gpus is not None else None)
    elif shards not in STRATEGIES:
        raise InputError(f"fsdp.sharding_strategy {shown(shards)} of OLMo is unknown")
    else:
        job.give("data_parallel", ["fsdp1"])
        job.give("sharding", STRATEGIES[shards])
        job.give("sync_each_batch", True)  # olmo/train.py train_batch: no_sync for DDP alone
        job.give("wrap", "none" if wrap is None else None)
        if copies is not None and gpus is not None:
            number = values.count(copies, "hybrid_sharding_num_model_replicas")
            job.give("shard_size", max(1, gpus // number))
        job.give("precision", kind)
        job.give("sharded_dtype", "fp32")
        job.give("reduce_dtype", "fp32" if reduced == "mixed" else kind)
        return
    amp = given.startswith("amp_") and kind in ("bf16", "fp16")
    job.give("precision", f"{kind}-amp" if amp else kind)


def _read_checkpointing(job: ForeignJob) -> None:
    given = job.take("activation_checkpointing")
    word = "none" if is_off(given) else str(given).lower()
    job.give("checkpointing", _STRATEGIES.get(word, "none"))
    if word != "none" and word not in _STRATEGIES:
        job.leave_out(
            "activation_checkpointing",
            f"{shown(word)} is priced as no recomputation; give --checkpointing",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="checkpointing",
        )
