"""Notebooks that print what their own training took, re-estimated: reserved memory after loading, and
its peak.

    python benchmarks/accuracy/notebooks.py CHECKOUT [--out benchmarks/results/published/notebooks.md]

CHECKOUT is a clone of unslothai/notebooks, of which no file is copied. A notebook counts where its
outputs name a GPU of the catalog. Outputs are at times another notebook's, left over from a template:
figures that come under several models are left out. Their data is padded to its own lengths, so a
measured peak below the one priced at the full context says nothing; one above the range is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_gpu
from napkinmath.config.job_keys import KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced
from napkinmath.ir.ledger import Phase

FOLDER = "nb"  # templates lack the cell that installs, which says releases
VARIANTS = ("AMD-", "Kaggle-", "HuggingFace")  # copies of the others for other machines
SEEN = {
    "gpu": r"GPU = (.+?)\. Max",
    "loaded": r"([\d.]+) GB of memory reserved",
    "peak": r"Peak reserved memory = ([\d.]+)",
    "seconds": r"([\d.]+) seconds used for training",
}
NEAR = 0.05
GIB = 1 << 30
HEADER = """| notebook | GPU | loaded, GiB | priced | off | peak, GiB | priced | above, and what is named |
|---|---|---:|---:|---:|---:|---:|---|
"""


class Run(NamedTuple):
    """A notebook and what its outputs say."""

    path: Path
    model: str
    gpu: str
    loaded: float
    peak: float
    seconds: str


def runs(checkout: Path) -> list[Run]:
    """Those with figures of their own, each notebook once."""
    found: dict[str, Run] = {}
    for path in sorted((checkout / FOLDER).glob("*.ipynb")):
        if path.name.startswith(VARIANTS):
            continue
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        source = "\n".join("".join(cell.get("source", "")) for cell in cells)
        texts = (o.get("text", "") for cell in cells for o in cell.get("outputs", []))
        said = "\n".join("".join(text) for text in texts)
        values = {key: re.findall(pattern, said) for key, pattern in SEEN.items()}
        model = re.findall(r'model_name *= *"([^"]+)"', source)
        if all(values.values()):
            gpu, loaded, peak, seconds = (values[key][0] for key in SEEN)
            found[path.name] = Run(
                path, (model or [""])[0], gpu, float(loaded), float(peak), seconds
            )
    models: dict[tuple[float, float, str], set[str]] = {}
    for run in found.values():
        models.setdefault(run[3:], set()).add(run.model)
    own: dict[tuple[float, float, str], Run] = {}
    for run in found.values():
        if len(models[run[3:]]) == 1:
            own.setdefault(run[3:], run)
    return list(own.values())


def compared(run: Run) -> tuple[float, float, float, list[str]]:
    """(GiB priced after loading, least and greatest GiB of the reserved peak, what is named as not
    priced). Raises InputError for what is refused."""
    gpu = find_gpu(run.gpu).name
    (found,) = priced(with_job_file({"job": [str(run.path)], "gpu": [gpu]}, []), [])
    reserved = found.memory.reserved
    loaded = found.phase_peaks[Phase.LOAD].nbytes
    assert found.job_keys is not None
    named = [key.name for key in found.job_keys.keys if key.use is KeyUse.NOT_PRICED]
    return loaded / GIB, reserved.low / GIB, reserved.high / GIB, named


def lines(found: Sequence[Run]) -> Iterator[str]:
    """The table, and what it comes to."""
    off: list[float] = []
    above = silent = refused = 0
    for run in found:
        start = f"| {run.path.stem} | {run.gpu} | {run.loaded:.2f} |"
        try:
            loaded, low, high, named = compared(run)
        except InputError as error:
            refused += 1
            yield f"{start} refused: {str(error).partition(';')[0].partition(' (with')[0][:90]} | | {run.peak:.2f} | | |"
            continue
        off.append(loaded / run.loaded - 1)
        words = ""
        if run.peak > high:
            above, silent = above + 1, silent + (not named)
            words = f"{run.peak - high:.2f}: {', '.join(named) or 'nothing'}"
        yield (
            f"{start} {loaded:.2f} | {off[-1]:+.0%} | {run.peak:.2f} | {low:.2f} to {high:.2f}"
            f" | {words} |"
        )
    sizes = [abs(each) for each in off]
    yield (
        f"\n{len(off)} answered, {refused} refused. After loading {median(sizes):.1%} off at the median,"
        f" {sum(size <= NEAR for size in sizes)} within {NEAR:.0%}; {above} peaks lie above the range,"
        f" {silent} of them with nothing named."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The table on the terminal, or in a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of unslothai/notebooks")
    parser.add_argument("--out", type=Path, help="write the table into this file")
    given = parser.parse_args(arguments)
    found = runs(given.checkout)
    if not found:
        parser.error(
            f"{str(given.checkout)!r} has no notebook with figures; clone unslothai/notebooks"
        )
    text = HEADER + "\n".join(lines(found)) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
