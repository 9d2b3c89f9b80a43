"""Command lines of `estimate`: flags with values that they know, and some that they do not."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from napkinmath.catalog.gpus import load_gpus
from napkinmath.catalog.models import load_rows
from napkinmath.catalog.optimizers import OPTIMIZERS
from napkinmath.cli.flag_rows import SWITCH, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.config.pipeline_schedules import PipelineSchedule
from napkinmath.config.train_config import Attention, Kernels, Loss, Precision

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
    "--quant": ("nf4", "fp4", "int8", "gptq-int4", "awq-int4", "hqq-int4", "mxfp4", "nvfp4"),
    "--group-size": ("32", "64", "128"),
    "--ctx": _LENGTHS,
    "--target-ctx": _LENGTHS,
    "--completion": _LENGTHS,
    "--generate": ("1", "16", "256"),
    "--lengths": ("1,2,3", "512,1024,1024,9", "7", "100,4000"),
    "--precision": tuple(x.value for x in Precision),
    "--optimizer": tuple(OPTIMIZERS),
    "--checkpointing": (
        *("none", "full", "every:2", "every:3", "interleaved:2", "sqrt", "selective", "offload"),
        "selective:linear",
    ),
    "--offload": ("optimizer", "parameters", "activations", "checkpoints", "optimizer,parameters"),
    "--nvme": ("optimizer", "parameters", "optimizer,parameters"),
    "--attention": tuple(x.value for x in Attention),
    "--loss": tuple(x.value for x in Loss),
    "--kernels": tuple(x.value for x in Kernels),
    "--stack": ("hf", "hf-bare", "hf-2024", "megatron"),
    "--workload": ("sft", "dpo", "distill", "reward", "grpo", "ppo"),
    "--teacher": MODELS,
    "--data-parallel": ("dp", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"),
    "--zero": ("1", "2", "3"),
    "--pp-schedule": tuple(schedule.value for schedule in PipelineSchedule),
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
SPREAD = ("--gpus", "--nodes", "--zero", "--tp", "--pp", "--cp", "--ep", "--fsdp", "--ddp")


def words(rng: Random, row: Row) -> tuple[str, ...]:
    """One flag with its value."""
    name = rng.choice(row[0])
    if row[1] == SWITCH:
        return (name if rng.random() < 0.5 else "--no-" + row[0][0][2:],)
    if row[1] != TEXT and row[1] != "repeat":
        return (name,)
    return name, argument(rng, *KNOWN.get(row[0][0], _SMALL)).replace("\x00", "")


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
    given = {word for line in lines for word in line}
    if given.intersection(SPREAD) and "--gpus" not in given:
        lines.append(("--gpus", rng.choice(("2", "4", "8", "8xA100-80", "16xH100"))))
    lines.append(often(rng, 0.35, rng.choice(("--lora", "--qlora", "--full"))))
    lines.append(
        often(rng, 0.02, rng.choice(("--gpu", "--bs", "--frob", "x")), str(rng.choice(NUMBERS)))
    )
    rng.shuffle(lines)
    return Case((*model(rng), *(word for line in lines for word in line), *form(rng)))


DOOR = Door("flags", make)
