"""Runs the notebooks from top to bottom in fresh kernels and writes what they print and draw back
into them.

Usage: python notebooks/execute.py [NOTEBOOK.ipynb ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
SECONDS_A_CELL = 240


def notebooks() -> list[Path]:
    """Every notebook of the folder, in the order of their numbers."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in a fresh kernel; raises CellExecutionError where a
    cell does."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as cache:
        client = NotebookClient(
            notebook,
            timeout=SECONDS_A_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
            record_timing=False,
        )
        client.execute(env=surroundings(cache))
    return tidied(notebook)


def surroundings(cache: str) -> dict[str, str]:
    """The environment of a kernel: this checkout's packages, one thread, an empty cache."""
    roots = [str(ROOT / name) for name in ("estimator", "profiler", "kernels")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*roots, os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, which would like widgets
        "XDG_CACHE_HOME": cache,  # no calibration of this machine changes a figure
    }


def tidied(notebook: Any) -> Any:
    """The notebook without what differs from machine to machine: the interpreter's version,
    execution times, cell numbers' gaps."""
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Outputs with what was printed in one piece, however the kernel flushed it."""
    found: list[Any] = []
    for output in outputs:
        output.get("metadata", {}).clear()
        if found and output.output_type == "stream" and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main(arguments: list[str]) -> int:
    for path in [Path(name).resolve() for name in arguments] or notebooks():
        nbformat.write(executed(path), path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
