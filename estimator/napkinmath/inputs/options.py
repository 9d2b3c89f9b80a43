"""Options: the one mapping that flags and job files of every kind are read into, and the records
made from it.

A key is the name of a flag without dashes (`grad_accum`), its value the text of the flag or the
typed value of a job file; an absent key is not given. What is decided for the user is appended to
`notes`, one sentence each.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.data_loader import DataLoaderConfig
from napkinmath.config.run_length import RunLength
from napkinmath.config.train_config import (
    Batch,
    Loss,
    OffloadConfig,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload
from napkinmath.inputs.method_options import adapter_of, flag, quantization_of, read_method
from napkinmath.inputs.option_table import BY_KEY, fields_of, keys_of
from napkinmath.inputs.option_table.training_step import OFFLOADED, STEP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.config.parallel_config import ParallelConfig

    Options = Mapping[str, object]

RUN_OPTIONS, LOADER_OPTIONS = keys_of("run"), keys_of("loader")
PARALLEL_OPTIONS = ("nodes", *keys_of("parallel"))
WORKLOAD_OPTIONS = keys_of("workload")
# Types that FSDP casts fp32 shards to as it gathers them.
_ALONE = ("offload", "blocks_to_swap")
"""Options of offloading that say by themselves what goes to the host."""
_GATHERED = (Precision.BF16, Precision.FP16, Precision.FP8, Precision.FP8_ROW, Precision.FP8_BLOCK)


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

        engine = find_stack(str(options.get("stack", "hf"))).engine
        shares = engine.shares_optimizer and kind is None
        fields["parallel"] = parallel_config(options, shares_optimizer=shares)
    if any(key in options for key in WORKLOAD_OPTIONS):
        given: dict[str, Any] = fields_of(options, "workload")
        fields["workload"] = Workload(**given)
    if any(key in options for key in RUN_OPTIONS):
        fields["run"] = RunLength(**_typed(fields_of(options, "run")))
    if any(key in options for key in LOADER_OPTIONS):
        fields["loader"] = DataLoaderConfig(**_typed(fields_of(options, "loader")))
    fields |= fields_of(options, "")
    if not {"loss", "kernels"} & fields.keys() and _scores_in_chunks(fields):
        fields["loss"] = Loss.CHUNKED
    if "global_batch" in options:
        fields["gradient_accumulation_steps"] = _micro_steps(options, fields)
    if "freeze" in options:
        if kind is not None:
            raise InputError(
                f"--freeze {shown(options['freeze'])} has no meaning with {method}: the base is"
                " frozen already; use --full, or --train-modules"
            )
        fields["frozen"] = values.names(options["freeze"], "--freeze")
    fields["training_mode"] = _training_mode(options)
    _take_trainers_types(fields)
    config = TrainConfig(**fields)
    _check_completion(config)
    pairs = (
        config.workload.sequences
    )  # --bs counts samples, the configuration the sequences they are made of
    return (
        config
        if pairs == 1
        else config.replace(micro_batch_size=fields.get("micro_batch_size", 1) * pairs)
    )


def _take_trainers_types(fields: dict[str, Any]) -> None:
    """Fills types that the options leave open, where the stack's trainer has fp32 parameters."""
    named = find_stack(fields.get("stack", "hf"))
    if not named.loop.fp32_parameters or fields["quantization"] is not None:
        return
    parallel: ParallelConfig | None = fields.get("parallel")
    if parallel is None or not parallel.data_parallel.is_fsdp:
        fields.setdefault("precision", Precision.BF16_AMP)
    elif fields.setdefault("precision", Precision.BF16) in _GATHERED:
        for key in ("sharded_dtype", "reduce_dtype"):
            if getattr(parallel, key) == "auto":
                parallel = parallel.replace(**{key: "fp32"})
        fields["parallel"] = parallel


def _check_completion(config: TrainConfig) -> None:
    """Raises InputError where a rollout's completion leaves no prompt."""
    length, tokens = config.sequence_length, config.workload.completion_tokens
    if config.workload.rolls_out and isinstance(length, int) and tokens > length:
        raise InputError(
            f"--completion {tokens} leaves no prompt in sequences of --ctx {length}; give --ctx"
            f" more than {tokens}, the prompt with it"
        )


def _scores_in_chunks(fields: Mapping[str, Any]) -> bool:
    """Whether the trainer of this workload never makes all logits where nothing else is said."""
    workload: Workload | None = fields.get("workload")
    if workload is None or not workload.rule.scores_labels:
        return False
    if workload.rollout_trainer:
        from napkinmath.catalog.rollout_trainers import find_rollout_trainer

        if not find_rollout_trainer(workload.rollout_trainer).scores_in_chunks:
            return False
    return find_stack(fields.get("stack", "hf")).loss.scores_in_chunks


def _batch(options: Options) -> Batch:
    """How sequences fill the batch; a size of images alone means one image in each."""
    batch = Batch(**_typed(fields_of(options, "batch")))
    if batch.image_size and "images" not in options:
        return batch.replace(images=1)
    for key in ("image", "min_pixels", "max_pixels", "image_limit"):
        if key in options and not batch.images:
            raise InputError(
                f"{flag(key)} {shown(options[key])} has no meaning without images; add --images 1"
            )
    return batch


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


def _training_mode(options: Options) -> bool:
    in_eval = values.switch(options["eval"], "--eval") if "eval" in options else False
    if in_eval and values.switch(options.get("train_mode", False), "--train-mode"):
        raise InputError("--eval and --train-mode contradict each other; give one of them")
    return not in_eval


def _recompute(options: Options, *, quantized: bool) -> tuple[RecomputeConfig, bool]:
    """(recomputation, whether checkpoints are kept in host memory)."""
    fields: dict[str, Any] = fields_of(options, "recompute")
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
        "unsloth": "offload",  # its checkpoints wait in host memory
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
    option = BY_KEY["offload"]
    fields: dict[str, Any] = {"checkpoints": checkpoints}
    for name in values.names(options["offload"], "--offload") if "offload" in options else ():
        key = option.spellings.get(name.lower(), name.lower())
        if key == "none":
            continue
        if key not in OFFLOADED:
            raise InputError(
                f"--offload {shown(name)} is unknown; use {', '.join(OFFLOADED[:-1])} or"
                f" {OFFLOADED[-1]}{suggest(key, list(OFFLOADED))}"
            )
        fields[key] = True
    others: dict[str, Any] = fields_of(options, "offload")
    if others.keys() - {"blocks"} and not any(fields.values()):
        settings = (o.key for o in STEP if o.sets.startswith("offload.") and o.key not in _ALONE)
        key = next(key for key in settings if key in options)
        raise InputError(
            f"{flag(key)} {shown(options[key])} has no meaning without offloading; add"
            " --offload, or leave it out"
        )
    return OffloadConfig(**fields, **others)


def _typed(fields: dict[str, object]) -> dict[str, Any]:
    """The same for a constructor, which checks what it is given."""
    return fields
