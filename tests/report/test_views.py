"""How an Estimate shows itself in Python: text, notebook, frame, comparison, picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.base.units import format_bytes
from priced import priced


def test_its_text_has_the_verdict_the_bar_and_the_curve() -> None:
    e = priced("qlora")
    shown = repr(e)
    assert "FITS" in shown and "one step" in shown
    assert format_bytes(int(e.memory.device.value)) in shown.splitlines()[-1]
    assert max(map(len, shown.splitlines())) <= 88
    (bar,) = [line for line in shown.splitlines() if "\u2588|" in line or "\u2591|" in line]
    assert e.hardware is not None
    share = bar.count("\u2588") / 60
    assert share == pytest.approx(e.memory.device.value / e.hardware.memory_bytes, abs=0.01)


def test_a_notebook_shows_bar_and_timeline_without_scripts() -> None:
    shown = priced("qlora")._repr_html_()
    assert "<svg" in shown and "fits on the" in shown and "<script" not in shown
    assert "weights of the layers" in shown


def test_a_step_without_a_gpu_is_shown_too() -> None:
    e = estimate("smollm2-135m", bs=1, ctx=128)
    assert "\u2588" in repr(e) and "<svg" in e._repr_html_()


def test_a_frame_adds_up_to_the_device() -> None:
    pytest.importorskip("pandas")
    e = priced("qlora")
    found = e.to_pandas()
    assert int(found.nbytes.sum()) == int(e.memory.device.value)
    assert set(found.columns) == {"component", "role", "nbytes", "gib", "origin"}


def test_without_pandas_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install matplotlib numpy pandas"):
        priced("qlora").to_pandas()


def test_two_are_compared_by_what_differs() -> None:
    first, second = priced("qlora"), priced("lora")
    found = first.compare(second)
    rows = {name: (a, b) for name, a, b in found.rows}
    assert rows["device"][0] == format_bytes(int(first.memory.device.value))
    assert rows["device"][1] == format_bytes(int(second.memory.device.value))
    assert rows["quantization"] == ("nf4", "none") and "model" not in rows
    assert "verdict" in repr(found) and "<table>" in found._repr_html_()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_plot_is_shown_and_saved(tmp_path: Path) -> None:
    drawing = priced("lora").plot()
    assert drawing._repr_svg_().startswith("<svg")  # pyright: ignore[reportAttributeAccessIssue]
    drawing.save(str(tmp_path / "step.html"))
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
