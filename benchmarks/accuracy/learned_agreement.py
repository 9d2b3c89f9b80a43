"""The learned forms that ship, against traced steps of the classes that they were learned from.

    python benchmarks/accuracy/learned_agreement.py [TYPE ...] [--learn] [--write]

Every shipped type by default; `--learn` learns the named types anew into the catalog first, and
keeps none that is more than 0.1% off. `--write` writes benchmarks/results/cpu/learned_agreement.csv.
Each type at the sizes of the catalog's first model of it (else its class's defaults), with as few
layers as show every kind, and at sizes that no recording saw.
"""

from __future__ import annotations

import argparse
import csv
import os
import warnings
from pathlib import Path
from typing import Any

from napkinmath.catalog.learned_forms import SHIPPED, read_form, shipped_types
from napkinmath.catalog.models import load_rows
from napkinmath.models.families import FAMILIES
from napkinmath_profiler.tracing.learning.checking import WHOLE, Agreement, agreement
from napkinmath_profiler.tracing.learning.learner import learn
from napkinmath_profiler.tracing.learning.writing import keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RESULT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "learned_agreement.csv"
CLOSE = 0.001


def config_of(model_type: str) -> dict[str, Any]:
    """The catalog's first config of a type, else what its class fills in."""
    rows = (row["config"] for row in load_rows() if row["config"]["model_type"] == model_type)
    return dict(next(rows, {"model_type": model_type}))


def relearn(model_type: str) -> None:
    """Learns a type into the catalog."""
    keep(learn(config_of(model_type)), os.path.join(SHIPPED, f"{model_type}.json"))


def compared(model_type: str) -> list[Agreement]:
    """Every cell of one type; a form that is not close is taken out of the catalog."""
    path = os.path.join(SHIPPED, f"{model_type}.json")
    found = agreement(config_of(model_type), read_form(path), WHOLE)
    if any(abs(one.difference) > CLOSE for one in found):
        os.unlink(path)
    return found


def write(rows: list[tuple[str, Agreement]]) -> None:
    """One line a cell."""
    with RESULT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model_type", "cell", "learned_bytes", "traced_bytes", "refused"])
        for kind, one in rows:
            writer.writerow([kind, one.name, one.learned, one.traced, one.refused[:120]])


def main() -> None:
    """Prints every cell, and how many types of the installed transformers are answered."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[tuple[str, Agreement]] = []
    for kind in options.types or shipped_types():
        if options.learn:
            relearn(kind)
        for one in compared(kind):
            rows.append((kind, one))
            print(f"{kind:20} {one.name:42} {one.refused or f'{one.difference:+.4%}'}", flush=True)
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    by_hand, learned = causal & set(FAMILIES), causal & set(shipped_types()) - set(FAMILIES)
    print(f"{len(causal)} causal types: {len(by_hand)} by a family, {len(learned)} learned")
    if options.write:
        write(rows)


if __name__ == "__main__":
    main()
