"""nanotron's YAML: sizes of the model, degrees and tokens.

Keys: huggingface/nanotron src/nanotron/config (config.py, models_config.py, parallelism_config.py)
at 2411b022a75f; parallel/tensor_parallel/functional.py (what linears keep of gathered inputs).
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import Row, degree, read_rows

_FAMILIES = {
    "is_llama_config": "llama",
    "is_qwen2_config": "qwen2",
    "is_starcoder2_config": "starcoder2",
    "is_mamba_config": "mamba",
    "is_llamoe_config": "mixtral",
}
# Names of its own for what the Hugging Face config has.
_RENAMED = {
    "num_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "moe_num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings"),
    *("hidden_act", "attention_bias", "num_local_experts", *_RENAMED),
)
_SCHEDULES: dict[str, object] = {"1f1b": "1f1b", "afab": "gpipe", "allforwardallbackward": "gpipe"}
_ROWS = (
    Row("bs", "tokens.micro_batch_size", 1),
    Row("ctx", "tokens.sequence_length", 2048),
    Row("grad_accum", "tokens.batch_accumulation_per_replica"),
)
_FACTORY = "optimizer.optimizer_factory."  # older files name its keys without it
_MODEL, _MESH = "model.model_config.", "parallelism."


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a nanotron file."""
    job.flatten()
    _read_model(job)
    read_rows(job, _ROWS)
    job.give("precision", dtype_word(job.take("model.dtype")) or "bf16")
    name = str(job.take(f"{_FACTORY}name") or "adamW").lower()
    fused = job.take(f"{_FACTORY}torch_adam_is_fused", "optimizer.torch_adam_is_fused")
    adam = "adamw-foreach" if fused is False else "adamw-fused"
    job.give("optimizer", "sgd" if name == "sgd" else adam)
    clip = job.take("optimizer.clip_grad")
    job.give("clip", not is_off(clip))
    if job.take("optimizer.accumulate_grad_in_fp32") is False:
        job.leave_out(
            "optimizer.accumulate_grad_in_fp32",
            "gradients in the type of the weights; they are priced in fp32",
            memory=Difference.LESS,
            time=Difference.LESS,
        )
    _read_mesh(job)
    return job.finish()


def _read_model(job: ForeignJob) -> None:
    """The sizes as the config of the family that they are of."""
    families = [name for key, name in _FAMILIES.items() if job.switch(f"{_MODEL}{key}")]
    family = families[0] if families else ""
    if not family:
        job.refuse("model", "model.model_config of nanotron is of a family that is not read")
    sizes = {name: job.take(f"{_MODEL}{name}") for name in _SIZES}
    config = {_RENAMED.get(name, name): value for name, value in sizes.items() if value is not None}
    if family == "starcoder2":  # config/models_config.py Starcoder2Config n_inner
        hidden = values.count(config.get("hidden_size", 2048), "hidden_size")
        config.setdefault("intermediate_size", 4 * hidden)
    multiple = values.count(job.take("model.make_vocab_size_divisible_by") or 1, "divisible_by")
    multiple *= degree(job, f"{_MESH}tp")
    if "vocab_size" in config:
        words = values.count(config["vocab_size"], "vocab_size")
        config["vocab_size"] = -(-words // multiple) * multiple
    if not job.is_settled("model"):
        job.give("config", {"model_type": family, **config, **_experts(job)})


def _experts(job: ForeignJob) -> dict[str, object]:
    """Experts in the layers of Qwen2 are of Mixtral's form, or of Qwen2's own with a shared one."""
    moe = f"{_MODEL}moe_config."
    number, chosen = job.take(f"{moe}num_experts"), job.take(f"{moe}top_k")
    width, common = (
        job.take(f"{moe}{name}_intermediate_size") for name in ("moe", "shared_expert")
    )
    shares = job.switch(f"{moe}enable_shared_expert")
    if number is None:
        return {}
    width = 1408 if width is None else width
    if not shares:
        return {
            "model_type": "mixtral",
            "num_local_experts": number,
            "num_experts_per_tok": 2 if chosen is None else chosen,
            "intermediate_size": width,
        }
    return {
        "model_type": "qwen2_moe",
        "num_experts": number,
        "num_experts_per_tok": 2 if chosen is None else chosen,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": 5632 if common is None else common,
    }


def _read_mesh(job: ForeignJob) -> None:
    dp, tp, pp, cp, ep = (
        degree(job, _MESH + name)
        for name in ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size")
    )
    if "gpus" not in job.given:
        job.give("gpus", dp * tp * pp * cp)
    for option, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
        job.give(option, size if size > 1 else None)
    asynchronous = job.switch(f"{_MESH}tp_linear_async_communication")
    again = job.switch(f"{_MESH}tp_recompute_allgather", default=True)
    # _ColumnLinearAsyncCommunication keeps a rank's share in every release
    job.give("stack", "nanotron" if again or asynchronous else "nanotron-2024")
    if tp == 1:
        job.dismiss(f"{_MESH}tp_", "one tensor-parallel rank sends nothing")
    elif asynchronous:
        job.leave_out(
            f"{_MESH}tp_linear_async_communication",
            "collectives of tensor parallelism run beside products; they are priced one after the"
            " other",
            time=Difference.LESS,
        )
    mode = str(job.take(f"{_MESH}tp_mode") or "ALL_REDUCE").upper()
    job.give("sequence_parallel", mode == "REDUCE_SCATTER" if tp > 1 else None)
    schedule = Row("pp_schedule", f"{_MESH}pp_engine", words=_SCHEDULES)
    read_rows(job, [schedule])
    if pp == 1:
        job.options.pop("pp_schedule", None)
    elif pp > 2:
        job.leave_out(
            f"{_MESH}pp_engine",
            "stages send one tensor after another; published runs of 4 and 8 stages"
            " (nanotron/old_bench, H100) took 1.6 to 2.1 times as long on a node, 3.9 on two, as if"
            " sends ran at 5 GB/s",
            time=Difference.MORE,
        )
    form = str(job.take(f"{_MESH}recompute_granularity") or "").lower()  # before recompute_layer;
    # its selective is the core of attention alone, which flash attention makes anew by itself
    on = job.switch(f"{_MESH}recompute_layer", default=form == "full")
    job.give("checkpointing", "full" if on else "none")
    stage = job.take("optimizer.zero_stage")
    if dp > 1:
        job.give("data_parallel", ["ddp" if is_off(stage) else f"zero{stage}"])
