"""Measured kernels re-estimated: products, attention, experts and collectives of a folder of tables,
GPU by GPU.

    python benchmarks/accuracy/op_tables.py FOLDER [--json] [--leave-out] [--least N]

FOLDER holds `gemm.csv`, `attention.csv`, `moe.csv` or `nccl.csv`, plain or with `.gz`, with the columns of
ai-dynamo/aiconfigurator's tables (framework, version, kernel_source, sizes, latency_ms, gpu).
Every version of a library on a GPU is scored by itself: weights of some versions are zeros, whose
clocks no training reaches, and some kernels are broken. The best version of a GPU says how well the
*shapes* are met, `rate` beside it how much faster the version's best products are than the rule.
Rows above what the chip can do are dropped and counted. `--leave-out` fits the constants of
products, experts and links without each GPU in turn and prints its error then.
Exit code 0 whatever the figures are, 2 for a folder that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_gpu
from napkinmath.config.hardware import Gpu
from napkinmath.timing.attention import attention_s
from napkinmath.timing.efficiency import (
    Efficiency,
    default_efficiency,
    elementwise_s,
    gemm_s,
)
from op_fit import SOONER_IN_GRAPHS_S, left_out
from op_groups import collectives, collectives_left_out, experts, experts_left_out

Table = pd.DataFrame
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_block": "fp8"}
LEAST_SIZE, LEAST_ATTENTION_FLOP = 512, 20e9
GOALS = {"products": 8.0, "attention": 12.0, "experts": 12.0, "collectives": 12.0}
TABLES = ("gemm", "attention", "moe", "nccl")


def read(folder: Path, name: str) -> Table | None:
    """A table of the folder, or None where it has none."""
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.exists():
            return pd.read_csv(path)
    return None


def gpu_of(name: str) -> Gpu:
    """The catalog's GPU of a table's name."""
    return find_gpu(name)


def from_graphs(gpu: Gpu) -> Efficiency:
    """What a GPU attains where graphs launch its kernels."""
    e = default_efficiency(gpu)
    return e.replace(gemm_start_s=e.gemm_start_s - SOONER_IN_GRAPHS_S)


def products(table: Table, least: int = LEAST_SIZE) -> Table:
    """Rows of products of at least `least` in every size, with `flop` and predicted `seconds`."""
    wide = (table[["m", "n", "k"]] >= least).all(axis=1) & table["dtype"].isin(list(DTYPES))
    table = table.loc[wide]
    parts = []
    for key, rows in table.groupby(["gpu", "dtype"]):
        gpu, dtype = cast("tuple[str, str]", key)
        m, n, k = (rows[size].to_numpy(float) for size in "mnk")
        seconds = gemm_s(m, n, k, DTYPES[dtype], from_graphs(gpu_of(gpu)))
        if DTYPES[dtype] == "fp8":  # the libraries' layers cast their input from 16 bits first
            seconds = seconds + elementwise_s(3 * m * k, gpu_of(gpu), fused=True)
        peak = gpu_of(gpu).dense_flops_per_s(DTYPES[dtype])
        parts.append(rows.assign(flop=2 * m * n * k, seconds=seconds, peak=peak))
    return pd.concat(parts).assign(kind=lambda rows: "products " + rows.dtype)


def kernel_of(source: str, gpu: Gpu) -> str | None:
    """The rule for an attention kernel by the name in the table; None where no rule is its."""
    if "triton" in source:
        return None
    for mark, kernel in (("fa4", "flash4"), ("v4", "flash4"), ("fa3", "flash3"), ("v3", "flash3")):
        if mark in source:
            return kernel
    if "fa2" in source:
        return "flash2"
    blackwell = gpu.compute_capability in ("10.0", "10.3")
    if "trtllm" in source or (blackwell and "flashinfer" in source):
        return "flash4"
    return "flash3" if gpu.compute_capability == "9.0" else "flash2"


def attention(table: Table, least_flop: float = LEAST_ATTENTION_FLOP) -> Table:
    """Rows of forward attention of at least `least_flop`, with `flop` and predicted `seconds`."""
    parts = []
    for key, rows in table.groupby(["gpu", "kernel_source", "causal", "window_size"]):
        gpu, source, causal, window = cast("tuple[str, str, Any, Any]", key)
        kernel = kernel_of(source, gpu_of(gpu))
        if kernel is not None:
            parts.append(_attention_rows(rows, gpu_of(gpu), kernel, bool(causal), int(window)))
    found = pd.concat(parts)
    return found[found.flop >= least_flop].assign(
        kind=lambda rows: "attention " + rows.kernel_source
    )


def _attention_rows(rows: Table, gpu: Gpu, kernel: str, causal: bool, window: int) -> Table:
    b, s, heads, kv_heads, d = (
        rows[name].to_numpy(float)
        for name in ("batch", "sequence_length", "num_heads", "num_key_value_heads", "head_dim")
    )
    seen = np.minimum(window, s) if window else s
    keys = seen - seen * seen / (2 * s) if causal else seen
    seconds = attention_s(
        kernel, b, heads, kv_heads, s, s, d, causal, window or None, "bf16", False, gpu
    )
    return rows.assign(
        flop=4 * b * heads * s * d * keys, seconds=seconds, peak=gpu.dense_flops_per_s("bf16")
    )


def scores(rows: Table) -> tuple[Table, int]:
    """(a line for each GPU, kind and version: rows, median, 90th percentile and bias of the error
    in percent, and the rate factor; how many rows were dropped)."""
    measured = rows.latency_ms / 1e3
    possible = rows[rows.flop / measured <= rows.peak]
    ratio = possible.seconds / (possible.latency_ms / 1e3)
    possible = possible.assign(ratio=ratio, error=(ratio - 1).abs() * 100)
    groups = possible.groupby(["gpu", "kind", "framework", "version"])
    lines = groups.agg(
        rows=("error", "size"),
        median=("error", "median"),
        p90=("error", lambda e: e.quantile(0.9)),
        bias=("ratio", lambda r: (r.median() - 1) * 100),
        rate=("ratio", lambda r: r.quantile(0.98)),
    )
    return lines.reset_index(), len(rows) - len(possible)


def best(lines: Table, family: str) -> Table:
    """The best version of each GPU among the kinds of a family that begin with it."""
    found = lines[lines.kind.str.startswith(family)]
    return found.loc[found.groupby("gpu")["median"].idxmin()]


def result(folder: Path, least: int, leave_out: bool) -> dict[str, Any]:
    """Every score of a folder, as plain data."""
    found: dict[str, Any] = {}
    gemm, forward, moe, nccl = (read(folder, name) for name in TABLES)
    if all(table is None for table in (gemm, forward, moe, nccl)):
        files = ", ".join(f"{name}.csv" for name in TABLES)
        raise InputError(f"{folder} has none of {files}; give their folder")
    if gemm is not None:
        found["products"] = _family(products(gemm, least), "products bfloat16")
        if leave_out:
            found["products left out"] = left_out(gemm, least)
    if forward is not None:
        found["attention"] = _family(attention(forward), "attention")
    if moe is not None:
        found["experts"] = _family(experts(moe), "experts")
        if leave_out:
            found["experts left out"] = experts_left_out(moe)
    if nccl is not None:
        found["collectives"] = _family(collectives(nccl), "collectives")
        if leave_out:
            found["collectives left out"] = collectives_left_out(nccl)
    return found


def _family(rows: Table, family: str) -> dict[str, Any]:
    lines, dropped = scores(rows)
    tops = best(lines, family)
    return {
        "median over GPUs of the best version's median error, %": round(tops["median"].median(), 2),
        "rows above the chip's peak, dropped": dropped,
        "best version": tops.round(2).to_dict("records"),
        "all versions": lines.round(2).to_dict("records"),
    }


def as_text(found: dict[str, Any]) -> str:
    """The scores as Markdown tables."""
    parts = []
    for name, family in found.items():
        if name.endswith("left out"):
            parts += [f"## {name}", _table(pd.DataFrame(family))]
            continue
        middle = family["median over GPUs of the best version's median error, %"]
        dropped = family["rows above the chip's peak, dropped"]
        parts += [
            f"## {name}: {middle}% (goal {GOALS[name]:g}%), best version of each GPU",
            _table(pd.DataFrame(family["best version"])),
            f"{dropped} rows above the chip's peak were dropped. All versions:",
            _table(pd.DataFrame(family["all versions"])),
        ]
    return "\n\n".join(parts)


def _table(lines: Table) -> str:
    head = "| " + " | ".join(lines.columns) + " |"
    rule = "|" + "---|" * len(lines.columns)
    body = ["| " + " | ".join(map(str, line)) + " |" for line in lines.itertuples(index=False)]
    return "\n".join([head, rule, *body])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--leave-out", action="store_true", help="fit without each GPU in turn")
    parser.add_argument(
        "--least", type=int, default=LEAST_SIZE, help="smallest m, n and k of a product"
    )
    options = parser.parse_args(arguments)
    try:
        found = result(options.folder, options.least, options.leave_out)
    except (InputError, OSError, KeyError, ValueError) as error:
        print(f"op_tables: cannot score {options.folder}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
