"""verl's Hydra configuration of `verl.trainer.sft_trainer`, which trains by the engines of its
reinforcement: nested, or keys written with their dots.

Keys and defaults: volcengine/verl verl/trainer/config/sft_trainer_engine.yaml, engine/fsdp.yaml,
optim/fsdp.yaml and model/hf_model.yaml at b178a3cd56f5; what they do: verl/workers/engine/fsdp/
transformer_impl.py (parameters of model_dtype, bf16 computation, fp32 reduction, every micro-step
reduced), verl/workers/engine/utils.py prepare_micro_batches.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, attention_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rollouts import name_lengths
from napkinmath.inputs.rows import OPTIMIZERS, Row, degree, read_rows, world_size
from napkinmath.inputs.verl_fsdp import give_shards

_E, _M, _D = "engine.", "model.", "data."
_OPTIMIZERS = {**OPTIMIZERS, "adamw": "adamw-foreach", "adam": "adamw-fused"}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an SFT file of verl's engines. Raises InputError for another engine than FSDP."""
    job.content = {key.lstrip("+"): value for key, value in job.content.items()}
    engine = job.content.get("engine")
    if isinstance(engine, str):
        job.take("engine")
    optimizer = job.content.get("optim")
    if isinstance(optimizer, str):
        job.take("optim")
    job.flatten()
    if isinstance(engine, str) and engine != "fsdp":
        raise InputError(
            f"verl trains this with {shown(engine)}, an engine that is not read for SFT (fsdp is);"
            " give its sharding with flags (`estimate --help`)"
        )
    job.give("stack", "verl-engine")
    read_rows(
        job,
        (
            Row("model", f"{_M}path"),
            Row("ctx", f"{_D}max_length", 1024),
            Row("optimizer", "optim.optimizer", "adamw-foreach", _OPTIMIZERS),
        ),
    )
    gpus = world_size(job, per_node="trainer.n_gpus_per_node", nodes="trainer.nnodes") or 1
    job.give("gpus", gpus)
    _read_model(job)
    _read_batch(job, *_read_fsdp(job, gpus))
    clip = job.take("optim.clip_grad")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    implementation = job.take("optim.optimizer_impl")
    if implementation not in (None, "torch.optim"):
        job.refuse("optimizer", f"its optimizer is of {shown(implementation)}")
    return job.finish()


def _read_model(job: ForeignJob) -> None:
    rank, alpha = job.take(f"{_M}lora_rank"), job.take(f"{_M}lora_alpha")
    targets = job.take(f"{_M}target_modules") or "all-linear"
    job.give("method", "full" if is_off(rank) else "lora")
    if not is_off(rank):
        job.give("rank", rank)
        job.give("alpha", 16 if alpha is None else alpha)
        job.give("targets", targets)
    on = job.switch(f"{_M}enable_gradient_checkpointing", default=True)
    job.give("checkpointing", "full" if on else "none")
    attention = job.take(f"{_M}override_config.attn_implementation") or "flash_attention_2"
    job.give("attention", attention_word(attention))
    job.give("kernels", "liger" if job.switch(f"{_M}use_liger") else None)
    if job.switch(f"{_M}use_fused_kernels"):
        job.give("loss", "fused")
    shards = job.take(f"{_M}tiled_mlp.num_shards")
    if job.switch(f"{_M}tiled_mlp.enabled"):
        job.give("mlp_tiles", shards or 4)


def _read_fsdp(job: ForeignJob, gpus: int) -> tuple[int, int]:
    """(ranks that get data of their own, ranks of one sequence). FSDP wraps the model on one GPU
    too, and computes as it does on several."""
    second = str(job.take(f"{_E}strategy") or "fsdp") == "fsdp2"
    ulysses = degree(job, f"{_E}ulysses_sequence_parallel_size")
    give_shards(job, _E, gpus, ulysses, second=second)
    moved = []
    if job.switch(f"{_E}offload_policy") and second:
        moved = ["optimizer", "parameters"]
    if job.switch(f"{_M}enable_activation_offload"):
        moved.append("activations")
    job.give("offload", ",".join(moved) or None)
    for key in (f"{_E}param_offload", f"{_E}optimizer_offload"):
        if job.switch(key):
            job.leave_out(
                key,
                "what waits on the host between steps comes back for each, which takes longer",
                time=Difference.MORE,
            )
    return max(1, gpus // ulysses), ulysses


def _read_batch(job: ForeignJob, ranks: int, ulysses: int) -> None:
    """Micro-batches of so many sequences, or of so many tokens."""
    each = job.take(f"{_D}micro_batch_size_per_gpu")
    tokens = job.take(f"{_D}max_token_len_per_gpu")
    whole = values.count(job.take(f"{_D}train_batch_size") or 256, f"{_D}train_batch_size")
    length = values.count(job.options["ctx"], f"{_D}max_length")
    removes = job.switch(f"{_M}use_remove_padding", default=True)
    padded = str(job.take(f"{_D}pad_mode") or "no_padding") != "no_padding"
    update = max(1, whole // ranks)
    if job.switch(f"{_D}use_dynamic_bsz", default=True):
        most = values.count(8192 if tokens is None else tokens, f"{_D}max_token_len_per_gpu")
        rows = max(1, most * ulysses // length)
        job.note(
            f"{min(rows, update)} sequences of {length} tokens are a micro-batch of at most"
            f" {most * ulysses} tokens"
        )
    else:
        rows = values.count(4 if each is None else each, f"{_D}micro_batch_size_per_gpu")
    rows = min(rows, update)
    if removes and not padded and rows > 1:
        name_lengths(job, f"{_D}max_length", rows, length)
    job.give("bs", rows)
    job.give("grad_accum", -(-update // rows))
