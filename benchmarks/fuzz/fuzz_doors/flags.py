"""Command lines of `estimate`: flags with values that they know, and some that they do not."""

from __future__ import annotations

import functools
from random import Random
from typing import TYPE_CHECKING

from napkinmath.catalog.gpus import load_gpus
from napkinmath.catalog.models import load_rows
from napkinmath.catalog.optimizers import OPTIMIZERS
from napkinmath.cli.flag_rows import SWITCH, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.inputs.option_table import OPTIONS
from napkinmath.inputs.option_table.option import NUMBER, SIZE

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import MODELS, NUMBERS, TINY_ARCH, argument, often

if TYPE_CHECKING:
    from napkinmath.cli.flag_rows import Row

_SMALL = ("1", "2", "3", "4", "8", "16")
_LENGTHS = ("1", "17", "64", "512", "2k", "4096", "128k")
_MODULES = ("q_proj", "q_proj,v_proj", "all-linear", "lm_head", "embed_tokens", "k_proj,down_proj")
_DTYPES = ("auto", "fp32", "bf16", "fp16", "uint8")
KNOWN: dict[str, tuple[str, ...]] = {
    "--method": ("full", "lora", "qlora", "dora", "qdora", "qalora", "ia3", "prompt", "prefix"),
    "--alpha": ("1", "16", "32", "0.5"),
    "--targets": _MODULES,
    "--train-modules": _MODULES,
    "--keep-modules": _MODULES,
    "--freeze": _MODULES,
    "--dropout": ("0", "0.1", "0.5"),
    "--group-size": ("32", "64", "128"),
    "--ctx": _LENGTHS,
    "--target-ctx": _LENGTHS,
    "--completion": _LENGTHS,
    "--generate": ("1", "16", "256"),
    "--lengths": ("1,2,3", "512,1024,1024,9", "7", "100,4000"),
    "--optimizer": tuple(OPTIMIZERS),
    "--checkpointing": (
        *("none", "full", "every:2", "every:3", "interleaved:2", "sqrt", "selective", "offload"),
        "selective:linear",
    ),
    "--offload": (
        *("optimizer", "parameters", "activations", "checkpoints", "embeddings"),
        "optimizer,parameters",
    ),
    "--nvme": ("optimizer", "parameters", "optimizer,parameters"),
    "--teacher": MODELS,
    "--data-parallel": ("dp", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"),
    "--zero": ("1", "2", "3"),
    "--cp-kind": ("ring", "ulysses"),
    "--expert-imbalance": ("1", "1.5", "4"),
    "--expert-capacity": ("1", "1.25", "2"),
    "--sharding": ("full", "grad-op", "hybrid", "hybrid-grad-op", "no-shard"),
    "--wrap": ("carved", "layer", "none"),
    "--bucket-mb": ("1", "25", "100"),
    "--network": ("400", "ib-ndr", "roce:200"),
    "--host-ram": ("64", "512", "2TiB"),
    "--gpu": tuple(gpu.name for gpu in load_gpus()),
    "--vram": ("8", "24", "24GiB", "80GB", "0.5"),
    "--mig": ("1g.5gb", "1g.10gb", "3g.40gb"),
    "--display": ("none", "linux", "windows"),
    "--allocator": (
        *("expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4"),
        "garbage_collection_threshold:0.6",
    ),
    "--gpus": ("1", "2", "4", "8", "16", "8xA100-80", "64xH100", "6", "2xRTX 4090"),
    "--export": ("hf", "axolotl", "torchtune", "accelerate", "deepspeed"),
    **dict.fromkeys(("--adapter-dtype", "--quant-compute-dtype", "--quant-storage"), _DTYPES),
    **dict.fromkeys(("--sharded-dtype", "--reduce-dtype"), _DTYPES),
}
# Of options without a row above, by what stands for a value in their help.
_EXAMPLES = {
    "WIDTHxHEIGHT": ("336x336", "1024", "1024x768", "3x3"),
    "NxTYPE": ("1xH100", "2xA100-80", "8xH100"),
    "N:X": ("3:0.7", "1:1", "8:0.1"),
    "N|auto": ("auto", "1", "2", "3"),
    "WATTS": ("75", "250", "400"),
}
# Flags that say something only together.
_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("--workload", "grpo", "--completion", "64", "--rollout", "vllm"),
    ("--workload", "ppo", "--completion", "64", "--rollout", "sglang", "--rollout-gpus", "1xH100"),
    ("--workload", "rloo", "--completion", "64", "--old-logprobs"),
    ("--workload", "grpo", "--rollout-trainer", "verl", "--gpus", "8xH100", "--fsdp"),
    ("--model", "mixtral-8x7b", "--gpus", "16xH100", "--ep", "8", "--deepep"),
    ("--model", "mixtral-8x7b", "--gpus", "16xH100", "--ep", "4", "--tp", "2", "--etp", "1"),
    ("--model", "mixtral-8x7b", "--gpus", "16xH100", "--ep", "2", "--pp", "4", "--pp-chunks", "2"),
    ("--stack", "megatron", "--gpus", "8xH100", "--zero", "1", "--tp", "2", "--sequence-parallel"),
    ("--samples-per-s-per-worker", "20", "--dataloader-workers", "4", "--gpu", "H100"),
    ("--gpu", "H100", "--power-limit", "350"),
)
# A network, files of ours, a search of many GPUs: other doors, or none of an unattended run.
_LEFT_OUT = ("--hub", "--model", "--arch", "--calibration", "--timeline", "--json", "--explain")
_SELDOM = (
    "--gpu",
    "--vram",
    "--mig",
    "--debug",
    "--export",
    "--method",
    "--quant",
    "--data-parallel",
)
ROWS = [row for _, rows in SHARED for row in rows if row[0][0] not in (*_LEFT_OUT, *_SELDOM)]
SELDOM = [row for _, rows in SHARED for row in rows if row[0][0] in _SELDOM[:3] + _SELDOM[4:]]
OPTION_OF = {option.flag: option for option in OPTIONS}
SPREAD = ("--gpus", "--nodes", "--zero", "--tp", "--pp", "--cp", "--ep", "--fsdp", "--ddp")


def words(rng: Random, row: Row) -> tuple[str, ...]:
    """One flag with its value."""
    name = rng.choice(row[0])
    if row[1] == SWITCH:
        return (name if rng.random() < 0.5 else "--no-" + row[0][0][2:],)
    if row[1] != TEXT and row[1] != "repeat":
        return (name,)
    return name, argument(rng, *known(row[0][0])).replace("\x00", "")


def known(flag: str) -> tuple[str, ...]:
    """Values that a flag knows: from the table of options, where it has no row of its own here."""
    option = OPTION_OF.get(flag)
    if flag in KNOWN or option is None:
        return KNOWN.get(flag, _SMALL)
    if option.named_choices():
        return option.named_choices()
    if option.kind == NUMBER:
        return (*_EXAMPLES.get(option.metavar, ("0.5", "1", "100")), str(option.low))
    return _EXAMPLES.get(option.metavar, ("200MB", "1GiB") if option.kind == SIZE else _SMALL)


@functools.cache
def models_with_images() -> tuple[str, ...]:
    """Models of the catalogue that read images."""
    return tuple(str(row["name"]) for row in load_rows() if "vision_config" in row["config"])


def model(rng: Random) -> tuple[str, ...]:
    """A tiny architecture, a small model, or any of the catalogue."""
    kind = rng.random()
    if kind < 0.55:
        return TINY_ARCH[:2]
    return "--model", rng.choice(MODELS) if kind < 0.8 else str(rng.choice(load_rows())["name"])


def form(rng: Random) -> tuple[str, ...]:
    """JSON mostly, else a report for people."""
    return rng.choices(((), ("--explain",), ("--json",)), (1, 1, 8))[0]


def make(rng: Random) -> Case:
    """A model and up to seven flags, each at most once."""
    rows = rng.sample(ROWS, rng.choice((0, 1, 1, 2, 2, 3, 5, 7)))
    if rng.random() < 0.12:
        rows.append(rng.choice(SELDOM))
    lines = [words(rng, row) for row in rows]
    of = model(rng)
    if rng.random() < 0.1:
        lines.append(rng.choice(_TOGETHER))
    given = {word for line in lines for word in line}
    if given.intersection(("--image", "--images")) and rng.random() < 0.8:
        of = "--model", rng.choice(models_with_images())
    if "--model" in given:
        of = ()
    if given.intersection(SPREAD) and "--gpus" not in given:
        lines.append(("--gpus", rng.choice(("2", "4", "8", "8xA100-80", "16xH100"))))
    lines.append(often(rng, 0.35, rng.choice(("--lora", "--qlora", "--full"))))
    lines.append(
        often(rng, 0.02, rng.choice(("--gpu", "--bs", "--frob", "x")), str(rng.choice(NUMBERS)))
    )
    rng.shuffle(lines)
    return Case((*of, *(word for line in lines for word in line), *form(rng)))


DOOR = Door("flags", make)
