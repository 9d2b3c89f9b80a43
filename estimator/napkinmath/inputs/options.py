"""Options: the one mapping that flags and job files of every kind are read into, and the records
made from it.

A key is the name of a flag without dashes (`grad_accum`), its value the text of the flag or the
typed value of a job file; an absent key is not given. What is decided for the user is appended to
`notes`, one sentence each.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import ALIASES
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    Attention,
    Batch,
    Kernels,
    Loss,
    OffloadConfig,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.inputs.method_options import (
    ADAPTER_OPTIONS,
    QUANT_OPTIONS,
    adapter_of,
    flag,
    quantization_of,
    read_method,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Options = Mapping[str, object]

PARALLEL_OPTIONS = (
    "gpus",
    "nodes",
    "data_parallel",
    "zero",
    "tp",
    "pp",
    "cp",
    "ep",
    "expert_imbalance",
    "expert_capacity",
    "sequence_parallel",
    "cp_kind",
    "pp_schedule",
    "micro_batches",
    "pp_chunks",
    "sharding",
    "shard_size",
    "reshard",
    "wrap",
    "forward_prefetch",
    "backward_prefetch",
    "limit_all_gathers",
    "sharded_dtype",
    "reduce_dtype",
    "sync_each_batch",
    "bucket_mb",
    "bucket_view",
    "hpz",
    "mics",
    "nvme",
    "broadcast_loading",
    "full_state_dict",
)
WORKLOAD_OPTIONS = ("workload", "teacher", "reference", "completion", "eval_bs", "generate")
KEYS = (
    "model",
    "arch",
    "config",
    "hub",
    "method",
    *ADAPTER_OPTIONS,
    "freeze",
    "quant",
    *QUANT_OPTIONS,
    "bs",
    "ctx",
    "grad_accum",
    "global_batch",
    "target_ctx",
    "packing",
    "lengths",
    "images",
    "precision",
    "optimizer",
    "optimizer_in_backward",
    "clip",
    "checkpointing",
    "reentrant",
    "offload",
    "pinned",
    "offload_style",
    "prefetch",
    "attention",
    "loss",
    "kernels",
    "stack",
    "eval",
    "train_mode",
    "compile",
    *WORKLOAD_OPTIONS,
    *PARALLEL_OPTIONS,
    "gpu",
    "vram",
    "mig",
    "network",
    "host_ram",
    "display",
    "allocator",
    "calibration",
    "allow_stale_calibration",
)
"""Every option a job file of ours can give."""
_PRECISION_ALIASES = {
    **ALIASES,
    "amp": "bf16-amp",
    "bf16-mixed": "bf16-amp",
    "fp16-mixed": "fp16-amp",
    "bf16-true": "bf16",
    "fp16-true": "fp16",
    "fp32-true": "fp32",
    "float8": "fp8",
}
_ATTENTION_ALIASES = {
    "flash-attention-2": "flash2",
    "flash-attn": "flash2",
    "fa2": "flash2",
    "flash-attention": "flash2",
    "mem-efficient": "efficient",
    "xformers": "efficient",
}


def train_config(options: Options) -> TrainConfig:
    """The TrainConfig of the options; raises InputError where they contradict each other."""
    method, kind, default_format = read_method(options)
    quantization = quantization_of(options, method, kind, default_format)
    fields: dict[str, Any] = {
        "adapter": adapter_of(options, method, kind),
        "quantization": quantization,
        "batch": _batch(options),
    }
    fields["recompute"], keeps_on_host = _recompute(options, quantized=quantization is not None)
    fields["offload"] = _offload(options, checkpoints=keeps_on_host)
    if "zero_options" in options or any(key in options for key in PARALLEL_OPTIONS):
        from napkinmath.inputs.parallel_options import parallel_config

        fields["parallel"] = parallel_config(options)
    if any(key in options for key in WORKLOAD_OPTIONS):
        fields["workload"] = _workload(options)
    for key, field in (
        ("bs", "micro_batch_size"),
        ("ctx", "sequence_length"),
        ("grad_accum", "gradient_accumulation_steps"),
    ):
        if key in options:
            fields[field] = values.count(options[key], flag(key))
    if "global_batch" in options:
        fields["gradient_accumulation_steps"] = _micro_steps(options, fields)
    if "precision" in options:
        fields["precision"] = values.choice(
            options["precision"], Precision, "--precision", _PRECISION_ALIASES
        )
    if "attention" in options:
        fields["attention"] = values.choice(
            options["attention"], Attention, "--attention", _ATTENTION_ALIASES
        )
    if "loss" in options:
        fields["loss"] = values.choice(options["loss"], Loss, "--loss")
    if "kernels" in options:
        fields["kernels"] = values.choice(options["kernels"], Kernels, "--kernels")
    if "optimizer" in options:
        fields["optimizer"] = _optimizer(options["optimizer"])
    if "stack" in options:
        fields["stack"] = _stack(options["stack"])
    if "freeze" in options:
        if kind is not None:
            raise InputError(
                f"--freeze {shown(options['freeze'])} has no meaning with {method}: the base is"
                " frozen already; use --full, or --train-modules"
            )
        fields["frozen"] = values.names(options["freeze"], "--freeze")
    for key, field in (
        ("optimizer_in_backward", "optimizer_in_backward"),
        ("clip", "clip_gradients"),
        ("compile", "compile"),
    ):
        if key in options:
            fields[field] = values.switch(options[key], flag(key))
    fields["training_mode"] = _training_mode(options)
    config = TrainConfig(**fields)
    pairs = (
        config.workload.sequences
    )  # --bs counts samples, the configuration the sequences they are made of
    return (
        config
        if pairs == 1
        else config.replace(micro_batch_size=fields.get("micro_batch_size", 1) * pairs)
    )


def _micro_steps(options: Options, fields: Mapping[str, Any]) -> int:
    """Micro-steps of a step whose batch over all ranks is given; raises InputError where they are
    no whole number."""
    whole = values.count(options["global_batch"], "--global-batch")
    if "grad_accum" in options:
        raise InputError(
            f"--global-batch {whole} and --grad-accum {shown(options['grad_accum'])} say the same"
            " thing twice; give one of them"
        )
    parallel = fields.get("parallel")
    ranks = 1 if parallel is None else parallel.data_parallel_size
    rows = fields.get("micro_batch_size", 1) * ranks
    if whole % rows:
        fewer = whole // rows * rows
        near = f"{fewer} or {fewer + rows}" if fewer else str(rows)
        raise InputError(
            f"--global-batch {whole} is not a multiple of {rows} (--bs times {ranks} data-parallel"
            f" ranks); use {near}"
        )
    return whole // rows


def _workload(options: Options) -> Workload:
    """What happens beside the step."""
    fields: dict[str, Any] = {}
    if "workload" in options:
        fields["kind"] = values.choice(
            options["workload"],
            WorkloadKind,
            "--workload",
            {"rm": "reward", "distillation": "distill", "gkd": "distill"},
        )
    if "teacher" in options:
        fields["teacher"] = values.text(options["teacher"], "--teacher")
    if "reference" in options:
        fields["reference"] = values.switch(options["reference"], "--reference")
    for key, field in (
        ("completion", "completion_tokens"),
        ("eval_bs", "eval_batch"),
        ("generate", "generate_tokens"),
    ):
        if key in options:
            fields[field] = values.count(options[key], flag(key))
    return Workload(**fields)


def _training_mode(options: Options) -> bool:
    in_eval = values.switch(options["eval"], "--eval") if "eval" in options else False
    if in_eval and values.switch(options.get("train_mode", False), "--train-mode"):
        raise InputError("--eval and --train-mode contradict each other; give one of them")
    return not in_eval


def _recompute(options: Options, *, quantized: bool) -> tuple[RecomputeConfig, bool]:
    """(recomputation, whether checkpoints are kept in host memory)."""
    fields: dict[str, Any] = {}
    if "reentrant" in options:
        fields["reentrant"] = values.switch(options["reentrant"], "--reentrant")
    given = options.get("checkpointing", "full" if quantized else "none")
    name = (
        ("full" if given else "none")
        if isinstance(given, bool)
        else values.text(given, "--checkpointing").lower()
    )
    name = {
        "on": "full",
        "true": "full",
        "off": "none",
        "false": "none",
        "offloaded": "offload",
    }.get(name, name)
    kind, _, detail = name.partition(":")
    if kind == "offload" and not detail:
        return RecomputeConfig(kind=RecomputeKind.FULL, **fields), True
    known = [member.value for member in RecomputeKind]
    if (
        kind not in known
        or (detail and kind not in ("every", "interleaved", "selective"))
        or (kind in ("every", "interleaved") and not detail)
    ):
        raise InputError(
            f"--checkpointing {shown(given)} is unknown; use none, full, every:K, interleaved:K,"
            f" sqrt, selective or offload{suggest(kind, [*known, 'offload'])}"
        )
    if kind in ("every", "interleaved"):
        fields["every"] = values.count(detail, f"--checkpointing {kind}:", high=1 << 16)
    if kind == "selective" and detail:
        fields["keep"] = values.names(detail, "--checkpointing selective:")
    return RecomputeConfig(kind=RecomputeKind(kind), **fields), False


def _offload(options: Options, *, checkpoints: bool) -> OffloadConfig:
    fields: dict[str, Any] = {"checkpoints": checkpoints}
    for name in values.names(options["offload"], "--offload") if "offload" in options else ():
        key = {
            "optim": "optimizer",
            "params": "parameters",
            "param": "parameters",
            "weights": "parameters",
        }.get(name.lower(), name.lower())
        if key == "none":
            continue
        if key not in ("optimizer", "parameters", "activations", "checkpoints"):
            raise InputError(
                f"--offload {shown(name)} is unknown; use optimizer, parameters, activations or"
                f" checkpoints{suggest(key, ['optimizer', 'parameters', 'activations', 'checkpoints'])}"
            )
        fields[key] = True
    for key in ("pinned", "offload_style", "prefetch"):
        if key in options and not any(fields.values()):
            raise InputError(
                f"{flag(key)} {shown(options[key])} has no meaning without offloading; add"
                " --offload, or leave it out"
            )
    if "pinned" in options:
        fields["pinned"] = values.switch(options["pinned"], "--pinned")
    if "offload_style" in options:
        from napkinmath.lowering.saved_offload import find_style

        name = values.text(options["offload_style"], "--offload-style").lower().replace("-", "_")
        find_style(name)
        fields["style"] = name
    if "prefetch" in options:
        fields["prefetch"] = values.count(options["prefetch"], "--prefetch", low=0, high=1 << 16)
    return OffloadConfig(**fields)


def _batch(options: Options) -> Batch:
    fields: dict[str, Any] = {}
    if "packing" in options:
        fields["packing"] = values.switch(options["packing"], "--packing")
    if "target_ctx" in options:
        fields["target_length"] = values.count(options["target_ctx"], "--target-ctx")
    if "images" in options:
        fields["images"] = values.count(options["images"], "--images", low=0, high=1 << 16)
    if "lengths" in options:
        given = options["lengths"]
        items = values.names(given, "--lengths") if isinstance(given, str) else values.listed(given)
        fields["lengths"] = tuple(values.count(item, "--lengths") for item in items)
    return Batch(**fields)


def _optimizer(value: object) -> str:
    name = values.text(value, "--optimizer")
    if name == "auto":
        return name
    try:
        return find_optimizer(name).name
    except InputError:
        dashed = name.lower().replace("_", "-")
        if dashed == name:
            raise
        return find_optimizer(dashed).name


def _stack(value: object) -> str:
    return find_stack(values.text(value, "--stack")).name
