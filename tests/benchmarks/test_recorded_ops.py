"""Operations timed by the other recorder become a calibration: the speeds that made the rows are
found again, and the report says how far off each was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from campaign_parts import accuracy
from campaign_parts.foreign_ops import op_lines, points_of
from napkinmath.catalog.gpus import find_gpu
from napkinmath.timing import efficiency
from napkinmath.timing.attention import attention_s
from napkinmath.timing.efficiency import Efficiency, default_efficiency

GPU = find_gpu("H200")
PRIOR = default_efficiency(GPU)
TRUE = PRIOR.replace(
    matmul_flops_per_s=tuple((dtype, rate * 0.85) for dtype, rate in PRIOR.matmul_flops_per_s),
    stream_bytes_per_s=PRIOR.stream_bytes_per_s * 0.9,
    decode_instructions_per_s=PRIOR.decode_instructions_per_s * 1.2,
    attention=tuple(
        (kernel, curve.replace(share=curve.share * 0.8)) for kernel, curve in PRIOR.attention
    ),
)


def row(
    op: str, seconds: float, flops: float = 0, nbytes: int = 0, **arguments: Any
) -> dict[str, Any]:
    """A row in the recorder's form."""
    return {
        "op": op,
        "device": "cuda",
        **arguments,
        "median_s": seconds,
        "p10_s": seconds * 0.99,
        "p90_s": seconds * 1.02,
        "runs": 40,
        "queued": 3,
        "flops": flops,
        "bytes": nbytes,
        "tflops_per_s": round(flops / seconds / 1e12, 2),
        "gb_per_s": round(nbytes / seconds / 1e9, 1),
    }


def recorded_by(e: Efficiency) -> list[dict[str, Any]]:
    """What the recorder would write on a GPU of these speeds."""
    rows = [
        row("copy", efficiency.elementwise_s(2 * n, e, fused=True), 0, 2 * n, n=n)
        for n in (1 << 22, 1 << 26, 1 << 30)
    ]
    rows.append(row("launch", 4e-3, 1000, n=1000))
    for m in (512, 2048, 8192):
        for n, k in ((4096, 4096), (14336, 4096), (1024, 4096)):
            rows.append(
                row(
                    "linear",
                    efficiency.gemm_s(m, n, k, "bf16", e),
                    2 * m * n * k,
                    2 * (m * k + n * k + m * n),
                    m=m,
                    n=n,
                    k=k,
                    dtype="torch.bfloat16",
                )
            )
    for backend, kernel in (("FLASH_ATTENTION", "flash"), ("CUDNN_ATTENTION", "cudnn")):
        for batch, seq in ((4, 2048), (1, 8192)):
            forward, backward = (
                attention_s(kernel, batch, 32, 32, seq, seq, 128, True, None, "bf16", back, e)
                for back in (False, True)
            )
            for is_backward, seconds in ((False, forward), (True, forward + backward)):
                rows.append(
                    row(
                        "attention",
                        seconds,
                        1e12,
                        batch=batch,
                        heads=32,
                        kv=32,
                        seq=seq,
                        dim=128,
                        causal=True,
                        backward=is_backward,
                        backend=backend,
                    )
                )
    for kind, passes in (("mul", 3), ("silu", 2), ("to_fp32", 3)):
        nbytes = passes * 8192 * 4096 * 2
        rows.append(
            row(
                "elementwise",
                efficiency.elementwise_s(nbytes, e),
                8192 * 4096,
                nbytes,
                kind=kind,
                rows=8192,
                cols=4096,
                dtype="torch.bfloat16",
            )
        )
    rows.append(
        row(
            "adamw",
            efficiency.elementwise_s(14 << 24, e, launches=4, fused=True),
            0,
            14 << 24,
            n=1 << 24,
            flavour="fused",
        )
    )
    rows += [
        row(
            "host",
            efficiency.host_copy_s(1 << 28, pinned, e),
            0,
            1 << 28,
            n=1 << 28,
            direction="h2d",
            pinned=pinned,
        )
        for pinned in (True, False)
    ]
    rows.append(
        row(
            "bnb_nf4_dequantize",
            efficiency.dequantize_nf4_s(4096 * 4096, e),
            0,
            4096 * 4096 * 5 // 2,
            n=4096,
            k=4096,
        )
    )
    return rows


NOT_TAKEN = [
    {
        "op": "attention",
        "device": "cuda",
        "batch": 1,
        "heads": 32,
        "kv": 32,
        "seq": 512,
        "dim": 64,
        "causal": True,
        "backward": False,
        "backend": "CUDNN_ATTENTION",
        "error": "RuntimeError: No available kernel",
    },
    row(
        "attention",
        1e-3,
        batch=8,
        heads=32,
        kv=32,
        seq=512,
        dim=64,
        causal=True,
        backward=False,
        backend="MATH",
    ),
    row("elementwise", 1e-4, 1, 1, kind="dropout", rows=8, cols=8, dtype="torch.bfloat16"),
    {**row("copy", 1e-6, 0, 1 << 17, n=1 << 22), "device": "cpu"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [*recorded_by(TRUE), *NOT_TAKEN]
    (tmp_path / "ops.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    environment = {
        "gpu": "NVIDIA H200",
        "device": "cuda",
        "capability": [9, 0],
        "versions": {"torch": "2.11.0+cu130", "transformers": "5.17.0"},
        "allocator_conf": "",
    }
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    return tmp_path


def test_every_row_with_a_formula_is_a_point(folder: Path) -> None:
    points = points_of(folder)
    assert len(points) == len(recorded_by(TRUE)) - 1  # the host's launches have none
    for point in points:
        assert point.timing is not None and point.case.predict is not None
        assert point.timing.median_s == pytest.approx(point.case.predict(TRUE)), (
            point.case.arguments
        )


def test_the_speeds_that_made_the_rows_are_found(folder: Path) -> None:
    found = accuracy.Facts.of(folder).speed
    assert found is not None
    for point in points_of(folder):
        assert point.timing is not None and point.case.predict is not None
        assert point.case.predict(found) == pytest.approx(point.timing.median_s, rel=0.04), (
            point.case.arguments
        )
    content = json.loads((folder / "calibration.json").read_text())
    assert (
        content["gpu"] == GPU.name
        and content["stamp"]["torch"] == "2.11.0+cu130"
        and "no layers were measured" in content["notes"][0]
    )


def test_a_calibration_that_is_there_is_kept(folder: Path) -> None:
    (folder / "calibration.json").write_text(
        json.dumps(
            {"napkinmath_calibration": 2, "gpu": GPU.name, "rates": {"stream_bytes_per_s": 4e12}}
        )
    )
    found = accuracy.Facts.of(folder).speed
    assert found is not None and found.stream_bytes_per_s == 4e12


def test_the_report_says_how_far_off_each_kind_was(folder: Path) -> None:
    assert accuracy.write_report(folder, folder, pictures=False) == []
    lines = {
        line.split(" | ")[0].lstrip("| "): line
        for line in (folder / "report.md").read_text().splitlines()
        if line.startswith("| ")
    }
    for op in ("copy", "gemm", "attention", "elementwise", "dequantize", "host copy", "adamw"):
        assert op in lines
    assert "| gemm | 9 |" in lines["gemm"]
    datasheet, calibrated = (
        float(cell.partition("%")[0]) for cell in lines["gemm"].split(" | ")[2:4]
    )
    assert calibrated < 2 < datasheet


def test_a_folder_without_operations_has_no_table(tmp_path: Path) -> None:
    assert op_lines(tmp_path, GPU, None) == [] and points_of(tmp_path) == []
