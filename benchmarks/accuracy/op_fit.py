"""The constants of products fitted without one GPU: how well a GPU that no rule was made with is
met.

The watts of its architecture come from the GPUs that stay, of the tables and of published sustained
rates (`tests/timing/anchors/matmul_peaks.csv`); the shapes' constants from the tables' products.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from napkinmath.catalog.gpus import find_gpu
from napkinmath.config.hardware import Gpu
from napkinmath.timing import attainable, efficiency

PEAKS = Path(__file__).resolve().parents[2] / "tests" / "timing" / "anchors" / "matmul_peaks.csv"
SHAPES = ("_WAVE_START_S", "_SPLIT_S", "_FEED_COST", "_TAIL_SHARE", "_EXPOSED_SHARE")
STEPS = (1.5, 1.15, 1.04)
LARGE_FLOP = 2e11
# Products of graphs start sooner than those that the host launches one by one
# (te42kyfo/gpu-benches gpu-small-kernels: 2.5 and 1.3 us).
SOONER_IN_GRAPHS_S = 1.2e-6


def left_out(gemm: pd.DataFrame, least: int) -> list[dict[str, Any]]:
    """The error of each GPU's best version with constants that were fitted to the others."""
    rows = gemm[(gemm[["m", "n", "k"]] >= least).all(axis=1) & (gemm.dtype == "bfloat16")]
    rows = rows.assign(group=rows.framework + " " + rows.version.astype(str))
    chosen = {gpu: _best_version(gpu, of_gpu) for gpu, of_gpu in rows.groupby("gpu")}
    lines = []
    for gpu, own in chosen.items():
        others = {name: table for name, table in chosen.items() if name != gpu}
        with constants(_watts_without(find_gpu(gpu), others), _shapes(others)):
            error = _errors(gpu, own)
        lines.append(
            {
                "gpu": gpu,
                "version": own.group.iloc[0],
                "rows": len(own),
                "median": round(error.median() * 100, 2),
                "p90": round(error.quantile(0.9) * 100, 2),
            }
        )
    return lines


@contextmanager
def constants(watts: dict[tuple[str, int], float], shapes: dict[str, float]) -> Iterator[None]:
    """The rules with other constants, for as long as the block runs."""
    kept = {name: getattr(efficiency, name) for name in SHAPES}
    rated = dict(attainable._WATTS_PER_SM_AT_1_GHZ)
    try:
        attainable._WATTS_PER_SM_AT_1_GHZ.update(watts)
        for name, value in shapes.items():
            setattr(efficiency, name, value)
        efficiency._defaults.clear()
        yield
    finally:
        attainable._WATTS_PER_SM_AT_1_GHZ.clear()
        attainable._WATTS_PER_SM_AT_1_GHZ.update(rated)
        for name, value in kept.items():
            setattr(efficiency, name, value)
        efficiency._defaults.clear()


def _errors(gpu: str, rows: pd.DataFrame) -> pd.Series:
    e = efficiency.default_efficiency(find_gpu(gpu))
    e = e.replace(
        gemm_start_s=e.gemm_start_s - SOONER_IN_GRAPHS_S,
        wave_start_s=efficiency._WAVE_START_S,
        split_s=efficiency._SPLIT_S,
        feed_cost=efficiency._FEED_COST,
    )
    m, n, k = (rows[size].to_numpy(float) for size in "mnk")
    predicted = efficiency.gemm_s(m, n, k, "bf16", e)
    return (pd.Series(predicted) / (rows.latency_ms.to_numpy() / 1e3) - 1).abs()


def _best_version(gpu: str, rows: pd.DataFrame) -> pd.DataFrame:
    return min(
        (of_group for _, of_group in rows.groupby("group")),
        key=lambda of_group: _errors(gpu, of_group).median(),
    )


def _watts_without(gpu: Gpu, others: dict[str, pd.DataFrame]) -> dict[tuple[str, int], float]:
    """The watts of a GPU's architecture as its kin show them; as they stand where it has none."""
    kind = (gpu.architecture, attainable._chip_ops(gpu))
    found = []
    for name, rows in others.items():
        kin = find_gpu(name)
        if (kin.architecture, attainable._chip_ops(kin)) == kind:
            flop = 2.0 * rows.m * rows.n * rows.k
            large = rows[flop >= LARGE_FLOP]
            rate = (flop[large.index] / (large.latency_ms / 1e3)).median()
            found.append(_watts(kin, rate))
    with PEAKS.open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            kin = find_gpu(row["gpu"])
            of_kind = (kin.architecture, attainable._chip_ops(kin)) == kind
            if of_kind and kin.name != gpu.name and row["dtype"] in ("bf16", "fp16"):
                rate = float(row["tflops"]) * 1e12
                limited = rate < 0.97 * attainable.fed_flops_per_s(kin, "fp16")
                if limited and attainable.matmul_ops(kin, "fp16") >= 0.9 * kind[1]:
                    found.append(_watts(kin, rate))
    return {kind: statistics.median(found)} if found else {}


def _watts(gpu: Gpu, flops_per_s: float) -> float:
    """Watts of one SM at 1 GHz that explain a sustained rate."""
    hz = flops_per_s / (gpu.num_sms * attainable.matmul_ops(gpu, "fp16"))
    return gpu.tdp_w / gpu.num_sms / (hz / 1e9) ** (1 / attainable._CLOCK_BY_POWER)


def _shapes(tables: dict[str, pd.DataFrame]) -> dict[str, float]:
    """The shapes' constants that meet some GPUs best, by steps up and down of each."""

    def cost(values: dict[str, float]) -> float:
        with constants({}, values):
            medians = []
            for gpu, rows in tables.items():
                error = _errors(gpu, rows)
                medians.append(error.median() + 0.3 * error.quantile(0.9))
        return statistics.fmean(medians)

    values = {name: getattr(efficiency, name) for name in SHAPES}
    least = cost(values)
    for step in STEPS:
        for name in SHAPES:
            for factor in (step, 1 / step):
                moved = {**values, name: values[name] * factor}
                if (found := cost(moved)) < least and math.isfinite(found):
                    values, least = moved, found
    return values
