"""Megatron-SWIFT's YAML and `megatron sft|pt|rlhf`: ms-swift's names beside Megatron's.

Keys and defaults: modelscope/ms-swift swift/megatron/arguments/megatron_args.py, and
swift/arguments/base_args, at 3602360a5623 (the distributed optimizer, gradients summed in the type
of the weights unless accumulate_allreduce_grads_in_fp32).
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.ms_swift import (
    name_plugins,
    read_divergence,
    read_engine,
    read_pixels,
    read_rolled_lengths,
    read_teacher,
)
from napkinmath.inputs.rollouts import (
    name_rollouts,
    policy_alone,
    policy_alone_in_a_mesh,
    read_flattened,
)
from napkinmath.inputs.rows import (
    WITHIN,
    Row,
    degree,
    give_experts,
    give_step,
    read_rows,
    world_size,
)
from napkinmath.inputs.te_optimizer import read_precision_aware
from napkinmath.inputs.trained_by import give_workload

_TUNERS: dict[str, object] = {"full": "full", "lora": "lora"}
_OPTIMIZERS: dict[str, object] = {
    **{"adam": "adamw-fused", "sgd": "sgd"},
    **dict.fromkeys(("muon", "dist_muon"), "muon"),
}
_FROZEN = {
    "freeze_vit": ("visual", "vision_tower", "vision_model", "audio_tower"),
    "freeze_aligner": ("multi_modal_projector", "merger", "aligner"),
    "freeze_llm": ("language_model",),
}
_ROWS = (
    Row("model", "model model_id_or_path"),
    Row("ctx", "max_length packing_length", 2048),
    Row("bs", "micro_batch_size", 1),
    Row("packing", "packing"),
    Row("method", "tuner_type train_type", "full", _TUNERS),
    Row("optimizer", "optimizer", words=_OPTIMIZERS),
)
_DEGREES = (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"))


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a Megatron-SWIFT run."""
    fused = job.switch("gradient_accumulation_fusion", default=True)
    job.give("stack", "megatron" if fused else "megatron-unfused")
    read_rows(job, _ROWS)
    _name_checkpoint(job)
    job.options.setdefault("optimizer", "adamw-fused")
    read_pixels(job)
    _read_tuner(job)
    _read_mesh(job)
    _read_precision(job)
    read_precision_aware(job, recipe=job.content.get("fp8_recipe"))
    _read_recomputation(job)
    clip = job.take("clip_grad")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    if job.switch("optimizer_cpu_offload"):
        job.give("offload", "optimizer")
    _read_workload(job)
    read_flattened(job, "padding_free", default=True)
    name_plugins(job)
    return job.finish()


def _name_checkpoint(job: ForeignJob) -> None:
    """The model of a run that names Megatron's checkpoint alone, which `swift export --to_mcore`
    calls NAME-mcore."""
    if "model" in job.options:
        return
    folder = job.take("mcore_model", "load")
    if isinstance(folder, str):
        name = folder.rstrip("/").rpartition("/")[2]
        job.give("model", name.removesuffix("-mcore").removesuffix("_mcore") or None)
        job.note(f"model taken from the checkpoint {shown(name)}")


def _read_tuner(job: ForeignJob) -> None:
    frozen = [
        name
        for key, names in _FROZEN.items()
        if job.switch(key, default=key != "freeze_llm")
        for name in names
    ]
    rows = (
        Row("rank", "lora_rank", 8),
        Row("alpha", "lora_alpha", 32),
        Row("dropout", "lora_dropout", 0.05),
        Row("train_modules", "modules_to_save"),
        Row("rslora", "use_rslora"),
    )
    targets = job.take("target_modules", "target_regex")
    if job.options["method"] == "full":
        job.give("freeze", frozen or None)
        for row in rows:
            job.take(row.keys)
        return
    read_rows(job, rows)
    named = [str(name).lower() for name in values.listed(targets or ["all-linear"])]
    job.give("targets", "all-linear" if "all-linear" in named else targets)


def _read_mesh(job: ForeignJob) -> None:
    """Degrees, and the batch over all ranks: how many there are the launcher says."""
    sizes = {o: degree(job, f"{name}_parallel_size") for o, name in _DEGREES}
    for option, size in sizes.items():
        job.give(option, size if size > 1 else None)
    gpus, inner = world_size(job), sizes["tp"] * sizes["pp"] * sizes["cp"]
    sequence = job.switch("sequence_parallel")
    job.give("sequence_parallel", sequence if sizes["tp"] > 1 else None)
    asked = degree(job, "expert_model_parallel_size")
    outer = asked if gpus is None else max(1, gpus // (sizes["tp"] * sizes["pp"]))
    give_experts(
        job,
        "expert_model_parallel_size",
        tensor=sizes["tp"],
        data=outer,
        within=WITHIN,
        usual=1,  # swift/megatron/arguments/megatron_args.py
    )
    distributed = job.switch("use_distributed_optimizer", default=True)
    if gpus is None or gpus > inner:
        job.give("data_parallel", ["zero1" if distributed else "ddp"])
    whole = job.take("global_batch_size")
    rows = values.count(job.options["bs"], "micro_batch_size")
    step = values.count(16 if whole is None else whole, "global_batch_size")
    give_step(job, step, rows=rows, ranks=None if gpus is None else max(1, gpus // inner))
    chunks = job.take("virtual_pipeline_model_parallel_size")
    if chunks is not None and values.count(chunks, "virtual_pipeline") > 1 and sizes["pp"] > 1:
        job.give("pp_chunks", chunks)


def _read_precision(job: ForeignJob) -> None:
    kind = dtype_word(job.take("torch_dtype", "dtype")) or "bf16"
    if job.switch("fp16"):
        kind = "fp16"
    if job.switch("bf16"):
        kind = "bf16"
    eight = job.take("fp8_format")
    job.give("precision", "fp8" if eight is not None else kind)
    if not job.switch("accumulate_allreduce_grads_in_fp32") and kind == "bf16":
        job.give("reduce_dtype", "bf16")


def _read_recomputation(job: ForeignJob) -> None:
    """Selective unless said: the attention core, which a fused kernel recomputes anyway."""
    way = str(job.take("recompute_granularity") or "selective")
    method, layers = job.take("recompute_method"), job.take("recompute_num_layers")
    modules = values.listed(job.take("recompute_modules") or ["core_attn"])
    if way not in ("full", "selective", "none"):
        raise InputError(f"recompute_granularity {shown(way)} is unknown; use full or selective")
    number = 1 if layers is None else values.count(layers, "recompute_num_layers")
    full = f"every:{number}" if method == "uniform" and number > 1 else "full"
    job.give("checkpointing", full if way == "full" else "none")
    if way == "selective" and modules != ["core_attn"]:
        job.leave_out(
            "recompute_modules",
            f"{shown(', '.join(map(str, modules)))} are priced as kept; give --checkpointing",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="checkpointing",
        )


def _read_workload(job: ForeignJob) -> None:
    kind, task = job.take("rlhf_type"), job.take("task_type")
    read_teacher(job)
    if task not in (None, "causal_lm"):
        job.leave_out(
            "task_type",
            f"{shown(task)} ends in a small head; the head of the language model is priced",
            memory=Difference.LESS,
            time=Difference.LESS,
        )
    if kind is None:
        job.options.pop("teacher", None)
        return
    give_workload(job, "rlhf_type", kind)
    generates = job.options.get("workload") in ("grpo", "rloo", "ppo")
    if generates:
        read_rolled_lengths(job)
        read_divergence(job)
    is_priced = generates and read_engine(job)
    if generates and not is_priced:
        policy_alone(job, "rlhf_type")
    if not is_priced and (generates or not is_off(job.content.get("use_vllm"))):
        name_rollouts(job, "use_vllm", "vLLM")
    policy_alone_in_a_mesh(job, "rlhf_type")
    if job.options.get("workload") in ("dpo", "kto") and "pp" in job.options:
        # swift 3.12 megatron/trainers/dpo_trainer.py forward_step joins both models' hidden states
        job.leave_out(
            "rlhf_type",
            "a stage runs reference and policy in one forward, and hands on both hidden states;"
            " the reference is priced before the policy",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
