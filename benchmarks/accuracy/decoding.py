"""Inference re-estimated: decoding attention of measured kernels, and whole servers' time to the first
token and between tokens.

    python benchmarks/accuracy/decoding.py SYSTEMS [--held-out] [--json]

SYSTEMS is the folder `aic-core/src/aiconfigurator_core/systems` of a checkout of
ai-dynamo/aiconfigurator (read at commit 095f58a5): `data/GPU/attention/ENGINE/VERSION/
generation_attention_perf.parquet` and `silicon_sample.csv`. Nothing of it is bundled.

With --held-out the constants of decoding attention are fitted to one GPU of a kernel and shown on the
others, and the two of experts are shown on the GPUs that they were not fitted to.

Experts: whole layers on one GPU, in bf16 and in FP8 by blocks. Kernels: bf16 queries and cache, no window, head sizes 64 and 128, grouped heads, batches of 1 to 256.
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
from napkinmath.timing.efficiency import default_efficiency, gemm_s
from napkinmath.timing.serving import (
    DECODE_FLOPS_SHARE,
    decode_attention_s,
    experts_more_s,
    kernel_of,
)

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
SAMPLE = 2000
GOAL = 15.0


def kernels(folder: Path, *, parts: bool = False) -> Table:
    """Every measured kernel with the seconds that the rule gives it; with `parts` what its constants
    multiply."""
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
        if parts:
            found.append(
                pd.DataFrame(
                    {
                        "kernel": kernel_of(speed),
                        "gpu": GPUS[system],
                        "read_s": read / speed.stream_bytes_per_s,
                        "flops_s": flops / (DECODE_FLOPS_SHARE * speed.matmul_rate("bf16")),
                        "tiles_a_sm": tiles / speed.gpu.num_sms,
                        "measured_s": table.latency / 1e3,
                    }
                )
            )
            continue
        priced = [
            decode_attention_s(kernel_of(speed), t, r, f, "bf16", speed)
            for t, r, f in zip(tiles, read, flops, strict=True)
        ]
        ratio = np.array(priced) * 1e3 / table.latency.to_numpy()
        where = {"of": f"{GPUS[system]} {engine} {path.parts[-2]}", "batch": table.batch_size}
        found.append(pd.DataFrame({"ratio": ratio, **where}))
    return pd.concat(found) if found else pd.DataFrame({"ratio": [], "of": [], "batch": []})


def experts(folder: Path) -> Table:
    """Every measured layer of experts, one version of an engine a GPU thinned to SAMPLE rows."""
    found: list[Table] = []
    for path in sorted(folder.glob("data/*/moe/*/*/moe_perf.parquet")):
        system, engine = path.parts[-5], path.parts[-3]
        if system not in GPUS or engine not in ENGINES:
            continue
        table: Any = pd.read_parquet(path)
        alone = (table.moe_ep_size == 1) & table.moe_dtype.isin(["bfloat16", "fp8_block"])
        table = table[alone]
        table = table.iloc[:: max(1, len(table) // SAMPLE)]
        speed = default_efficiency(find_hardware(GPUS[system]).gpu)
        priced = [_experts_s(row, speed) for row in table.itertuples()]
        ratio = np.array(priced) * 1e3 / table.latency.to_numpy()
        of = f"{GPUS[system]} {engine} {path.parts[-2]}"
        found.append(pd.DataFrame({"ratio": ratio, "of": of, "gpu": GPUS[system]}))
    return pd.concat(found)


def _experts_s(row: Any, speed: Any) -> float:
    """A layer's two products over the experts that its tokens reach, as an engine's clock has
    them."""
    visited, count, tokens = int(row.topk), int(row.num_experts), int(row.num_tokens)
    dtype = "fp8" if row.moe_dtype == "fp8_block" and speed.gpu.supports("fp8") else "bf16"
    batch = max(1, round(count * (1 - (1 - visited / count) ** tokens)))
    rows, inner = -(-tokens * visited // batch), int(row.inter_size) // int(row.moe_tp_size)
    hidden, total = int(row.hidden_size), 0.0
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        total += float(gemm_s(rows, n, k, dtype, speed, batch=batch))
        total += experts_more_s(2.0 * rows * batch * n * k, dtype, speed)
    return total


def held_out(folder: Path) -> list[dict[str, Any]]:
    """Decoding attention with constants fitted to one GPU, on the others that run the kernel."""
    rows = kernels(folder, parts=True)
    found: list[dict[str, Any]] = []
    for kernel, table in rows.groupby("kernel"):
        for own, fitted in table.groupby("gpu"):
            constants = _fitted(fitted)
            for gpu, other in table.groupby("gpu"):
                error = np.abs(_ratio(other, constants) - 1)
                found.append(
                    {
                        "of": f"{kernel} fitted to {own}, on {gpu}",
                        "rows": len(other),
                        "median": 100 * float(np.median(error)),
                        "p90": 100 * float(np.quantile(error, 0.9)),
                        "bias": 100 * float(np.median(_ratio(other, constants)) - 1),
                    }
                )
    return found


def _ratio(table: Table, constants: tuple[float, float, float]) -> Any:
    start, tile, stream = constants
    moved = np.maximum(table.read_s / stream, table.flops_s)
    return (start + tile * table.tiles_a_sm + moved) / table.measured_s


def _fitted(table: Table) -> tuple[float, float, float]:
    """Start, time a tile and share of bandwidth with the least median error, one after the other."""
    best = [12e-6, 1.5e-6, 0.9]
    grids = (np.arange(2, 40, 1) * 1e-6, np.arange(0, 6, 0.25) * 1e-6, np.arange(0.5, 1.05, 0.05))
    for _ in range(4):
        for place, grid in enumerate(grids):
            tried = [(*best[:place], float(value), *best[place + 1 :]) for value in grid]
            errors = [float(np.median(np.abs(_ratio(table, some) - 1))) for some in tried]
            best = list(tried[int(np.argmin(errors))])
    return best[0], best[1], best[2]


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
        first = g.engine.front_s + g.prompt_s() * (1 + BURST * batch) + g.token(batch).seconds
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
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        if given.held_out:
            fitted = scored(experts(given.systems), "ratio")
            tables = {"decoding attention": held_out(given.systems), "experts": fitted}
            _show(tables, as_json=given.json)
            return 0
        attention, whole = kernels(given.systems), servers(given.systems)
    except (OSError, InputError) as error:
        print(f"decoding: {error}", file=sys.stderr)
        return 2
    tables = {
        "decoding attention": scored(attention, "ratio"),
        "between tokens": scored(whole, "between"),
        "first token": scored(whole, "first"),
    }
    _show(tables, as_json=given.json)
    return 0


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
