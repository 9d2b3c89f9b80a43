"""Kernels of inference engines re-estimated, beside the tables of ai-dynamo/aiconfigurator: decoding
attention, experts, sums over ranks, products in 8 and 4 bits. `decoding.py` prints them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.catalog.engines import SERVED_FORMATS
from napkinmath.catalog.gpus import find_hardware
from napkinmath.timing.collectives import fabric
from napkinmath.timing.efficiency import default_efficiency, gemm_s
from napkinmath.timing.engine_sums import engine_sum_s
from napkinmath.timing.served_products import experts_more_s, most_of_experts, quantize_s
from napkinmath.timing.serving import (
    DECODE_FLOPS_SHARE,
    decode_attention_s,
    engine_cluster,
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
ENGINES = ("vllm", "sglang")
SAMPLE = 2000


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


def _experts_s(row: Any, speed: Any, *, bits: float = 0) -> float:
    """A layer's two products over the experts that its tokens reach, as an engine's clock has
    them; `bits` of a weight for Marlin's kernel."""
    visited, count, tokens = int(row.topk), int(row.num_experts), int(row.num_tokens)
    dtype = "fp8" if row.moe_dtype == "fp8_block" and speed.gpu.supports("fp8") else "bf16"
    batch = max(1, round(count * (1 - (1 - visited / count) ** tokens)))
    rows, inner = -(-tokens * visited // batch), int(row.inter_size) // int(row.moe_tp_size)
    hidden, total = int(row.hidden_size), 0.0
    name = "gptq-int4" if bits else "fp8-block" if row.moe_dtype == "fp8_block" else ""
    packing = SERVED_FORMATS[name] if name else None
    most = most_of_experts(packing, speed.gpu, trtllm="trtllm" in row.kernel_source)
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        flops = 2.0 * rows * batch * n * k
        time = float(gemm_s(rows, n, k, dtype, speed, batch=batch))
        if bits:
            saved = batch * n * k * (2 - bits / 8) / speed.stream_bytes_per_s
            time = max(speed.gemm_start_s + flops / speed.matmul_rate(dtype), time - saved)
        moved = rows * batch * (n + k)
        total += time + experts_more_s(flops, moved, dtype, speed, most=most)
    return total


def marlin(folder: Path) -> Table:
    """Layers of experts in 4 bits that run in Marlin's kernel, from vLLM 0.24 on."""
    found: list[Table] = []
    for path in sorted(folder.glob("data/*/moe/vllm/0.24*/moe_perf.parquet")):
        system = path.parts[-5]
        table: Any = pd.read_parquet(path)
        table = table[table.kernel_source.str.contains("marlin") & (table.moe_ep_size == 1)]
        if system not in GPUS or not len(table):
            continue
        speed = default_efficiency(find_hardware(GPUS[system]).gpu)
        priced = [_experts_s(row, speed, bits=4.25) for row in table.itertuples()]
        ratio = np.array(priced) * 1e3 / table.latency.to_numpy()
        found.append(pd.DataFrame({"ratio": ratio, "of": f"{GPUS[system]} {path.parts[-2]}"}))
    return pd.concat(found)


def sums(folder: Path) -> Table:
    """Sums over the ranks of an engine, launched from a graph, from 2 KiB to 512 MiB."""
    found: list[Table] = []
    for path in sorted(folder.glob("data/*/comm/*/*/custom_allreduce_perf.parquet")):
        system, engine = path.parts[-5], path.parts[-3]
        table: Any = pd.read_parquet(path)
        if system not in GPUS or engine not in ENGINES or "backend" not in table:
            continue
        table = table[
            table.backend.str.contains("graph") & table.message_size.between(1 << 10, 1 << 28)
        ]
        hardware = find_hardware(GPUS[system])
        groups = {n: engine_cluster(hardware, int(n)) for n in table.num_gpus.unique()}
        priced = [
            engine_sum_s(
                2.0 * row.message_size,
                fabric(groups[row.num_gpus], int(row.num_gpus)),
                groups[row.num_gpus],
            )
            for row in table.itertuples()
        ]  # messages are counted in elements of 16 bits
        ratio = np.array(priced) * 1e3 / table.latency.to_numpy()
        found.append(
            pd.DataFrame({"ratio": ratio, "of": f"{GPUS[system]} {engine} {path.parts[-2]}"})
        )
    return pd.concat(found)


def narrow_products(folder: Path) -> Table:
    """Products in FP8 and NVFP4 of vLLM's newest version there, their inputs' conversion included."""
    found: list[Table] = []
    for path in sorted(folder.glob("data/*/gemm/vllm/0.24*/gemm_perf.parquet")):
        system = path.parts[-5]
        if system not in GPUS:
            continue
        whole: Any = pd.read_parquet(path)
        speed = default_efficiency(find_hardware(GPUS[system]).gpu)
        for dtype, name in (("fp8", "fp8"), ("nvfp4", "fp4")):
            table = whole[(whole.gemm_dtype == dtype) & (whole.n >= 1024) & (whole.k >= 1024)]
            if not len(table):
                continue
            size = (table[axis].to_numpy(float) for axis in "mnk")
            m, n, k = size
            priced = gemm_s(m, n, k, name, speed, result_bits=16) + quantize_s(m * k, "bf16", speed)
            ratio = priced * 1e3 / table.latency.to_numpy()
            found.append(pd.DataFrame({"ratio": ratio, "of": f"{GPUS[system]} {dtype}"}))
    return pd.concat(found)


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
