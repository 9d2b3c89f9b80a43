"""Inference re-estimated: decoding attention of measured kernels, and whole servers' time to the first
token and between tokens.

    python benchmarks/accuracy/decoding.py SYSTEMS [--json]

SYSTEMS is the folder `aic-core/src/aiconfigurator_core/systems` of a checkout of
ai-dynamo/aiconfigurator (read at commit 095f58a5): `data/GPU/attention/ENGINE/VERSION/
generation_attention_perf.parquet` and `silicon_sample.csv`. Nothing of it is bundled.

Kernels: bf16 queries and cache, no window, head sizes 64 and 128, grouped heads, batches of 1 to 256.
Servers: those that answer requests in one place, with tensor parallelism alone. Their clients keep
`batch_size` requests under way and begin with all of them at once, ten requests a client in all: of
the time to the first token, `batch_size`/20 more prompts are the wait in that beginning.
Exit code 0 whatever the figures are, 2 for a folder that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.answers.generation import Generation, GenerationConfig
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.models.read import read_model
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.serving import decode_attention_s, kernel_of

Table = pd.DataFrame
GPUS = {
    "a100_sxm": "A100-SXM4-80GB",
    "h100_sxm": "H100-SXM5-80GB",
    "h200_sxm": "H200-SXM5-141GB",
    "b200_sxm": "B200",
    "l40s": "L40S",
}
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
PACKED = {"fp8": "fp8", "fp4": "nvfp4", "bf16": ""}
ENGINES = ("vllm", "sglang")
BURST = 1 / 20
GOAL = 15.0


def kernels(folder: Path) -> Table:
    """Every measured kernel with the seconds that the rule gives it."""
    found: list[Table] = []
    for path in sorted(folder.glob("data/*/attention/*/*/generation_attention_perf.parquet")):
        system, engine = path.parts[-5], path.parts[-3]
        if system not in GPUS or engine not in ENGINES:
            continue
        table: Any = pd.read_parquet(path)  # columns are attributes
        if "window_size" in table:
            table = table[table.window_size == 0]
        table = table[
            (table.attn_dtype == "bfloat16")
            & (table.kv_cache_dtype == "bfloat16")
            & table.head_dim.isin([64, 128])
            & (table.batch_size <= 256)
            & (table.num_key_value_heads < table.num_heads)
        ]
        rows = table.isl + table.step
        speed = default_efficiency(find_hardware(GPUS[system]).gpu)
        tiles = table.batch_size * table.num_key_value_heads
        read = 4.0 * tiles * table.head_dim * rows
        flops = 4.0 * table.batch_size * table.num_heads * table.head_dim * rows
        priced = [
            decode_attention_s(kernel_of(speed), t, r, f, "bf16", speed)
            for t, r, f in zip(tiles, read, flops, strict=True)
        ]
        ratio = np.array(priced) * 1e3 / table.latency.to_numpy()
        where = {"of": f"{GPUS[system]} {engine} {path.parts[-2]}", "batch": table.batch_size}
        found.append(pd.DataFrame({"ratio": ratio, **where}))
    return pd.concat(found) if found else pd.DataFrame({"ratio": [], "of": [], "batch": []})


def servers(folder: Path) -> Table:
    """Every measured server with the ratios of both times, priced over measured."""
    table: Any = pd.read_csv(folder / "silicon_sample.csv")  # columns are attributes
    alone = (table["mode"] == "agg") & (table.moe_ep_size.fillna(1) <= 1)
    alone &= (table.attention_dp_size.fillna(1) <= 1) & (table.pp_size.fillna(1) <= 1)
    table = table[
        alone
        & table.precision.isin(PACKED)
        & table.model_path.isin(MODELS)
        & table.system.isin(GPUS)
        & table.backend.isin(ENGINES)
        & (table.batch_size <= 256)
    ]
    known: dict[Any, Generation] = {}
    rows: list[dict[str, Any]] = []
    for row in table.to_dict("records"):
        g = _generation(row, known)
        batch = int(row["batch_size"])
        speed = g.speed(batch)
        first = g.prompt_s() * (1 + BURST * batch) + g.token(batch).seconds
        rows.append(
            {
                "of": f"{g.spec.name} {row['precision']} on {g.hardware.gpu.name}, {row['backend']}",
                "between": speed.token_s * 1e3 / row["silicon_tpot_ms"],
                "first": first * 1e3 / row["silicon_ttft_ms"],
                "batch": batch,
            }
        )
    return pd.DataFrame(rows)


def _generation(row: dict[str, Any], known: dict[Any, Generation]) -> Generation:
    """The answer for a row; rows that differ in the number of requests share one."""
    model = MODELS[row["model_path"]]
    packed = "mxfp4" if model.startswith("gpt") else PACKED[row["precision"]]
    config = GenerationConfig(
        engine=row["backend"],
        prompt=int(row["isl"]),
        completion=int(row["osl"]),
        quantization=packed,
        ranks=int(row["tp_size"]),
    )
    key = model, row["system"], config
    if key not in known:
        known[key] = Generation(read_model(model), config, find_hardware(GPUS[row["system"]]))
    return known[key]


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
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        attention, whole = kernels(given.systems), servers(given.systems)
    except (OSError, InputError) as error:
        print(f"decoding: {error}", file=sys.stderr)
        return 2
    tables = {
        "decoding attention": scored(attention, "ratio"),
        "between tokens": scored(whole, "between"),
        "first token": scored(whole, "first"),
    }
    if given.json:
        print(json.dumps(tables, indent=1))
        return 0
    for name, rows in tables.items():
        print(f"{name}: error in percent (goal {GOAL:g} in the median)")
        for row in rows:
            figures = "".join(f"{row[key]:9.1f}" for key in ("median", "p90", "bias"))
            print(f"  {row['of']:<58}{row['rows']:>7,}{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
