"""Timeline files: whole or not at all, well-formed, self-contained, the same peak in each."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from chromium import chromium
from hypothesis import HealthCheck, given, settings
from napkinmath.base.errors import InputError
from napkinmath.base.units import format_bytes
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment
from napkinmath.report import drawn
from napkinmath.report.picture import number, picture, ticks
from napkinmath.report.plot import write_timeline
from napkinmath.report.timeline_data import compact, view_data
from napkinmath.report.timeline_html import timeline_html
from napkinmath.report.timeline_svg import timeline_svg
from priced import CONFIGS, priced, spelled_out, timelines

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "</script><script>alert(1)</script>&<\"'{{data}}\x1b]0;\u202e"


def nasty() -> Timeline:
    """A measured timeline whose names try to break out of every format."""
    tensors = [
        TensorInfo(NASTY, Role.ACTIVATIONS, NASTY, 1000, 1024, NASTY, (), NASTY),
        TensorInfo("w", Role.WEIGHTS, "m", 3000, 3072),
    ]
    return Timeline(
        tensors,
        [TimelineSegment(NASTY, Phase.FORWARD, 1, [("+", 1), ("+", 0), ("-", 0)], [])],
        Stamp(origin="measured", details=((NASTY, NASTY),)),
    )


# ---------------------------------------------------------------- SVG


@pytest.mark.parametrize("name", CONFIGS)
def test_svg_is_well_formed_and_says_what_the_estimate_says(name: str) -> None:
    e = priced(name)
    root = ElementTree.fromstring(timeline_svg(e.timeline, e))
    words = " ".join(node.text or "" for node in root.iter(f"{SVG}text"))
    for expected in (
        "llama-7b",
        "backward",
        f"peak {format_bytes(e.peak.nbytes)}",
        "RTX 4090: 23.6 GiB",
        "time within the step, ",
    ):
        assert expected in words
    bands = [node for node in root.iter(f"{SVG}path")]
    assert len(bands) == len(picture(e.timeline, e, title="", num_columns=846).columns.roles)


def test_svg_draws_the_peak_at_its_height() -> None:
    e = priced("qlora")
    p = picture(e.timeline, e, title="", num_columns=846)
    root = ElementTree.fromstring(timeline_svg(e.timeline, e))
    dot = next(root.iter(f"{SVG}circle"))
    top = 92 + (620 - 62 - 92) * (1 - e.peak.nbytes / p.top)
    assert float(dot.get("cy", "")) == pytest.approx(top, abs=0.06)
    heights = [
        float(y)
        for node in root.iter(f"{SVG}path")
        for y in re.findall(r"[ML][\d.]+ ([\d.]+)", node.get("d", ""))
    ]
    assert min(heights) == pytest.approx(top, abs=0.06)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(timelines())
def test_any_timeline_can_be_drawn(timeline: Timeline) -> None:
    ElementTree.fromstring(timeline_svg(timeline))


def test_a_gpu_far_above_the_peak_is_named_beside_the_plot() -> None:
    e = priced("qlora", "B300")
    p = picture(e.timeline, e, title="", num_columns=10)
    assert [line.label for line in p.beyond] == ["B300-SXM-270GB"]
    assert "above this plot" in timeline_svg(e.timeline, e)


# ---------------------------------------------------------------- HTML


@pytest.mark.parametrize("timeline", [priced("qlora").timeline, nasty()], ids=["qlora", "nasty"])
def test_html_needs_nothing_from_outside(timeline: Timeline) -> None:
    page = timeline_html(timeline)
    assert not re.search(
        r"""(src|href)\s*=|@import|url\(|\bfetch\(|XMLHttpRequest|import\(""", page
    )
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert page.count("<script") == 2


@given(timelines())
def test_the_data_of_the_page_spell_out_to_the_timeline(timeline: Timeline) -> None:
    found = drawn.shown(timeline)
    data = json.loads(json.dumps(compact(found)))
    tensors, level, totals = data["tensors"], 0, []
    for tensor, copies in data["alive"]:
        level += tensors[tensor][3] * copies
    for number_of_segment, repeat in data["order"]:
        segment = data["segments"][number_of_segment]
        for _ in range(repeat):
            for action, index in zip(segment["events"][::2], segment["events"][1::2], strict=True):
                if action < 2:
                    level += (1, -1)[action] * tensors[index][3]
                elif action == 2:
                    old, new = segment["pairs"][index]
                    level += tensors[new][3] - tensors[old][3]
                totals.append(level)
    assert totals == spelled_out(timeline, found.segments[0])


def test_an_axis_of_the_gpus_work_knows_the_step_with_its_waits() -> None:
    """GPT-2 on one short sample: the host is slower than the GPU."""
    e = estimate("gpt2", gpu="H100", batch_size=1, context=64)
    data = view_data(e.timeline, e)
    drawn_s = sum(data["segments"][number]["seconds"] * often for number, often in data["order"])
    assert e.time is not None and data["step_seconds"] == e.time.seconds > 1.05 * drawn_s
    assert "step_seconds" not in view_data(e.timeline, None)


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_works_by_keyboard_and_pointer(tmp_path: Path) -> None:
    e = priced("qlora")
    file = tmp_path / "step.html"
    write_timeline(e, file)
    with chromium() as page:
        page.shape(1300, 850)
        page.open(file.as_uri())
        page.run(
            "globalThis.part = (n) => document.querySelector(`[data-part=${n}]`); globalThis.key ="
            " (k) => part('plot').dispatchEvent(new KeyboardEvent('keydown', {key: k}))"
        )
        total = f"part('sum').textContent === {format_bytes(e.peak.nbytes)!r}"
        page.run("key('p')")
        page.until(total)
        assert "log_softmax" in page.run("part('operation').textContent")
        page.run("document.querySelector('.legend button').click()")
        page.until(f"!({total})")
        assert page.run("document.querySelectorAll('[aria-pressed=false]').length") == 1
        page.run("key('Home')")
        page.until("part('when').textContent.includes('event 0 of')")
        page.run(
            "const b = part('plot').getBoundingClientRect(); part('plot').dispatchEvent(new"
            " PointerEvent('pointermove', {clientX: b.left + b.width / 2, clientY: b.bottom - 60}))"
        )
        assert "weight" in page.run("part('tip').textContent")
        assert page.run("part('tip').style.visibility") == "visible"
        assert page.errors == []


@pytest.mark.slow
@pytest.mark.browser
def test_names_cannot_run_scripts_in_the_page(tmp_path: Path) -> None:
    file = tmp_path / "nasty.html"
    write_timeline(nasty(), file)
    with chromium() as page:
        page.open(file.as_uri())
        assert page.run("document.scripts.length") == 2  # data, and the page's own
        assert page.errors == []


# ---------------------------------------------------------------- files


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".svg", ".html", ".png", ".SVG"])
@pytest.mark.parametrize("source", ["estimate", "timeline", "nasty"])
def test_a_file_is_written_for_estimates_and_any_timeline(
    tmp_path: Path, suffix: str, source: str
) -> None:
    path = tmp_path / f"step{suffix}"
    write_timeline(
        {"estimate": priced("lora"), "timeline": priced("lora").timeline, "nasty": nasty()}[source],
        path,
    )
    content = path.read_bytes()
    assert content.startswith(
        {".svg": b"<svg", ".html": b"<!doctype html>", ".png": b"\x89PNG\r\n\x1a\n"}[suffix.lower()]
    )
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.slow
def test_a_png_is_large_enough_to_read(tmp_path: Path) -> None:
    write_timeline(priced("qlora"), tmp_path / "a.png")
    header = (tmp_path / "a.png").read_bytes()[16:24]
    assert (int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) == (1800, 960)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"step\.svg.* exists; add --force"):
        write_timeline(priced("lora"), path)
    assert path.read_text() == "mine"
    write_timeline(priced("lora"), path, force=True)
    assert path.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step.pdf", "no known suffix; use .svg, .html or .png"),
        ("step", "no known suffix"),
        ("", "no known suffix"),
        ("missing/step.svg", "cannot be written: its folder does not exist"),
        ("bad\0name.svg", "is no path"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        write_timeline(priced("lora"), os.path.join(str(tmp_path), name) if name else name)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_folder_and_a_device_are_refused_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    os.mkfifo(tmp_path / "b.svg")
    for name, words in (("a.svg", "is a folder"), ("b.svg", "not a regular file")):
        with pytest.raises(InputError, match=words):
            write_timeline(priced("lora"), tmp_path / name, force=True)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step.svg").write_text("mine")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(InputError, match="the disk is full"):
        write_timeline(priced("lora"), tmp_path / "step.svg", force=True)
    assert os.listdir(tmp_path) == ["step.svg"]
    assert (tmp_path / "step.svg").read_text() == "mine"


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        write_timeline(priced("lora"), tmp_path / "a.png")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- axes


@pytest.mark.parametrize("top", [0.003, 0.9, 1, 7.2, 23.6, 1234, 5e9])
def test_ticks_are_round_and_few(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert 3 <= len(found) <= 8
    assert found[-1] <= top * (1 + 1e-9)
    step = found[1]
    assert step / 10 ** len(str(int(step))) if step >= 1 else True
    assert number(0.5) == "0.5"
    assert number(2000) == "2,000"
