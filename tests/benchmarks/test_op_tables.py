"""The score of measured kernels: a table made from the rules themselves scores what was put in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from napkinmath.catalog.gpus import find_gpu
from napkinmath.timing.attention import attention_s
from napkinmath.timing.efficiency import gemm_s

pd = pytest.importorskip("pandas")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "accuracy"))

import op_groups  # noqa: E402
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


def groups(folder: Path, factor: float, gpu: str) -> Path:
    """A folder whose experts and collectives take `factor` times what the rules say."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "distribution")
    sizes = [(8192, 4096, 1536, 8, 64, routing) for routing in ("balanced", "power_law_1.2")] + [
        (16384, 2688, 1856, 6, 128, "balanced")
    ]
    moe = pd.DataFrame(sizes, columns=list(names)).assign(
        framework="vllm", version="1", kernel_source="triton", latency_ms=1.0, gpu=gpu
    )
    nccl = pd.DataFrame(
        [
            (name, dtype, ranks, 1 << power)
            for name in op_groups.KINDS
            for dtype in ("half", "int8")
            for ranks in (2, 8)
            for power in (20, 28)
        ],
        columns=["op_name", "nccl_dtype", "num_gpus", "elements_or_bytes"],
    ).assign(version="2.27", latency_ms=1.0, gpu=gpu)
    for file, table, rule in (
        ("moe", moe, op_groups.experts),
        ("nccl", nccl, op_groups.collectives),
    ):
        seconds = rule(table).seconds
        table.loc[seconds.index, "latency_ms"] = 1e3 * factor * seconds
        table.to_csv(folder / f"{file}.csv", index=False)
    return folder


@pytest.mark.parametrize("factor", [1.0, 1.6])
def test_experts_and_collectives_score_what_was_put_in(tmp_path: Path, factor: float) -> None:
    found = op_tables.result(groups(tmp_path, factor, "H100-SXM5-80GB"), 512, leave_out=False)
    for family, rows in (("experts", 3), ("collectives", 16)):  # int8 is not scored
        (line,) = found[family]["best version"]
        assert line["median"] == pytest.approx(100 * (1 - 1 / factor), abs=0.01)
        assert line["rows"] == rows


def test_a_left_out_generation_of_links_is_priced_by_the_others(tmp_path: Path) -> None:
    """A table made by the rules: only the link's own row explains it, so without it the error is not
    0. It is back afterwards."""
    tables = [
        pd.read_csv(groups(tmp_path, 1.0, gpu) / "nccl.csv")
        for gpu in ("A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM-180GB", "GB200-186GB")
    ]
    lines = op_groups.collectives_left_out(pd.concat(tables, ignore_index=True))
    errors = {line["gpu"]: line["median"] for line in lines}
    assert errors["A100-SXM4-80GB"] > 1 < errors["H100-SXM5-80GB"]
    assert errors["B200-SXM-180GB"] == errors["GB200-186GB"] == 0
    assert op_tables.scores(op_groups.collectives(tables[0]))[0]["median"].max() < 0.01


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
