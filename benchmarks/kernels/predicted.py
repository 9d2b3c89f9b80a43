"""How near its floor a kernel can come on an H200, read off its machine code: what
benchmarks/results/compile_gate.csv counts, times how often it runs.

Every multiprocessor issues an instruction of a warp for each of its four schedulers in a cycle
(NVIDIA H100 whitepaper). So a kernel takes its floor at least, and the cycles in which it issues.
Where both overlap wholly the longer one counts, where they do not overlap their sum: a
measurement should lie between the two fractions of the floor. Straight-line code counts whole,
with what a branch skips; a kernel with products by its hottest loop, without the mask.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from kernel_rows.goals import (
    ATTENTION_SHAPES,
    DEQUANTIZE_SHAPES,
    GATED_WIDTH,
    NORM_HIDDEN,
    NORM_ROWS,
    ROPE_SHAPE,
    attention_name,
    rope_name,
)
from napkinmath.catalog.gpus import find_gpu

SCHEDULERS = 4
ARCHITECTURE = "90"
Work = tuple[str, float]
"""A kernel of the gate's table, and how many warps run its code (its loop, where it has one)."""


def read_gate(path: Path) -> dict[str, dict[str, str]]:
    """Rows of sm_90 by kernel, of the newest Triton recorded."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["architecture"] == ARCHITECTURE]
    newest = max(rows, key=lambda row: [int(part) for part in row["triton"].split(".")])["triton"]
    return {row["kernel"]: row for row in rows if row["triton"] == newest}


def _shipped() -> dict[str, tuple[int, Mapping[str, object]]]:
    from compile_gate import all_shipped

    here = int(ARCHITECTURE)
    mine = (one for one in all_shipped() if here in one.architectures)
    return {one.name: (one.num_warps, one.constexprs) for one in mine}


def _works() -> Iterator[tuple[str, str, list[Work]]]:
    """Operation, size, and what it launches: those whose time is one of our kernels' own."""
    shipped = _shipped()

    def rows_of(kernel: str, rows: int) -> Work:
        return kernel, rows * shipped[kernel][0]

    for rows, columns in DEQUANTIZE_SHAPES:
        kernel = "dequantize_4bit block=64 nested"
        warps, sizes = shipped[kernel]
        values = 2 * int(str(sizes["BLOCKS"])) * int(str(sizes["BYTES"]))
        yield "nf4 dequantize", f"{rows}x{columns}", [(kernel, rows * columns / values * warps)]
    for op in ("rms_norm", "layer_norm"):
        size = f"{NORM_ROWS}x{NORM_HIDDEN}"
        forward = rows_of(f"{op}_forward h={NORM_HIDDEN}", NORM_ROWS)
        backward = rows_of(f"{op}_backward h={NORM_HIDDEN}", NORM_ROWS)
        yield f"{op} forward", size, [forward]
        yield f"{op} fwd+bwd", size, [forward, backward]
    block = int(str(shipped["gated_forward silu"][1]["BLOCK"]))
    blocks = NORM_ROWS * -(-GATED_WIDTH // block)
    forward, backward = (rows_of(f"gated_{way} silu", blocks) for way in ("forward", "backward"))
    yield "swiglu forward", f"{NORM_ROWS}x{GATED_WIDTH}", [forward]
    yield "swiglu fwd+bwd", f"{NORM_ROWS}x{GATED_WIDTH}", [forward, backward]
    batch, tokens, heads, kv_heads, size = ROPE_SHAPE
    kernel = f"rope q={heads} k={kv_heads} d={size}"
    yield "rope", rope_name(batch, tokens, heads, kv_heads), [rows_of(kernel, batch * tokens)]
    for batch, tokens, heads, kv_heads, size in ATTENTION_SHAPES:
        name = attention_name(batch, tokens, heads, kv_heads, size)
        kinds = ("forward", "backward_dkdv", "backward_dq")
        found: list[Work] = []
        for kind in kinds:
            kernel = f"flash_{kind} d={size} causal"
            warps, sizes = shipped[kernel]
            tile = int(str(sizes["BLOCK_M"])) * int(str(sizes["BLOCK_N"]))
            found.append((kernel, batch * heads * tokens**2 / 2 / tile * warps))
        yield "attention forward", name, found[:1]
        yield "attention fwd+bwd", name, found


def issue_seconds(works: list[Work], gate: Mapping[str, dict[str, str]]) -> float:
    """How long an H200 issues the instructions of these kernels."""
    gpu = find_gpu("h200")
    rate = gpu.num_sms * SCHEDULERS * gpu.boost_hz
    total = 0.0
    for kernel, warps in works:
        row = gate[kernel]
        loop = int(row["loop_instructions"]) - int(row["loop_skipped"])
        total += warps * (loop or int(row["instructions"]))
    return total / rate


def fractions(path: Path, floors: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], str]:
    """By operation and size the share of the floor's speed that its machine code leaves, without
    and with overlap: '0.62 to 1.00'."""
    gate = read_gate(path)
    found: dict[tuple[str, str], str] = {}
    for op, size, works in _works():
        floor, issues = floors[op, size], issue_seconds(works, gate)
        found[op, size] = f"{floor / (floor + issues):.2f} to {min(1.0, floor / issues):.2f}"
    return found
