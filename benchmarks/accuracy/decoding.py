"""Inference re-estimated: decoding attention of measured kernels, and whole servers' time to the first
token and between tokens.

    python benchmarks/accuracy/decoding.py SYSTEMS [--held-out] [--json]
    python benchmarks/accuracy/decoding.py SYSTEMS --record benchmarks/results/published/decoding.md

SYSTEMS is the folder `aic-core/src/aiconfigurator_core/systems` of a checkout of
ai-dynamo/aiconfigurator (read at commit 095f58a5): `data/GPU/attention/ENGINE/VERSION/
generation_attention_perf.parquet` and `silicon_sample.csv`. Nothing of it is bundled.

With --held-out the constants of decoding attention are fitted to one GPU of a kernel and shown on the
others. Those of experts, of Marlin and of sums over ranks are shown on the GPUs that they were not
fitted to. Nothing was fitted for products in 8 and 4 bits: they are shown on all.

Experts: whole layers on one GPU, in bf16 and in FP8 by blocks. Kernels: bf16 queries and cache, no window, head sizes 64 and 128, grouped heads, batches of 1 to 256.
Servers: those that answer requests in one place, with tensor parallelism alone. InferenceX's scripts
say how its servers and clients are set (SemiAnalysisAI/InferenceX, benchmarks/ before and after
2582bce4): lengths from 0.8 of the named one, the cache of Llama in FP8, gpt-oss by Marlin on Hopper and
with FP8 inputs on Blackwell. `batch_size` requests are under way and begin all at once, ten a client in
all: a tenth of them waits for half of the others, read as many together as a forward takes. Requests
that the cache does not hold wait for others to end. Models of
HELD_OUT were looked at after the rules were made. The other sources do not say what their clients did.
Exit code 0 whatever the figures are, 2 for a folder that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))
sys.path.insert(0, str(Path(__file__).parent))

from engine_kernels import (
    ENGINES,
    GPUS,
    Table,
    experts,
    held_out,
    kernels,
    marlin,
    narrow_products,
    sums,
)
from napkinmath.answers.generation import Generation
from napkinmath.answers.generation_config import GenerationConfig
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.models.read import read_model

SERVERS = {**GPUS, "b300_sxm": "B300"}
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
HELD_OUT = {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "moonshotai/Kimi-K2.5": "kimi-k2",
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "zhipuai/GLM-5": "glm-5",
}
PACKED = {"fp8": "fp8", "fp4": "nvfp4", "int4": "gptq-int4", "bf16": ""}
# What vLLM's nightly image of April 2026 became.
NIGHTLY = "0.19"
# Models whose FP8 checkpoints have a scale for 128 x 128 weights.
BY_BLOCKS = ("minimax", "deepseek", "glm", "qwen3")
BURST = 1 / 20
# InferenceX's clients draw lengths evenly from 0.8 of what is named to all of it (its workflows'
# RANDOM_RANGE_RATIO).
MEAN_LENGTH = 0.9
# What InferenceX's scripts set at the day of a measurement (its benchmarks/ at 843c6254 and earlier):
# model, GPU, precision, the first day, and the settings.
SCRIPTS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("gpt-oss", "h", "", "", {"graphs_to": 2048}),
    ("gpt-oss", "b", "", "", {"graphs_to": 2048, "cache_format": "fp8"}),
    ("llama", "h", "", "", {"cache_format": "fp8"}),
    ("llama", "b", "", "", {"cache_format": "fp8", "graphs_decode": True}),
    ("minimax", "b", "", "2026-04-03", {"graphs_to": 2048, "cache_format": "fp8", "prompts": 2}),
    ("deepseek", "h", "", "", {"prefill_tokens": 32768}),
    ("deepseek", "b", "fp8", "", {"prefill_tokens": 32768, "cache_format": "fp8", "rarely": True}),
    ("deepseek", "b", "fp4", "", {"prefill_tokens": 16384, "cache_format": "fp8", "rarely": True}),
    ("glm", "b", "fp8", "", {"prefill_tokens": 32768, "cache_format": "fp8"}),
    ("glm", "b", "fp4", "", {"prefill_tokens": 131072}),
)
# Its clients warm a server since d053ae24 of that day. SGLang compiles kernels for the first requests.
WARMED_SINCE = "2026-01-21"
SETTING = ["model_path", "system", "precision", "backend", "isl", "osl", "tp_size", "batch_size"]
GOAL = 15.0
INTRODUCTION = (
    "By `benchmarks/accuracy/decoding.py SYSTEMS --record`; error in percent. A source's scripts or the"
    " rows themselves say how a server was set."
)


def servers(folder: Path) -> Table:
    """Every measured server with the ratios of both times, priced over measured."""
    table: Any = pd.read_csv(folder / "silicon_sample.csv")  # columns are attributes
    alone = (table["mode"] == "agg") & (table.moe_ep_size.fillna(1) <= 1)
    alone &= (table.attention_dp_size.fillna(1) <= 1) & (table.pp_size.fillna(1) <= 1)
    table = table[
        alone
        & table.precision.isin(PACKED)
        & table.model_path.isin({**MODELS, **HELD_OUT})
        & table.system.isin(SERVERS)
        & table.backend.isin(ENGINES)
        & (table.batch_size <= 256)
    ]
    known: dict[Any, Generation] = {}
    rows: list[dict[str, Any]] = []
    for row in table.drop_duplicates([*SETTING, "silicon_ttft_ms"]).to_dict("records"):
        g = _generation(row, known)
        batch = int(row["batch_size"])
        if not g.fitting_sequences:
            continue  # a rank's memory holds no sequence: its source sets something else
        running = min(batch, _held(g)) if _of_inferencex(row) else batch
        speed = g.speed(running)
        together = min(running, max(1, g.chunk // g.config.prompt))
        in_turn = BURST * (running + together) / together
        waiting = (batch - running) / speed.requests_per_s
        first = speed.first_token_s + in_turn * g.prompt_s(together) + waiting
        gpu = g.hardware.gpu.name
        rows.append(
            {
                "of": f"{g.spec.name} {row['precision']} on {gpu}, {row['backend']}",
                "between": speed.token_s * 1e3 / row["silicon_tpot_ms"],
                "first": first * 1e3 / row["silicon_ttft_ms"],
                "batch": batch,
                "set": _set(row),
            }
        )
    return pd.DataFrame(rows)


def _held(g: Generation) -> int:
    """Sequences that the cache holds at once in a steady state: halfway through their completions."""
    halfway = g.config.prompt + g.config.completion // 2
    return max(1, g.cache_bytes // g.sequence_bytes(halfway))


def _set(row: dict[str, Any]) -> str:
    if not _of_inferencex(row):
        return "clients not known"
    if row["backend"] == "sglang" and _day(row) < WARMED_SINCE:
        return "InferenceX, servers not warmed"
    return "InferenceX" if row["model_path"] in MODELS else "InferenceX, models held out"


def _of_inferencex(row: dict[str, Any]) -> bool:
    return row["silicon_data_source"].startswith(("source_file=2026-0", "db-dump/"))


def _generation(row: dict[str, Any], known: dict[Any, Generation]) -> Generation:
    """The answer for a row, set up as its source's scripts do; rows that differ in the number of
    requests share one."""
    model, blackwell = {**MODELS, **HELD_OUT}[row["model_path"]], row["system"].startswith("b")
    packed, share = PACKED[row["precision"]], 1.0
    settings: dict[str, Any] = {}
    if _of_inferencex(row):
        share, settings = MEAN_LENGTH, _script(model, row)
    if packed == "fp8" and model.startswith(BY_BLOCKS):
        packed = "fp8-block"
    if model.startswith("gpt"):
        packed = "mxfp4-fp8" if blackwell else "mxfp4-marlin"
    config = GenerationConfig(
        engine=_engine(row),
        prompt=round(share * row["isl"]),
        completion=round(share * row["osl"]),
        quantization=packed,
        ranks=int(row["tp_size"]),
        **settings,
    )
    key = model, row["system"], config
    if key not in known:
        known[key] = Generation(read_model(model), config, find_hardware(SERVERS[row["system"]]))
    return known[key]


def _engine(row: dict[str, Any]) -> str:
    """A row's engine, with its release where the row has one."""
    version = row["backend_version"]
    if row["backend"] != "vllm" or not isinstance(version, str):
        return str(row["backend"])
    release = NIGHTLY if version.startswith("nightly") else ".".join(version.split(".")[:2])
    return f"vllm-{release}"


def _script(model: str, row: dict[str, Any]) -> dict[str, Any]:
    """What a row's script sets."""
    for name, gpu, precision, since, found in SCRIPTS:
        alike = model.startswith(name) and row["system"].startswith(gpu)
        if alike and precision in ("", row["precision"]) and _day(row) >= since:
            settings = dict(found)
            if prompts := settings.pop("prompts", 0):
                settings["prefill_tokens"] = prompts * int(row["isl"])
            if settings.pop("rarely", False):
                settings["receive_every"] = 30 if row["batch_size"] >= 16 else 10
            return settings
    return {}


def _day(row: dict[str, Any]) -> str:
    """When a row was measured."""
    return row["silicon_data_source"].partition("measured=")[2][:10]


def scored(table: Table, column: str) -> list[dict[str, Any]]:
    """Median and 90th percentile of the error, and the bias, of each source and of all, in
    percent."""
    groups = [*table.groupby("of"), ("all", table)]
    return [
        {
            "of": str(of),
            "rows": len(group),
            "median": 100 * float((group[column] - 1).abs().median()),
            "p90": 100 * float((group[column] - 1).abs().quantile(0.9)),
            "bias": 100 * float(group[column].median() - 1),
        }
        for of, group in groups
    ]


def main() -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("systems", type=Path)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    try:
        if given.held_out:
            tables = {
                "decoding attention": held_out(given.systems),
                "experts": scored(experts(given.systems), "ratio"),
                "experts by Marlin": scored(marlin(given.systems), "ratio"),
                "sums over ranks": scored(sums(given.systems), "ratio"),
                "products in 8 and 4 bits": scored(narrow_products(given.systems), "ratio"),
            }
            _show(tables, as_json=given.json)
            return 0
        attention, whole = kernels(given.systems), servers(given.systems)
    except (OSError, InputError) as error:
        print(f"decoding: {error}", file=sys.stderr)
        return 2
    tables = {"decoding attention": scored(attention, "ratio")}
    for name, table in whole.groupby("set"):
        tables[f"{name}: between tokens"] = scored(table, "between")
        tables[f"{name}: first token"] = scored(table, "first")
    if given.record is not None:
        given.record.write_text(_markdown(tables), encoding="utf-8")
        return 0
    _show(tables, as_json=given.json)
    return 0


def _markdown(tables: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["# Inference against public measurements", "", INTRODUCTION]
    for name, rows in tables.items():
        lines += [
            "",
            f"## {name}",
            "",
            "| of | rows | median | p90 | bias |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in rows:
            figures = " | ".join(f"{row[key]:.1f}" for key in ("median", "p90", "bias"))
            lines.append(f"| {row['of']} | {row['rows']:,} | {figures} |")
    return "\n".join(lines) + "\n"


def _show(tables: dict[str, list[dict[str, Any]]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(tables, indent=1))
        return
    for name, rows in tables.items():
        print(f"{name}: error in percent (goal {GOAL:g} in the median)")
        for row in rows:
            figures = "".join(f"{row[key]:9.1f}" for key in ("median", "p90", "bias"))
            print(f"  {row['of']:<58}{row['rows']:>7,}{figures}")


if __name__ == "__main__":
    sys.exit(main())
