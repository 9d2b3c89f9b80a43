"""The score of measured kernels: a table made from the rules themselves scores what was put in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from napkinmath.catalog.gpus import find_gpu
from napkinmath.timing.attention import attention_s
from napkinmath.timing.efficiency import gemm_s

pytest.importorskip("pandas")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "accuracy"))

import op_tables  # noqa: E402

RECORDED = ROOT / "benchmarks" / "results" / "cpu" / "op_tables.json"
SIZES = [(m, n, k) for m in (512, 2049, 8192) for n in (1024, 4096) for k in (2048, 12288)]


def tables(folder: Path, factor: float, gpu: str) -> Path:
    """A folder whose products and attention take `factor` times what the rules say."""
    e = op_tables.from_graphs(find_gpu(gpu))
    lines = ["framework,version,dtype,m,n,k,kernel_source,latency_ms,gpu"]
    for m, n, k in SIZES:
        milliseconds = 1e3 * factor * gemm_s(m, n, k, "bf16", e)
        lines.append(f"torch,1.0,bfloat16,{m},{n},{k},torch,{milliseconds},{gpu}")
    lines.append(f"torch,1.0,bfloat16,256,4096,4096,torch,1,{gpu}")  # too small to be scored
    (folder / "gemm.csv").write_text("\n".join(lines))
    lines = [
        "framework,version,kernel_source,causal,batch,sequence_length,num_heads,"
        "num_key_value_heads,head_dim,window_size,latency_ms,gpu"
    ]
    for s in (2048, 8192):
        for causal, window in ((True, 0), (False, 0), (True, 1024)):
            seconds = attention_s(
                "flash2", 8, 32, 8, s, s, 128, causal, window or None, "bf16", False, find_gpu(gpu)
            )
            lines.append(
                f"a,1,flash_attn_fa2,{causal},8,{s},32,8,128,{window},{1e3 * factor * seconds},{gpu}"
            )
    (folder / "attention.csv").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("factor", [1.0, 1.25, 1.6])
def test_a_table_scores_what_was_put_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    folder = tables(tmp_path, factor, "A100-SXM4-80GB")
    assert op_tables.main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for family in ("products", "attention"):
        (line,) = found[family]["best version"]
        assert line["median"] == pytest.approx(100 * (1 - 1 / factor), abs=0.01)
        assert line["p90"] == pytest.approx(line["median"], abs=0.02)
    assert found["products"]["best version"][0]["rows"] == len(SIZES)


def test_rows_above_the_chips_peak_are_dropped_by_physics(tmp_path: Path) -> None:
    folder = tables(tmp_path, 0.3, "A100-SXM4-80GB")
    rows = op_tables.products(op_tables.read(folder, "gemm"))
    _, dropped = op_tables.scores(rows)
    assert 0 < dropped == sum(rows.flop / (rows.latency_ms / 1e3) > rows.peak)


def test_a_folder_without_tables_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert op_tables.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_the_recorded_result_meets_the_goals() -> None:
    recorded = json.loads(RECORDED.read_text())
    for family, goal in op_tables.GOALS.items():
        score = recorded[family]["median over GPUs of the best version's median error, %"]
        assert score <= goal
        assert len(recorded[family]["best version"]) == 7
    medians = sorted(line["median"] for line in recorded["products left out"])
    assert medians[len(medians) // 2] <= 12
