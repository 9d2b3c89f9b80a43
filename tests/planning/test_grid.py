"""`estimate sweep`: every combination, each the figures of `estimate`; ranges; files; plots."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli.runs import run
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.several import expand, several
from napkinmath.planning.grid import EXACT, FAST, MONEY, Family, Grid, figures, frame, tokens_per_s
from napkinmath.report.grid_plot import _Table

ARCH = {
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "vocab_size": 1000,
        "num_hidden_layers": 3,
    }
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,2,4", ["1", "2", "4"]),
        ("1k..8k", [1024, 2048, 4096, 8192]),
        ("3..20", [3, 6, 12, 20]),
        ("512..1536:512", [512, 1024, 1536]),
        ("1, 4..6:1,1", ["1", 4, 5, 6]),
    ],
)
def test_values_and_ranges(text: str, found: list[object]) -> None:
    assert several("bs", text) == found


def test_lists_are_divided_by_semicolons() -> None:
    assert several("targets", "q_proj,v_proj;all-linear") == ["q_proj,v_proj", "all-linear"]
    assert several("checkpointing", "none,full") == ["none", "full"]
    assert several("checkpointing", "selective:sdpa,linear") == ["selective:sdpa,linear"]


@pytest.mark.parametrize("text", ["8..4", "1,,2", "a..b", "1..1m:1,", "0..4"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        several("bs", text)


def test_options_of_another_method_are_left_out_of_it() -> None:
    keys, outer, inner = expand(
        {
            "method": ["full", "lora", "qlora"],
            "targets": "q_proj;all-linear",
            "rank": "8,16",
            "quant": "nf4",
        }
    )
    assert keys == ["method", "targets", "rank"] and inner == {"rank": ["8", "16"]}
    assert len(outer) == 5 and outer[0] == {"method": "full"} and "quant" not in outer[1]


def test_fast_and_exact_rows_are_those_of_estimate() -> None:
    options = {
        **ARCH,
        "method": ["full", "lora"],
        "bs": "1,3",
        "ctx": "64,1000",
        "rank": "4,8",
        "gpu": "l4",
        "optimizer": "paged-adamw-8bit",
    }
    fast, exact = Grid(options, [], exact_below=0), Grid(options, [], exact=True)
    rows, exact_rows = list(fast.rows()), list(exact.rows())
    assert fast.names == (*fast.keys, *FAST) and exact.names == (*exact.keys, *EXACT)
    assert len(rows) == len(exact_rows) == fast.num_jobs == 4 + 8
    same = ("requested_bytes", "peak_phase", "method", "bs", "ctx", "rank")
    for row, other in zip(rows, exact_rows, strict=True):
        a, b = dict(zip(fast.names, row, strict=True)), dict(zip(exact.names, other, strict=True))
        assert all(a[name] == b[name] for name in same)
        assert a["tokens_per_s"] == pytest.approx(b["tokens_per_s"], rel=1e-12)
        assert a["verdict"] in (b["verdict"], "cannot tell")
        config = {k: v for k, v in a.items() if k in fast.keys and v is not None}
        fixed = {key: value for key, value in options.items() if key not in fast.keys}
        one = figures(Family({**fixed, **config}, []).template)
        assert {name: b[name] for name in EXACT} == one


@pytest.mark.slow
def test_verdict_of_requested_bytes_never_contradicts_the_replay() -> None:
    grid = {
        "model": "llama-3.2-1b",
        "method": ["lora", "full"],
        "gpu": "rtx3060-12",
        "bs": "1,2,4,8,16",
        "ctx": "512..8k",
        "checkpointing": "none,full",
    }
    fast, exact = (
        list(Grid(grid, [], exact=exact, exact_below=0).rows()) for exact in (False, True)
    )
    told = 0
    for a, b in zip(fast, exact, strict=True):
        assert a[-1] in (b[-1], "cannot tell")
        told += a[-1] != "cannot tell"
    assert told > 0.7 * len(fast) and {row[-1] for row in exact} >= {"fits", "does not fit"}


def test_sizes_beyond_64_bits_are_priced_all_the_same() -> None:
    family = Family({**ARCH, "method": "full", "attention": "eager", "gpu": "h100"}, [])
    huge = (1 << 30, 1 << 20, 1)
    requested, _, _, _, verdict = next(family.quickly(*([size] for size in huge)))
    assert requested == family.estimate(*huge).peak.nbytes > 1 << 63 and verdict == "does not fit"


def test_what_contradicts_itself_is_left_out_and_said() -> None:
    done = run(
        "sweep",
        "--arch",
        "L2 h64 a4 f128 v256",
        "--lora",
        "--quant",
        "none,gptq,nonsense",
        "--bs",
        "1,2",
    )
    assert done.code == 0 and len(done.out.splitlines()) == 5
    assert "left out" in done.err and "nonsense" in done.err
    assert run("sweep", "--model", "llama-7b", "--quant", "nf4", "--bs", "1,2").code == 2


def test_csv_and_jsonl(tmp_path: Path) -> None:
    argv = (
        "sweep",
        "--model",
        "gpt2",
        "--lora",
        "--bs",
        "1..64:1",
        "--ctx",
        "64..1024:64",
        "--gpu",
        "t4",
    )
    assert run(*argv, "--out", str(tmp_path / "a.csv")).code == 0
    assert run(*argv, "--out", str(tmp_path / "a.jsonl")).code == 0
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) == 64 * 16
    assert all(
        int(row["requested_bytes"]) == line["requested_bytes"]
        for row, line in zip(rows, lines, strict=True)
    )
    assert run(*argv, "--out", str(tmp_path / "a.csv")).code == 2
    assert run(*argv, "--out", str(tmp_path / "a.csv"), "--force").code == 0
    assert run(*argv, "--out", str(tmp_path / "a.txt")).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.jsonl"]


def test_dataframe() -> None:
    pytest.importorskip("pandas")
    found = frame({"model": "gpt2", "bs": "1..8:1", "ctx": [128, 256]})
    assert found.shape[0] == 16 and found["requested_bytes"].is_monotonic_increasing is False
    assert (found.groupby("ctx")["requested_bytes"].diff().dropna() >= 0).all()


@pytest.mark.parametrize(
    "flags",
    [
        "--bs 1..8 --ctx 128..1024 --gpu t4",
        "--bs 1..8 --ctx 128..1024",
        "--bs 1,2,4 --full --lora",
        "--bs 1,2,4 --gpu t4,l4 --show tokens/s",
    ],
)
def test_plots_are_written(flags: str, tmp_path: Path) -> None:
    """SVG without matplotlib; the words are in it."""
    file = tmp_path / "plot.svg"
    assert run("sweep", "--model", "gpt2", *flags.split(), "--plot", str(file)).code == 0
    text = file.read_text()
    ElementTree.fromstring(text)
    assert "batch" in text and "model gpt2" in text
    assert ("does not fit" in text) is ("--ctx" in flags and "--gpu" in flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bs 1..8 --plot plot.pdf", ".svg or .png"),
        ("--full --lora --plot plot.svg", "a number that varies"),
        ("--bs 1..8 --plot plot.svg --show time", "memory or tokens/s"),
        ("--bs 1..8:1 --ctx 1..8:1 --rank 1..8:1 --plot plot.svg", "64 lines"),
    ],
)
def test_plots_are_checked_before_anything_is_priced(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Grid, "_rows", None)
    found = run("sweep", "--model", "gpt2", *flags.split())
    assert found.code == 2 and said in found.err, found.err
    assert not list(tmp_path.iterdir())


def test_the_border_lies_between_what_fits_and_what_does_not() -> None:
    grid = Grid({**ARCH, "vram": "1GiB", "bs": "1..64", "ctx": "64..2048"}, [])
    rows = list(grid.rows())
    table = _Table(
        grid, rows, ("ctx", "bs"), [row[grid.names.index("device_bytes")] for row in rows]
    )
    fits = {place: cell.verdict == Verdict.FITS.value for place, cell in table.cells.items()}
    assert {*fits.values()} == {True, False}
    borders = sum(
        fits[x, y] is not fits[other]
        for x, y in fits
        for other in ((2 * x, y), (x, 2 * y))
        if other in fits
    )
    assert len(table._edges(lambda cell: cell.verdict == Verdict.FITS.value)) == borders > 0


def test_price_of_a_billion_tokens() -> None:
    grid = Grid(
        {**ARCH, "method": "full", "gpus": "2,4", "gpu": "l4", "bs": "1", "ctx": "64"},
        [],
        price=3.0,
    )
    assert grid.names[-2:] == MONEY
    for row in grid.rows():
        found = dict(zip(grid.names, row, strict=True))
        assert found["gpu_hours_per_billion"] == pytest.approx(
            1e9 / found["tokens_per_s"] / 3600 * int(found["gpus"])
        )
        assert found["price_per_billion"] == pytest.approx(3 * found["gpu_hours_per_billion"])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("model", ["resnet-50", "vit-base"])
def test_a_context_changes_nothing_for_a_model_of_images(model: str, exact: bool) -> None:
    options = {"model": model, "method": "full", "bs": "16", "gpu": "h100"}
    notes: list[str] = []
    grid = Grid({**options, "ctx": "128,4096"}, notes, exact=exact, exact_below=0)
    alone = priced(options, [])[0]
    for row in grid.rows():
        found = dict(zip(grid.names, row, strict=True))
        assert found["tokens_per_s"] == pytest.approx(tokens_per_s(alone))
        assert found["requested_bytes"] == alone.peak.nbytes
    assert any("--ctx has no effect" in note for note in notes)
