"""litgpt's YAML of `litgpt finetune_lora`, `finetune_full` and `pretrain`.

Keys and defaults: Lightning-AI/litgpt litgpt/args.py and the setup functions of
litgpt/finetune/lora.py, finetune/full.py and pretrain.py at 26857050fe3f; what is sharded and
checkpointed on several GPUs is there too. Fine-tuning clips nothing; pretraining compiles.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import OPTIMIZERS, Row, give_step, read_rows, world_size

_PRECISIONS: dict[str, object] = {
    "bf16-true": "bf16",
    "bf16-mixed": "bf16-amp",
    "16-true": "fp16",
    "16-mixed": "fp16-amp",
    "32-true": "fp32",
}
_QUANTIZERS: dict[str, object] = {
    "bnb.nf4": "nf4",
    "bnb.nf4-dq": "nf4",
    "bnb.fp4": "fp4",
    "bnb.fp4-dq": "fp4",
    "bnb.int8-training": "int8",
}
# litgpt's switch, whether it is on by default, and the names that its linear has in other libraries
_TARGETS = (
    ("lora_query", True, ("q_proj", "query_key_value", "qkv_proj")),
    ("lora_key", False, ("k_proj", "query_key_value", "qkv_proj")),
    ("lora_value", True, ("v_proj", "query_key_value", "qkv_proj")),
    ("lora_projection", False, ("o_proj", "dense", "out_proj")),
    (
        "lora_mlp",
        False,
        (
            *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"),
            *("dense_h_to_4h", "dense_4h_to_h"),
        ),
    ),
    ("lora_head", False, ("lm_head", "embed_out")),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a litgpt file."""
    job.flatten()
    pretrains = "model_name" in job.content
    adapter = not pretrains and any(key.startswith("lora_") for key in job.content)
    job.give("stack", "litgpt")
    _read_model(job)
    _read_adapter(job, adapter=adapter)
    rows = (
        Row("bs", "train.micro_batch_size", 4 if pretrains else 1),
        Row("ctx", "train.max_seq_length", 2048),
        Row("precision", "precision", "bf16", _PRECISIONS),
        Row("quant", "quantize", words=_QUANTIZERS),
    )
    read_rows(job, rows)
    if "quant" in job.options:
        job.give("kbit", False)  # nothing is prepared beyond what the quantizer replaces
        if job.options["quant"] != "int8":
            job.give("double_quant", str(job.content["quantize"]).endswith("-dq"))
    _read_mesh(job, pretrains=pretrains, adapter=adapter)
    _read_optimizer(job, fused=pretrains)
    clip = job.take("train.max_norm")
    job.give("clip", pretrains and not is_off(1.0 if clip is None else clip))
    job.give("compile", pretrains or None)
    job.leave_out(
        "chunked_cross_entropy",
        "the loss goes over 128 tokens at a time and is priced over all at once",
        memory=Difference.LESS,
    )
    return job.finish()


def _read_model(job: ForeignJob) -> None:
    """A checkpoint by the last part of its path, or one of litgpt's own names."""
    name = job.take("model_name", "checkpoint_dir")
    explicit = [key for key in job.content if key.startswith("model_config.")]
    if explicit:
        job.take(*explicit)
        job.refuse("model", f"model_config of litgpt's {shown(name)} is not read")
    else:
        job.take("model_config")
        job.give("model", name)


def _read_adapter(job: ForeignJob, *, adapter: bool) -> None:
    job.give("method", "lora" if adapter else "full")
    names = [
        name
        for key, default, modules in _TARGETS
        if job.switch(key, default=default)
        for name in modules
    ]
    rows = (
        Row("rank", "lora_r", 8),
        Row("alpha", "lora_alpha"),
        Row("dropout", "lora_dropout", 0.05),
    )
    if adapter:
        read_rows(job, rows)
        job.give("targets", list(dict.fromkeys(names)))


def _read_mesh(job: ForeignJob, *, pretrains: bool, adapter: bool) -> None:
    """One GPU runs alone; several shard, and fine-tuning then checkpoints every block."""
    nodes = job.take("num_nodes")
    gpus = world_size(job, per_node="devices", nodes="num_nodes")
    if gpus is None and pretrains:
        job.refuse("gpus", f"devices {shown(job.content.get('devices', 'auto'))} of litgpt are all")
    _read_accumulation(job, gpus)
    if gpus is None or gpus == 1:
        job.give("checkpointing", "none")
        return
    job.give("gpus", gpus)
    job.give("nodes", nodes if nodes not in (None, 1) else None)
    job.give("data_parallel", ["fsdp2" if adapter else "fsdp1"])
    job.give("sharding", "hybrid" if pretrains else "full")
    job.give("checkpointing", "none" if pretrains else "full")


def _read_accumulation(job: ForeignJob, gpus: int | None) -> None:
    """Micro-steps are whole; what the batch leaves over is left out (args.py)."""
    whole = job.take("train.global_batch_size")
    if whole is not None:
        rows = values.count(job.options["bs"], "train.micro_batch_size")
        step = values.count(whole, "train.global_batch_size")
        give_step(job, step, rows=rows, ranks=gpus)


def _read_optimizer(job: ForeignJob, *, fused: bool) -> None:
    given = job.take("optimizer.class_path", "optimizer") or "AdamW"
    name = str(given).rpartition(".")[2].lower()
    if "quant" in job.options:
        job.give("optimizer", "paged-adamw")
    elif name in ("adam", "adamw"):
        job.give("optimizer", "adamw-fused" if fused else "adamw-foreach")
    elif name in OPTIMIZERS:
        job.give("optimizer", OPTIMIZERS[name])
    else:
        job.refuse("optimizer", f"optimizer {shown(given)} of litgpt is not modelled")
