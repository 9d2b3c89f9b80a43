"""Single operations timed by the other recorder (`ops.jsonl`), as points of a calibration.

A row holds the operation's name and arguments, `median_s`, `p10_s` and `p90_s` of a call, and its
FLOPs and bytes; a row with `error` was not measured. Its backward of attention is timed together
with the forward, which is taken off here. Rows of a CPU, in tiny shapes, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from napkinmath.base.dtypes import dtype_name
from napkinmath.base.whole_file import write_whole
from napkinmath.calibration.calibration import VERSION
from napkinmath.config.hardware import Gpu
from napkinmath.timing import efficiency
from napkinmath.timing.efficiency import Efficiency, default_efficiency
from napkinmath_profiler.calibration import op_cases
from napkinmath_profiler.calibration.op_cases import OpCase
from napkinmath_profiler.calibration.op_curves import error, fitted, rates_of
from napkinmath_profiler.calibration.op_points import OpPoint
from napkinmath_profiler.calibration.timing import Timing

from campaign_parts.ledger import Row, read_rows

OPS = "ops.jsonl"
KERNELS = {
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "CUDNN_ATTENTION": "cudnn",
}
POINTWISE = (
    "mul",
    "silu",
    "add",
    "to_fp32",
    "softmax",
)  # one kernel of torch's pointwise or reducing ones each


def points_of(folder: Path) -> list[OpPoint]:
    """The points of a folder's operations that the time model has a formula for."""
    rows = [
        row for row in read_rows(folder / OPS) if row.get("device") == "cuda" and "median_s" in row
    ]
    return [point for row in rows if (point := _point(row, rows)) is not None]


def _point(row: Row, rows: Sequence[Row]) -> OpPoint | None:
    case = _case(row)
    if case is None:
        return None
    off = 0.0
    if row["op"] == "attention" and row["backward"]:
        forward = next(
            (
                r
                for r in rows
                if r["op"] == "attention" and _key(r) == _key(row) and not r["backward"]
            ),
            None,
        )
        if forward is None or forward["median_s"] >= row["median_s"]:
            return None
        off = forward["median_s"]
    return OpPoint(case, Timing(tuple(row[name] - off for name in ("p10_s", "median_s", "p90_s"))))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("batch", "heads", "kv", "seq", "dim", "causal", "backend"))


def _case(row: Row) -> OpCase | None:
    match row["op"]:
        case "copy":
            return op_cases.copy(row["n"])
        case "linear":
            return op_cases.gemm(row["m"], row["n"], row["k"], dtype_name(row["dtype"]))
        case "attention" if row["backend"] in KERNELS:
            shape = (row["batch"], row["heads"], row["kv"], row["seq"], row["dim"])
            return op_cases.attention(
                KERNELS[row["backend"]], *shape, causal=row["causal"], backward=row["backward"]
            )
        case "elementwise" if row["kind"] in POINTWISE:
            return _moving(row, "elementwise", lambda e: efficiency.elementwise_s(row["bytes"], e))
        case "adamw" if row["flavour"] == "fused":
            return _moving(
                row,
                "adamw",
                lambda e: efficiency.elementwise_s(row["bytes"], e, launches=4, fused=True),
            )
        case "host":
            return op_cases.host_copy(
                row["n"], to_host=row["direction"] == "d2h", pinned=row["pinned"]
            )
        case "bnb_nf4_dequantize":
            return op_cases.dequantize(row["n"], row["k"], "bitsandbytes")
        case _:
            return None


def _moving(row: Row, op: str, predict: Any) -> OpCase:
    """An operation of which only the bytes it moves count."""
    names = ("kind", "rows", "cols", "dtype", "flavour", "n")
    return OpCase(
        op,
        {name: row[name] for name in names if name in row},
        lambda _: lambda: None,
        predict,
        moved=row["bytes"],
    )


def write_calibration(folder: Path, gpu: Gpu) -> Path | None:
    """Rates fitted to a folder's operations, as its calibration.json; None where it has no
    operations of a GPU."""
    points = points_of(folder)
    if not points:
        return None
    environment = json.loads((folder / "environment.json").read_text())
    content = {
        "napkinmath_calibration": VERSION,
        "gpu": gpu.name,
        "stamp": {"device": environment.get("gpu", gpu.name), **environment.get("versions", {})},
        "notes": [f"fitted to {len(points)} operations of {OPS}; no layers were measured"],
        "rates": rates_of(fitted(default_efficiency(gpu), points)),
        "layers": [],
    }
    path = folder / "calibration.json"
    write_whole(path, json.dumps(content, indent=1) + "\n", force=True)
    return path


def op_lines(folder: Path, gpu: Gpu, calibrated: Efficiency | None) -> list[str]:
    """How far the time model is off the timed operations by kind: from the datasheet, and with the
    calibration's rates."""
    points = points_of(folder)
    if not points:
        return []
    lines = [
        "",
        (
            f"Operations of {folder.name}, median (and 90th percentile) of the error of predicted"
            " seconds:"
        ),
        "",
        "| operation | points | datasheet | calibrated |",
        "|---|---:|---:|---:|",
    ]
    for op in sorted({point.case.op for point in points}):
        own = [point for point in points if point.case.op == op]
        cells = [_spread(own, speed) for speed in (default_efficiency(gpu), calibrated)]
        lines.append(f"| {op} | {len(own)} | {cells[0]} | {cells[1]} |")
    return lines


def _spread(points: Sequence[OpPoint], speed: Efficiency | None) -> str:
    if speed is None:
        return "-"
    errors = sorted(abs(error(point, speed)) for point in points)
    return f"{errors[len(errors) // 2]:.1%} ({errors[-1 - len(errors) // 10]:.1%})"
