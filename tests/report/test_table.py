"""The screen: order, widths, colours, encodings, and figures that are the estimate's."""

from __future__ import annotations

import io
import re

import pytest
from napkinmath.answers.ranges import headroom_bytes
from napkinmath.base.units import GIB
from napkinmath.config.train_config import AdapterConfig, Precision, TrainConfig
from napkinmath.estimate import Verdict, estimate
from napkinmath.inputs.jobs import priced as priced_options
from napkinmath.planning.grid import figures
from napkinmath.report.components import components_of
from napkinmath.report.json_report import as_mapping
from napkinmath.report.screen import (
    PIPE_WIDTH,
    bar,
    cut,
    sparkline,
    terminal_width,
    wants_color,
    wrap,
)
from napkinmath.report.table import print_report, report_text
from napkinmath.report.words import headline, in_gib, mesh
from priced import CONFIGS, priced, tiny

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_is_wider_than_the_screen(name: str, width: int) -> None:
    for unicode in (True, False):
        lines = report_text(priced(name), width=width, unicode=unicode).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_asked_first_is_said_first(name: str) -> None:
    text = report_text(priced(name), width=120)
    lines = text.splitlines()
    assert lines[0].startswith("llama-7b (6.74B parameters)")
    assert lines[0].endswith("RTX 4090, 23.6 GiB")
    assert {
        Verdict.FITS: "FITS",
        Verdict.DOES_NOT_FIT: "DOES NOT FIT",
        Verdict.UNKNOWN: "CANNOT TELL",
    }[priced(name).verdict] in lines[2] + lines[3]
    places = [
        text.index(word)
        for word in ("memory", "peak at", "where it comes from", "one step", "speed", "assumed")
    ]
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_shows_the_components_in_gib_and_their_sum(name: str) -> None:
    e = priced(name)
    table = report_text(e, width=120).split("where it comes from\n")[1].split("  one step")[0]
    shown = [float(found) for found in re.findall(r"^  .{22,26}?\s+([\d,]*\d\.\d\d)", table, re.M)]
    total = sum(row.nbytes for row in components_of(e)) / GIB
    assert shown[-1] == pytest.approx(total, abs=0.006)
    assert sum(shown[:-1]) == pytest.approx(total, abs=0.006 * (len(shown) + 6))
    for row in components_of(e):
        if row.nbytes > 0.01 * total * GIB:
            assert re.search(rf"^  {row.label} +{row.nbytes / GIB:,.2f} ", table, re.M), row


def test_no_two_rows_of_the_table_have_one_name() -> None:
    """A row called other of its own takes in the parts that are too small to see."""
    flags = {"model": "qwen2.5-vl-7b", "qlora": True, "image": "1024x768", "ctx": 2048}
    e = priced_options(flags | {"gpu": "l4"}, [])[0]
    table = report_text(e, width=120).split("where it comes from\n")[1].split("  one step")[0]
    labels = [line[2:28].split("  ")[0] for line in table.splitlines()]
    assert "activations: other" in labels and len(labels) == len(set(labels))


def test_the_three_figures_stand_with_their_ranges() -> None:
    memory = priced("full").memory
    text = report_text(priced("full"), width=120)
    for name, figure in (
        ("allocated", memory.allocated),
        ("reserved", memory.reserved),
        ("device", memory.device),
    ):
        assert (
            f"{name} {figure.value / GIB:.1f} ({figure.low / GIB:.1f}-{figure.high / GIB:.1f})"
            in text
        )


def test_speed_is_the_estimates() -> None:
    time = priced("qlora").time
    assert time is not None
    text = report_text(priced("qlora"), width=120)
    assert f"{time.tokens_per_s:,.0f} tokens/s" in text
    assert f"MFU {time.mfu:.0%}" in text
    assert f"HFU {time.hfu:.0%}" in text
    assert (
        "--gpu" in report_text(priced("qlora", None), width=120).split("speed")[1].splitlines()[0]
    )


def test_without_a_gpu_the_list_of_gpus_answers() -> None:
    text = report_text(priced("qlora", None), width=120)
    assert "FITS" not in text
    assert re.search(r"^  fits +\d+ GiB", text, re.M)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "gpu", "words"),
    [
        (Verdict.FITS, "RTX 4090", "to spare of 23.6 GiB"),
        (Verdict.DOES_NOT_FIT, "RTX 3060 Ti", "GiB too much for 7."),
        (Verdict.UNKNOWN, "RTX 3060 Ti", "if the allocator keeps its cache"),
        (
            Verdict.DOES_NOT_FIT,
            "RTX 4090",
            " GiB (fragmentation); try --allocator expandable_segments:True",
        ),
        (Verdict.UNKNOWN, "RTX 4090", "in pieces"),
        (Verdict.NOT_ASKED, "RTX 4090", "memory"),
    ],
)
def test_each_verdict_has_its_words(
    verdict: Verdict, gpu: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = priced("qlora", gpu)
    assert e.memory  # cached under its own verdict, for whoever prices the same
    monkeypatch.setattr(e, "verdict", verdict)
    assert words in report_text(e, width=160)


@pytest.mark.slow
def test_a_fit_that_needs_the_cache_back_says_so() -> None:
    options = {
        "model": "llama-7b",
        "method": "qlora",
        "bs": "4",
        "ctx": "17000",
        "gpu": ["a100-80"],
    }
    e = priced_options(options, [])[0]
    assert e.hardware is not None
    assert e.verdict is Verdict.FITS and e.replay.peak_reserved > e.hardware.usable_bytes
    assert "only where the allocator returns its cache" in report_text(e, width=120)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "returns"), [("16xh100", True), ("16xh200", False)])
def test_a_device_figure_below_the_reserved_one_is_explained(gpus: str, returns: bool) -> None:
    options = {
        "model": "llama-3.1-70b",
        "data_parallel": "fsdp2",
        "gpus": gpus,
        "ctx": 8192,
        "checkpointing": "full",
    }
    e = priced_options(options, [])[0]
    assert e.hardware is not None
    held = e.memory.reserved.value + e.hardware.context_bytes
    assert (e.memory.device.value < held) is returns
    text = " ".join(report_text(e, width=120).split())
    assert ("after the full device made the allocator return its cache" in text) is returns


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gpu", ["RTX 4090", "A100-80", "T4"])
def test_one_headroom_in_every_answer(name: str, gpu: str) -> None:
    e = priced(name, gpu)
    assert e.hardware is not None
    left = e.hardware.memory_bytes - int(e.memory.device.value)
    document = as_mapping(e)
    assert (
        headroom_bytes(e) == figures(e)["headroom_bytes"] == document["headroom"]["value"] == left
    )
    own = next(fit for fit in e.fits_on if fit.gpu == e.hardware.gpu.name)
    assert own.headroom_bytes == left and own.verdict is e.verdict
    assert e.verdict is not Verdict.FITS or min(document["headroom"].values()) >= 0
    shown = f"{in_gib(abs(left))} GiB"
    assert e.verdict is Verdict.UNKNOWN or shown in report_text(e, width=120).split("memory")[0]


# ---------------------------------------------------------------- colours and encodings


@pytest.mark.slow
def test_colours_only_add_to_the_text() -> None:
    plain = report_text(priced("qlora"), width=100)
    colored = report_text(priced("qlora"), width=100, color=True)
    assert "\x1b" not in plain
    assert "\x1b[" in colored
    assert [line.rstrip() for line in ESCAPE.sub("", colored).splitlines()] == plain.splitlines()


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def _terminal(encoding: str = "utf-8") -> Terminal:
    return Terminal(io.BytesIO(), encoding=encoding)


def test_colours_follow_the_stream_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    assert wants_color(_terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(_terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(_terminal())


@pytest.mark.slow
def test_a_pipe_gets_plain_text_of_a_fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    out = io.StringIO()
    print_report(priced("qlora"), stream=out)
    assert out.getvalue() == report_text(priced("qlora"), width=PIPE_WIDTH)
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal_width(out) == 80
    monkeypatch.setenv("COLUMNS", "9")
    assert terminal_width(out) == 60


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "latin-1", "utf-8", "utf-16"])
@pytest.mark.parametrize("name", ["qlora", "full, chunked loss"])
def test_any_encoding_can_carry_the_report(encoding: str, name: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    print_report(priced(name), stream=out)
    out.flush()


def test_ascii_keeps_bars_and_curve() -> None:
    text = report_text(priced("qlora"), width=100, unicode=False)
    assert text.isascii()
    assert re.search(r"logits and loss .*#+", text)
    assert re.search(r"one step +[_.:=+*#-]{80}", text)


def test_a_name_cannot_move_the_cursor() -> None:
    text = report_text(tiny("evil\x1b[2J\r\nname\u202e"), width=100)
    assert text.splitlines()[0].startswith("evil?[2J??name?")
    assert "\x1b" not in text


def test_a_small_model_is_shown_in_mib() -> None:
    e = tiny()
    assert "at the peak" in (text := report_text(e, width=100))
    assert ("MiB  " in text) == (int(e.memory.device.value) < GIB)


# ---------------------------------------------------------------- pieces


def test_bars_are_proportional_and_never_vanish() -> None:
    assert [len(bar(x, 16, unicode=False)) for x in (0, 0.001, 0.5, 1)] == [0, 1, 8, 16]
    assert bar(1, 4, unicode=True) == "████"
    assert bar(0.001, 4, unicode=True) == "▏"
    assert bar(0, 4, unicode=True) == ""


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline((500, 550, 600)) == "▁▅█"
    assert sparkline((7, 7)) == "▁▁"
    assert sparkline(()) == ""


def test_wrapping_breaks_between_words_and_inside_endless_ones() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("x" * 10, 4) == ["xxxx", "xxxx", "xx"]
    assert wrap("", 4) == [""]
    assert cut([("abc", ""), ("defgh", "bold")], 6) == [("abc", ""), ("de…", "bold")]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_a_gpu_without_bf16_is_never_named_unmarked_for_it(precision: Precision) -> None:
    """'also fits' and 'perhaps' name such GPUs after the others of their size, with a mark."""
    config = TrainConfig(adapter=AdapterConfig(), precision=precision, sequence_length=64)
    said = report_text(estimate("tinyllama-1.1b", config, hardware="H100"), width=200)
    without = ("RTX 2060", "RTX 2080 Ti")
    for name in without:
        assert name in said
        assert (f"{name} (no bf16)" in said) == (precision is Precision.BF16)


def test_the_head_names_tiles_and_how_tokens_reach_experts() -> None:
    tiled = priced_options({"model": "llama-3.2-1b", "mlp_tiles": 4, "ctx": 256}, [])[0]
    assert "MLP in 4 tiles" in headline(tiled)
    options = {"model": "mixtral-8x7b", "gpus": "8xh100", "ep": 8, "stack": "megatron"}
    said = [mesh(priced_options({**options, "deepep": on}, [])[0])[-1] for on in (True, False)]
    assert said == ["tokens sent once, expert 8", "expert 8"]
