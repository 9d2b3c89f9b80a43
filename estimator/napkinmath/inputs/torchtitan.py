"""torchtitan's TOML: sections of its JobConfig.

Keys and defaults: pytorch/torchtitan torchtitan/config/job_config.py at 238fa9953e4a, the last
commit that reads TOML, and at 000204a4a8bf; what they do: train.py, distributed/parallel_dims.py,
distributed/utils.py (mixed precision), models/llama3/infra/parallelize.py (the operations that
selective checkpointing keeps), distributed/pipeline_parallel.py.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import EXPANDABLE, ForeignJob, dtype_word
from napkinmath.inputs.rows import Row, degree, read_rows, world_size

_MODELS = {
    "llama3": "llama-3.1-{}",
    "llama3_ft": "llama-3.1-{}",
    "llama2": "llama-2-{}",
    "llama4": {"17bx16e": "llama-4-scout", "17bx128e": "llama-4-maverick"},
    "qwen3": "qwen3-{}",
    "deepseek_v3": {"16b": "deepseek-v2-lite", "236b": "deepseek-v2", "671b": "deepseek-v3"},
    "gpt_oss": "gpt-oss-{}",
}
_SCHEDULES: dict[str, object] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe-v",
}
_IMPLEMENTATIONS: dict[str, object] = {
    "fused": "adamw-fused",
    "foreach": "adamw-foreach",
    "for-loop": "adamw",
}
_ROWS = (
    Row("ctx", "training.seq_len", 2048),
    Row("optimizer_in_backward", "optimizer.early_step_in_backward"),
    Row("compile", "compile.enable training.compile"),
)
_OP_KEEPS = "selective:sdpa,q_proj,v_proj,gate_proj,down_proj"


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a torchtitan file."""
    job.flatten()
    job.give("stack", "torchtitan")
    job.give("allocator", EXPANDABLE)  # run_train.sh
    job.give("method", "full")
    _read_model(job)
    read_rows(job, _ROWS)
    _read_optimizer(job)
    _read_checkpointing(job)
    sharded, pipelined = _read_mesh(job)
    _read_batch(job, pipelined=pipelined)
    _read_precision(job, sharded=sharded)
    return job.finish()


def _read_model(job: ForeignJob) -> None:
    name, flavor = str(job.take("model.name") or "llama3"), str(job.take("model.flavor"))
    given = job.take("hf_transformers.model")
    size = flavor.lower().partition("_")[0]
    known = _MODELS.get(name)
    found = known.get(size) if isinstance(known, dict) else known and known.format(size)
    if given is None and (not found or "debug" in flavor):
        job.refuse("model", f"flavor {shown(flavor)} of torchtitan's {name} is not in the catalog")
    elif not job.is_settled("model"):
        job.give("model", given or found)


def _read_optimizer(job: ForeignJob) -> None:
    name = str(job.take("optimizer.name") or "AdamW").lower()
    if name not in ("adam", "adamw"):
        job.refuse("optimizer", f"optimizer {shown(name)} of torchtitan is not modelled")
    read_rows(job, [Row("optimizer", "optimizer.implementation", words=_IMPLEMENTATIONS)])
    job.options.setdefault("optimizer", "adamw-fused")
    job.take("training.max_norm")
    job.give("clip", not job.options.get("optimizer_in_backward"))


def _read_checkpointing(job: ForeignJob) -> None:
    mode = str(job.take("activation_checkpoint.mode") or "selective").lower()
    option = str(job.take("activation_checkpoint.selective_ac_option") or "2").lower()
    if mode == "memory_budget":
        job.leave_out(
            "activation_checkpoint.mode",
            "the compiler chooses what is recomputed, and no recomputation is priced; give"
            " --checkpointing",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="checkpointing",
        )
    if mode != "selective":
        job.give("checkpointing", "full" if mode == "full" else "none")
    elif option == "op":
        job.give("checkpointing", _OP_KEEPS)
    else:
        every = values.count(option, "selective_ac_option", low=0)
        job.give("checkpointing", f"interleaved:{every}" if every > 1 else "full")


_SECTIONS = ("parallelism", "training", "experimental")
_SHARDS = (
    *(f"{section}.data_parallel_shard_degree" for section in _SECTIONS),
    "training.data_parallel_degree",  # its name before ranks could be copies
)


def _read_mesh(job: ForeignJob) -> tuple[bool, bool]:
    """(whether FSDP shards the model, whether it is a pipeline)."""
    tp, pp, cp, copies, experts = (
        degree(job, *(f"{section}.{name}" for section in _SECTIONS))
        for name in (
            "tensor_parallel_degree",
            "pipeline_parallel_degree",
            "context_parallel_degree",
            "data_parallel_replicate_degree",
            "expert_parallel_degree",
        )
    )
    gpus, inner, shards = world_size(job), tp * pp * cp * copies, degree(job, *_SHARDS)
    left = str(next((job.content[key] for key in _SHARDS if key in job.content), -1)) == "-1"
    if left and gpus is None and inner > 1:
        gpus = inner
        job.give("gpus", gpus)
        job.leave_out(
            "parallelism.data_parallel_shard_degree",
            f"the file does not say how many GPUs share the model; {gpus}, as few as its degrees"
            " take, are priced; add --gpus N",
            memory=Difference.LESS,
            time=Difference.EITHER,
            option="gpus",
        )
    elif left and gpus is not None:
        shards = max(1, gpus // inner)
    elif not left and gpus is None:
        gpus = shards * inner
        job.give("gpus", gpus)
    alone = gpus is None or (left and gpus == inner and "gpus" not in job.given)
    sharded = (left if alone else shards > 1) or cp > 1
    within = degree(job, *(f"{section}.expert_tensor_parallel_degree" for section in _SECTIONS))
    for option, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", experts)):
        job.give(option, size if size > 1 else None)
    job.give("etp", within if experts > 1 and within != tp else None)
    job.give("data_parallel", ["fsdp2"] if sharded else ["ddp"] if copies > 1 else None)
    # train.py: each backward reduces; a pipeline's schedule keeps gradients to its last micro-batch
    job.give("sync_each_batch", True if sharded and pp == 1 else None)
    if sharded and copies > 1:
        job.give("sharding", "hybrid")
        job.give("shard_size", shards * cp if gpus is not None else None)
    schedule = Row("pp_schedule", "parallelism.pipeline_parallel_schedule", words=_SCHEDULES)
    read_rows(job, [schedule])
    if pp == 1:
        job.options.pop("pp_schedule", None)
    reshard = str(job.take("parallelism.fsdp_reshard_after_forward") or "default")
    if sharded and (reshard != "default" or pp > 1):
        job.give("reshard", reshard == "always")
    if job.switch("training.enable_cpu_offload") and sharded and gpus is not None:
        job.give("offload", "optimizer,parameters")
    return sharded and gpus is not None, pp > 1


def _read_batch(job: ForeignJob, *, pipelined: bool) -> None:
    """A pipeline splits the local batch into its micro-batches."""
    size = job.take("training.local_batch_size", "training.batch_size")
    part = job.take("parallelism.pipeline_parallel_microbatch_size")
    whole = job.take("training.global_batch_size")
    rows = 8 if size is None else values.count(size, "training.local_batch_size")
    if size is None:
        job.assume("bs", 8, "torchtitan's training.local_batch_size")
    if whole not in (None, -1):
        job.give("global_batch", whole)
    each = values.count(part or 1, "pipeline_parallel_microbatch_size") if pipelined else rows
    job.give("bs", each)
    if pipelined and whole in (None, -1):
        job.give("grad_accum", max(1, rows // each))


def _read_precision(job: ForeignJob, *, sharded: bool) -> None:
    """Parameters are fp32 and cast by FSDP where it shards, by autocast where nothing splits the
    model, and not at all elsewhere."""
    held = dtype_word(job.take("training.dtype")) or "fp32"
    used = dtype_word(job.take("training.mixed_precision_param")) or "bf16"
    reduced = dtype_word(job.take("training.mixed_precision_reduce")) or "fp32"
    float8 = any("float8" in str(name) for name in values.listed(job.take("model.converters")))
    float8 |= job.switch("float8.enable_float8_linear")  # before there were converters
    recipe = str(job.take("quantize.linear.float8.recipe_name", "float8.recipe_name") or "")
    eight = "fp8-row" if recipe.startswith("rowwise") else "fp8"
    if sharded:
        job.give("precision", eight if float8 else used)
        job.give("sharded_dtype", held)
        job.give("reduce_dtype", reduced)
    elif "tp" in job.options or "pp" in job.options:
        job.give("precision", eight if float8 else held)
    else:
        amp = "bf16-amp" if used == "bf16" and held == "fp32" else held
        job.give("precision", eight if float8 else amp)
