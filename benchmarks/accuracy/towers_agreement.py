"""Joint models on text, whose towers are data that ships, against traced steps of their classes.

    python benchmarks/accuracy/towers_agreement.py [TYPE ...] [--learn] [--write]

Every shipped type by default. `--learn` learns the towers of the named types first, and keeps those
that are at most 0.1% off in every cell. Each type at the sizes of the catalog's first model of it
(else its class's defaults), its text and towers with as few layers as show every kind. The share is
of the peak without the weights of the towers, so that they hide nothing. `--write` writes
benchmarks/results/cpu/towers_agreement.csv: the rows of the named types anew, others as they are.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agreement_matrix import compare
from analytic_vs_traced import Case
from learned_agreement import CLOSE, config_of
from napkinmath.catalog.learned_towers import SHIPPED, types_with_towers
from napkinmath.ir.ledger import Phase
from napkinmath.models.families import read_config
from napkinmath.models.families.on_text import LOSSES
from napkinmath.models.layers.idle import IdleModule
from napkinmath_profiler.tracing.learning.config_fields import full_config
from napkinmath_profiler.tracing.learning.towers import learn_towers, shortened_towers
from napkinmath_profiler.tracing.learning.writing import keep

RESULT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "towers_agreement.csv"
HEADER = ["model_type", "cell", "priced_bytes", "traced_bytes", "towers_bytes", "refused"]
BASE = Case(config={}, attention="auto", optimizer="adamw-fused")
CELLS = {
    "full 2 x 128": BASE,
    "full checkpointed 2 x 333": replace(BASE, checkpointing=True, sequence=333),
    "full 1 x 17 bf16-amp": replace(BASE, batch=1, sequence=17, precision="bf16-amp"),
    "full 2 x 128 eager": replace(BASE, attention="eager"),
    "lora 2 x 17": replace(BASE, method="lora", sequence=17),
    "lora checkpointed 1 x 1000": replace(
        BASE, method="lora", checkpointing=True, batch=1, sequence=1000
    ),
    "qlora 2 x 1000": replace(BASE, method="qlora", sequence=1000),
}
Row = list[object]


def small(model_type: str) -> dict[str, Any]:
    """A type's config with few layers of text and of towers."""
    return shortened_towers(full_config(config_of(model_type)))


def towers_bytes(config: Mapping[str, object]) -> int:
    """Bytes of the towers' weights in 16 bits."""
    stages = read_config(config).stages
    return 2 * sum(s.count * s.part.elements for s in stages if isinstance(s.part, IdleModule))


def compared(model_type: str) -> Iterator[Row]:
    """Every cell of a type."""
    config = small(model_type)
    towers = towers_bytes(config)
    for name, case in CELLS.items():
        try:
            cell = compare(model_type, replace(case, config=config))
        except Exception as error:  # whatever the library raises: it does not run this step
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield [model_type, name, 0, 0, towers, first[:120]]
        else:
            yield [model_type, name, _peak(cell.analytic), _peak(cell.traced), towers, ""]


def _peak(phases: Mapping[Phase, int]) -> int:
    return max(phases.values())


def share(row: Sequence[Any]) -> float:
    """By how much the priced peak differs, of the traced one without the towers' weights."""
    priced, traced, towers = map(int, row[2:5])
    return (priced - traced) / (traced - towers) if traced else 0.0


def learned(model_type: str, text_type: str) -> list[Row]:
    """Learns the towers of a type into the catalog, and whose loss its class has; takes out again
    what is far off. `text_type`: the family that reads its text, where its own name has none."""
    path = os.path.join(SHIPPED, f"{model_type}.json")
    rows: list[Row] = []
    try:
        forms = learn_towers(config_of(model_type))
        for loss in LOSSES:
            keep([{**form, "loss": loss, "text_type": text_type} for form in forms], path)
            rows = list(compared(model_type))
            if not _are_far(rows):
                return rows
    except Exception as error:  # whatever a class or the learner raises
        said = str(error).splitlines()[0] if str(error) else ""
        print(f"{model_type:24} not learned: {type(error).__name__}: {said}", flush=True)
    if os.path.exists(path):
        os.unlink(path)
    return rows


def _are_far(rows: Sequence[Row]) -> bool:
    """Whether any step is far off, or none ran."""
    return any(abs(share(r)) > CLOSE for r in rows) or not any(int(str(r[3])) for r in rows)


def write(rows: Sequence[Row]) -> None:
    """One line a cell of a type that ships."""
    before: list[list[str]] = []
    if RESULT.exists():
        with RESULT.open(newline="", encoding="utf-8") as file:
            before = list(csv.reader(file))[1:]
    anew, ships = {str(row[0]) for row in rows}, set(types_with_towers())
    whole: list[Sequence[object]] = [row for row in before if row[0] not in anew]
    whole = [row for row in (*whole, *rows) if row[0] in ships]
    with RESULT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        cells: list[list[str]] = [[str(cell) for cell in row] for row in whole]
        cells.sort(key=lambda row: row[0])
        writer.writerows(cells)


def main() -> None:
    """Prints every cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--text", default="", metavar="TYPE", help="the family of the text model")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for kind in options.types or types_with_towers():
        rows = learned(kind, options.text) if options.learn else list(compared(kind))
        for row in rows:
            said = row[5] or f"{share(row):+.4%}"
            print(f"{kind:24} {row[1]:28} {said}", flush=True)
        if options.write:
            write(rows)


if __name__ == "__main__":
    main()
