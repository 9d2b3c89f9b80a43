"""Many GPUs as options say it: how many, in how many machines, and how the step is spread over
them."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.divisors import divisors, largest_divisor
from napkinmath.base.errors import InputError, shown
from napkinmath.config.parallel_config import (
    ASSUMED_NODE,
    MAX_RANKS,
    DataParallel,
    ParallelConfig,
)
from napkinmath.config.pipeline_schedules import PipelineSchedule
from napkinmath.config.zero_config import ZeroConfig
from napkinmath.inputs.option_table import BY_KEY, fields_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Options = Mapping[str, object]


def number_and_type(options: Options) -> tuple[int, str]:
    """(GPUs in all, their type or '') of --gpus N[xTYPE]."""
    if "gpus" not in options:
        return 1, ""
    given = str(options["gpus"])
    name, _, last = given.rpartition(":")  # as Slurm writes h100:8
    if name and last.isdecimal():
        given = f"{last}x{name}"
    if not given[:1].isdecimal():
        raise InputError(
            f"--gpus {shown(given)} does not begin with a number; write e.g. --gpus 8xH100, or"
            " --gpu H100 for one"
        )
    number = given.lower().replace("*", "x", 1).partition("x")[0]
    kind = given[len(number) + 1 :].strip()
    gpus = values.count(number or given, "--gpus", high=MAX_RANKS)
    if len(given) > len(number) and not kind:
        raise InputError(
            f"--gpus {shown(given)} names no GPU after the x; write e.g. --gpus {gpus}xA100-80,"
            f" or --gpus {gpus}"
        )
    return gpus, kind


def gpus_and_nodes(options: Options) -> tuple[int, int]:
    """(GPUs in all, machines); without --nodes as few machines as take eight GPUs each."""
    gpus, _ = number_and_type(options)
    if "nodes" not in options:
        return gpus, (
            gpus // largest_divisor(gpus, ASSUMED_NODE)
            if gpus > 2 * ASSUMED_NODE or gpus % ASSUMED_NODE == 0
            else 1
        )
    nodes = values.count(options["nodes"], "--nodes", high=MAX_RANKS)
    if gpus % nodes:
        raise InputError(
            f"--nodes {nodes} does not divide --gpus {gpus}; give the GPUs of all machines"
            f" together, e.g. --gpus {8 * nodes}"
        )
    return gpus, nodes


def parallel_config(options: Options, *, shares_optimizer: bool = False) -> ParallelConfig:
    """The mesh and its strategy, where none is named DistributedDataParallel or ZeRO's first stage;
    the data-parallel axis takes the GPUs that the other axes leave."""
    usual = DataParallel.ZERO1 if shares_optimizer else DataParallel.DDP
    gpus, _ = gpus_and_nodes(options)
    fields: dict[str, Any] = fields_of(options, "parallel")
    fields["zero"] = _zero(options)
    inner = (
        fields.get("tensor_parallel_size", 1)
        * fields.get("pipeline_parallel_size", 1)
        * fields.get("context_parallel_size", 1)
    )
    if gpus % inner and gpus == 1:
        raise InputError(
            f"--tp x --pp x --cp = {inner} splits a step over as many GPUs; add --gpus {inner}, or a"
            " multiple of it"
        )
    if gpus % inner:
        raise InputError(
            f"--tp x --pp x --cp = {inner} does not divide --gpus {gpus}; use a product of"
            f" {divisors(gpus)}"
        )
    data, tensor = gpus // inner, fields.get("tensor_parallel_size", 1)
    alike = data * fields.get("context_parallel_size", 1)
    apart = fields.get("expert_tensor_parallel_size", 0) or tensor
    of_expert = alike * tensor // (apart * fields.get("expert_parallel_size", 1))
    fields["data_parallel_size"] = data
    fields["data_parallel"] = _strategy(options, max(alike, of_expert), usual)
    if fields.get("virtual_pipeline_size", 1) > 1:  # Megatron and NeMo name the chunks alone
        fields.setdefault("pipeline_schedule", PipelineSchedule.INTERLEAVED)
    if "pipeline_schedule" in fields and fields.get("pipeline_parallel_size", 1) > 1:
        usual = fields["pipeline_schedule"].record.usual_chunks
        fields.setdefault("virtual_pipeline_size", usual)
    fields.setdefault("sequence_parallel", fields.get("tensor_parallel_size", 1) > 1)
    return ParallelConfig(**fields)


def _zero(options: Options) -> ZeroConfig:
    """DeepSpeed's settings: those of its own file, with what flags say."""
    found = options.get("zero_options", ZeroConfig())
    assert isinstance(found, ZeroConfig)
    changes = fields_of(options, "parallel.zero")
    return found.replace(**changes) if changes else found


def _strategy(options: Options, size: int, usual: DataParallel) -> DataParallel:
    """The one strategy named, or the usual one where several ranks sum gradients."""
    named = [
        values.text(name, "--data-parallel")
        for name in values.listed(options.get("data_parallel", ()))
    ]
    if "zero" in options:
        stage = values.count(options["zero"], "--zero", low=0, high=1 << 20)
        if stage > 3:
            raise InputError(
                f"--zero {shown(options['zero'])} is no stage of ZeRO; use 1, 2 or 3 (0 is --ddp)"
            )
        named.append(f"zero{stage}" if stage else "ddp")
    found = list(
        dict.fromkeys(
            values.choice(
                name, DataParallel, "--data-parallel", dict(BY_KEY["data_parallel"].spellings)
            )
            for name in named
        )
    )
    if len(found) > 1:
        raise InputError(
            f"--data-parallel {', '.join(f.value for f in found)} exclude each other; give one of"
            " them"
        )
    if found:
        return found[0]
    return usual if size > 1 else DataParallel.NONE
