"""Options: the one mapping that flags and job files of every kind are read into, and the records
made from it.

A key is the name of a flag without dashes (`grad_accum`), its value the text of the flag or the
typed value of a job file; an absent key is not given. What is decided for the user is appended to
`notes`, one sentence each.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.catalog.quantization import find_format
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    Batch,
    Kernels,
    Loss,
    OffloadConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload, WorkloadKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Options = Mapping[str, object]

# name -> (adapter, default quantization format)
METHODS: dict[str, tuple[AdapterKind | None, str]] = {
    "full": (None, ""),
    "lora": (AdapterKind.LORA, ""),
    "qlora": (AdapterKind.LORA, "nf4"),
    "dora": (AdapterKind.DORA, ""),
    "qdora": (AdapterKind.DORA, "nf4"),
    "qalora": (AdapterKind.QALORA, "gptq-int4"),
    "ia3": (AdapterKind.IA3, ""),
    "prompt": (AdapterKind.PROMPT, ""),
    "prefix": (AdapterKind.PREFIX, ""),
}
_METHOD_ALIASES = {
    "pretrain": "full",
    "full-finetune": "full",
    "fft": "full",
    "qa-lora": "qalora",
    "(ia)3": "ia3",
    "prompt-tuning": "prompt",
    "prefix-tuning": "prefix",
}
_LOW_RANK = (AdapterKind.LORA, AdapterKind.DORA, AdapterKind.QALORA)
ADAPTER_OPTIONS = (
    "rank",
    "alpha",
    "targets",
    "dropout",
    "adapter_dtype",
    "rslora",
    "train_modules",
    "adapters",
    "virtual_tokens",
)
_LOW_RANK_OPTIONS = ("rank", "alpha", "dropout", "rslora")
QUANT_OPTIONS = (
    "double_quant",
    "group_size",
    "quant_compute_dtype",
    "quant_storage",
    "kbit",
    "keep_modules",
)
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
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "half": "fp16",
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


def flag(key: str) -> str:
    """'grad_accum' -> '--grad-accum', as messages name an option."""
    return "--" + key.replace("_", "-")


def train_config(options: Options) -> TrainConfig:
    """The TrainConfig of the options; raises InputError where they contradict each other."""
    method, kind, default_format = read_method(options)
    quantization = _quantization(options, method, kind, default_format)
    fields: dict[str, Any] = {
        "adapter": _adapter(options, method, kind),
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


def read_method(options: Options) -> tuple[str, AdapterKind | None, str]:
    """(name, adapter kind, quantization it implies); several methods at once are refused."""
    given = values.listed(options.get("method", "full"))
    chosen = list(dict.fromkeys(values.text(name, "--method") for name in given)) or [
        values.text("", "--method")
    ]
    if len(chosen) > 1:
        raise InputError(
            f"{' '.join('--' + name for name in chosen)} exclude each other; give one of them"
        )
    name = chosen[0].strip().lower().replace("_", "-")
    name = _METHOD_ALIASES.get(name, name)
    if name not in METHODS:
        raise InputError(
            f"--method {shown(chosen[0])} is unknown; use one of"
            f" {', '.join(METHODS)}{suggest(name, [*METHODS, *_METHOD_ALIASES])}"
        )
    return name, *METHODS[name]


def _adapter(options: Options, method: str, kind: AdapterKind | None) -> AdapterConfig | None:
    if kind is None:
        for key in ADAPTER_OPTIONS:
            if key in options:
                raise InputError(
                    f"{flag(key)} {shown(options[key])} has no meaning with --full; use --lora or"
                    " --qlora, or leave it out"
                )
        return None
    for key in _LOW_RANK_OPTIONS if kind not in _LOW_RANK else ("virtual_tokens",):
        if key in options:
            raise InputError(
                f"{flag(key)} {shown(options[key])} has no meaning with --method {method}; leave"
                " it out"
            )
    fields: dict[str, Any] = {"kind": kind}
    if "rank" in options:
        fields["rank"] = values.count(options["rank"], "--rank", high=1 << 16)
    if "alpha" in options:
        fields["alpha"] = values.count(options["alpha"], "--alpha", low=0, high=1 << 20)
    if "targets" in options:
        targets = values.names(options["targets"], "--targets")
        fields["targets"] = (
            ("all-linear",) if targets in (("all",), ("all-linear",), ("all_linear",)) else targets
        )
        if len(targets) > 1 and "all-linear" in targets:
            raise InputError(
                f"--targets {shown(options['targets'])} mixes all-linear with names; give one or"
                " the other"
            )
    if "dropout" in options:
        fields["dropout"] = values.number(options["dropout"], "--dropout")
    if "adapter_dtype" in options:
        dtype = values.text(options["adapter_dtype"], "--adapter-dtype").lower()
        fields["dtype"] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
            dtype, dtype
        )
    if "rslora" in options:
        fields["rank_stabilized"] = values.switch(options["rslora"], "--rslora")
    if "train_modules" in options:
        fields["trained_modules"] = values.names(options["train_modules"], "--train-modules")
    if "adapters" in options:
        fields["num_adapters"] = values.count(options["adapters"], "--adapters", high=1 << 16)
    if "virtual_tokens" in options:
        fields["num_virtual_tokens"] = values.count(
            options["virtual_tokens"], "--virtual-tokens", high=1 << 20
        )
    return AdapterConfig(**fields)


def _quantization(
    options: Options, method: str, kind: AdapterKind | None, default_format: str
) -> QuantizationConfig | None:
    given = options.get("quant", default_format)
    name = given.strip().lower() if isinstance(given, str) else values.text(given, "--quant")
    if name in ("", "none", "off"):
        if default_format:
            raise InputError(
                f"--quant {shown(given)} contradicts {method}, which trains over a quantized base;"
                " use --lora"
            )
        for key in QUANT_OPTIONS:
            if key in options:
                raise InputError(
                    f"{flag(key)} {shown(options[key])} has no meaning without a quantized base;"
                    " add --qlora or --quant nf4"
                )
        return None
    if kind is None:
        raise InputError(
            f"--quant {shown(given)} with --full: a quantized base cannot be trained itself; use"
            f" --qlora, or --lora --quant {name}"
        )

    row = find_format(name)
    fields: dict[str, Any] = {"format": row.name, "double_quant": row.name in ("nf4", "fp4")}
    if "double_quant" in options:
        fields["double_quant"] = values.switch(options["double_quant"], "--double-quant")
        if fields["double_quant"] and row.name not in ("nf4", "fp4"):
            raise InputError(
                f"--double-quant has no meaning with --quant {shown(given)}; it belongs to nf4"
                " and fp4"
            )
    if "group_size" in options:
        fields["group_size"] = values.count(options["group_size"], "--group-size", high=1 << 20)
    if "kbit" in options:
        fields["kbit_preparation"] = values.switch(options["kbit"], "--kbit")
    if "quant_compute_dtype" in options:
        dtype = values.text(options["quant_compute_dtype"], "--quant-compute-dtype").lower()
        fields["compute_dtype"] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
            dtype, dtype
        )
    if "quant_storage" in options:
        dtype = values.text(options["quant_storage"], "--quant-storage").lower()
        fields["storage"] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
            dtype, dtype
        )
    if "keep_modules" in options:
        fields["keep"] = values.names(options["keep_modules"], "--keep-modules")
    return QuantizationConfig(**fields)


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
