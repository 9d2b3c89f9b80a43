"""The notebooks run from top to bottom in a fresh kernel, and print what their committed outputs
say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")
LARGEST_BYTES = 200_000
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
    """notebooks/execute.py, which is in no package."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    assert nbformat
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
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


@pytest.mark.parametrize("name", NAMES)
def test_notebook_opens_with_its_question_and_stays_small(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    opening = notebook.cells[0]
    assert (
        opening.cell_type == "markdown"
        and opening.source.startswith("# ")
        and re.search(r"\*\*[^*]+\?\*\*|\?$", opening.source, re.MULTILINE)
    )
    pictures = [
        o
        for cell in notebook.cells
        if cell.cell_type == "code"
        for o in cell.outputs
        if "image/png" in o.get("data", {})
    ]
    assert pictures, "no picture"
    assert path.stat().st_size < LARGEST_BYTES
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error" and output.get("name") != "stderr"
            assert " at 0x" not in str(output.get("data", {}).get("text/plain", "")).replace(
                "<Figure", ""
            )


def test_figures_are_read_from_text() -> None:
    assert figures("by hand 109,529,856 is -0.2% off") == [109529856.0, -0.2]
