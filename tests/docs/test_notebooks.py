"""The notebooks run from top to bottom in a fresh kernel, and print what their committed outputs
say."""

from __future__ import annotations

import base64
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from napkinmath.ir.ledger import Role

FOLDER = Path(__file__).parents[2] / "notebooks"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")
# A unit behind a number of the opening's answer: such a number is a figure that a cell prints.
ANSWERED = re.compile(r"([\d.,]*\d) ?(?:GiB|MiB|%|tokens/s|sequences|dollars|hours)")
LARGEST_BYTES = 350_000
DPI, COLUMNS = 150, 100
MOST_OFF = 0.05  # a change of a rule moves figures; beyond this the outputs need `make notebooks`
NAMES = (
    "01_napkin_math_from_zero",
    "02_why_did_my_qlora_use_more_than_lora",
    "03_one_real_layer",
    "04_a_memory_timeline_and_an_oom",
    "05_memory_bound_or_compute_bound",
    "06_from_two_3090s_to_a_cluster",
)


def runner() -> ModuleType:
    """notebooks/execute.py; skips where what it needs is missing."""
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    return script("execute")


def script(name: str) -> ModuleType:
    """A module of the folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(cell: Any) -> str:
    """What a cell printed, errors' stream included; nothing for cells whose figures differ by
    nature."""
    if cell.cell_type != "code" or "varies" in cell.metadata.get("tags", []):
        return ""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def figures(text: str) -> list[float]:
    return [float(number.replace(",", "").rstrip(".")) for number in NUMBER.findall(text)]


def test_every_notebook_is_listed() -> None:
    assert tuple(path.stem for path in runner().notebooks()) == NAMES
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"({name}.ipynb)" in index


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's client
def test_notebook_prints_what_is_committed(name: str) -> None:
    import nbformat

    path = FOLDER / f"{name}.ipynb"
    committed, fresh = nbformat.read(path, as_version=4), runner().executed(path)
    for before, after in zip(committed.cells, fresh.cells, strict=True):
        told, tells = printed(before), printed(after)
        assert NUMBER.sub("#", told).split() == NUMBER.sub("#", tells).split(), (
            f"{name}: run `make notebooks`\n{told}\n{tells}"
        )
        for old, new in zip(figures(told), figures(tells), strict=True):
            assert old == pytest.approx(new, rel=MOST_OFF, abs=2), (
                f"{name}: run `make notebooks`\n{told}\n{tells}"
            )


def committed(name: str) -> Any:
    """A notebook as it is committed; skips where nbformat is missing."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("name", NAMES)
def test_notebook_opens_with_its_question_and_an_answer_that_its_cells_print(name: str) -> None:
    notebook = committed(name)
    assert notebook.cells[0].cell_type == "markdown"
    title, question, answer = notebook.cells[0].source.split("\n\n")[:3]
    assert title.startswith("# ") and re.fullmatch(r"\*\*.*\?\*\*", question, re.DOTALL)
    answered = ANSWERED.findall(answer)
    assert len(answered) >= 3, "an answer has figures"
    known = [abs(number) for cell in notebook.cells for number in figures(printed(cell))]
    for text in answered:
        digits = len(text.partition(".")[2])
        assert float(text.replace(",", "")) in [round(number, digits) for number in known], (
            f"{name}: no cell prints {text} of the opening"
        )


@pytest.mark.parametrize("name", NAMES)
def test_notebook_stays_narrow_small_and_without_errors(name: str) -> None:
    cells = [cell for cell in committed(name).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    lines = "\n".join([cell.source for cell in cells] + [o.get("text", "") for o in outputs])
    assert [line for line in lines.splitlines() if len(line) > COLUMNS] == []
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST_BYTES
    for output in outputs:
        assert output.output_type != "error" and output.get("name") != "stderr"
        assert " at 0x" not in str(output.get("data", {}).get("text/plain", "")).replace(
            "<Figure", ""
        )


@pytest.mark.parametrize("name", NAMES)
def test_pictures_have_the_style_of_drawing(name: str) -> None:
    image = pytest.importorskip("PIL.Image")
    cells = [cell for cell in committed(name).cells if cell.cell_type == "code"]
    data = [output.get("data", {}) for cell in cells for output in cell.outputs]
    pictures = [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]
    assert pictures, "no picture"
    for picture in pictures:
        assert round(image.open(io.BytesIO(picture)).info["dpi"][0]) == DPI
    for word in ("rcParams", "frameon", "fontsize"):  # the style's
        assert all(word not in cell.source for cell in cells)


def test_stacked_bars_end_in_their_totals_with_each_part_once_in_the_legend() -> None:
    pytest.importorskip("matplotlib").use("agg")
    drawing, pyplot = script("drawing"), pytest.importorskip("matplotlib.pyplot")
    bars = {
        "one": {Role.WEIGHTS: 2 * drawing.GIB, Role.ACTIVATIONS: drawing.GIB, Role.CONTEXT: 1},
        "two": {Role.ACTIVATIONS: drawing.GIB, Role.WEIGHTS: drawing.GIB / 2},
    }
    for lying in (False, True):
        figure, axes = pyplot.subplots()
        drawing.stacked_bars(axes, bars, lying=lying)
        drawing.capacity_line(axes, 2.5, "a card", upright=lying)
        drawing.legend_below(figure, columns=2)
        assert [text.get_text() for text in axes.texts] == ["3.0", "1.5", "a card"]
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend == ["weights", "activations"]  # a byte of context is not to be seen
        ends = [
            bar.get_x() + bar.get_width() if lying else bar.get_y() + bar.get_height()
            for bar in axes.patches
        ]
        assert max(ends) == pytest.approx(3)
        with pytest.raises(KeyError, match="no colour for 'rent'"):
            drawing.stacked_bars(axes, {"three": {"rent": 1}}, lying=lying)
        pyplot.close(figure)


def test_figures_are_read_from_text() -> None:
    assert figures("by hand 109,529,856 is -0.2% off") == [109529856.0, -0.2]
