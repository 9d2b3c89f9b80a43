"""The learned forms that ship, against traced steps of the classes that they were learned from.

    python benchmarks/accuracy/learned_agreement.py [TYPE ...] [--learn] [--write]

Every shipped type by default. `--learn` learns the named types first, each under every task that
transformers has a class for, and puts into the catalog the forms that are at most 0.1% off in every
cell. `--write` writes benchmarks/results/cpu/learned_agreement.csv: the rows of the named types
anew, others as they are. Each form at the sizes of the catalog's first model of its type (else its
class's defaults), with as few layers as show every kind, and at sizes that no recording saw.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from napkinmath.catalog.learned_forms import SHIPPED, read_forms, shipped_types
from napkinmath.catalog.models import load_rows
from napkinmath.models.tasks import ANSWERS, CAUSAL, MASKED, SEQUENCE, TOKENS
from napkinmath_profiler.tracing.learning.checking import QUICK, WHOLE, Agreement, agreement
from napkinmath_profiler.tracing.learning.learner import learn
from napkinmath_profiler.tracing.learning.writing import keep
from transformers.models.auto import modeling_auto as auto

RESULT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "learned_agreement.csv"
HEADER = ["model_type", "task", "cell", "learned_bytes", "traced_bytes", "refused"]
CLOSE = 0.001
MAPPINGS: dict[str, Mapping[str, Any]] = {
    CAUSAL: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MASKED: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    SEQUENCE: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    TOKENS: auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ANSWERS: auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}


def config_of(model_type: str) -> dict[str, Any]:
    """The catalog's first config of a type, else what its class fills in."""
    rows = (row["config"] for row in load_rows() if row["config"]["model_type"] == model_type)
    return dict(next(rows, {"model_type": model_type}))


def under(model_type: str, task: str) -> dict[str, Any]:
    """The config of a type with the class of a task, which transformers' mapping names."""
    names = MAPPINGS[task][model_type]
    return {
        **config_of(model_type),
        "architectures": [names if isinstance(names, str) else names[0]],
    }


def tasks_of(model_type: str) -> list[str]:
    """The tasks that a type is learned under. The heads of labels need no form of their own where
    a causal one has the layers."""
    tasks = [task for task, mapping in MAPPINGS.items() if model_type in mapping]
    decoder = CAUSAL in tasks and MASKED not in tasks
    return [CAUSAL] if decoder else [task for task in tasks if task != CAUSAL]


def learned(model_type: str) -> Iterator[tuple[str, Agreement | str]]:
    """Learns a type into the catalog; yields each task with its cells, or with why it has no
    form."""
    kept: list[Any] = []
    for task in tasks_of(model_type):
        try:
            document = learn(under(model_type, task))
            with tempfile.TemporaryDirectory() as folder:
                (form,) = read_forms(keep([document], os.path.join(folder, "form.json")))
            cells = list(_cells(model_type, form))
        except Exception as error:  # whatever a class or the learner raises
            yield (
                task,
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
            continue
        far = [one for under_, one in cells if under_ == task and abs(one.difference) > CLOSE]
        off = {under_ for under_, one in cells if abs(one.difference) > CLOSE}
        document["classes"] = [name for name in document["classes"] if name not in off]
        yield from cells
        if not far and any(one.traced for under_, one in cells if under_ == task):
            kept.append(document)
    if kept:
        keep(kept, os.path.join(SHIPPED, f"{model_type}.json"))


def _cells(model_type: str, form: Mapping[str, Any]) -> Iterator[tuple[str, Agreement]]:
    """Every cell of a form, and a few of each head that goes over its layers."""
    task = form["task"]
    cells = (*QUICK, WHOLE[-1]) if task in (TOKENS, ANSWERS) else WHOLE
    yield from ((task, one) for one in agreement(under(model_type, task), form, cells))
    for other in form["classes"] if task == CAUSAL else ():
        yield from ((other, one) for one in agreement(under(model_type, other), form, QUICK))


def compared(model_type: str) -> Iterator[tuple[str, Agreement | str]]:
    """Every cell of a shipped type."""
    for form in read_forms(os.path.join(SHIPPED, f"{model_type}.json")):
        yield from _cells(model_type, form)


def write(rows: dict[str, list[list[object]]]) -> None:
    """One line a cell; types that were not compared keep theirs."""
    with RESULT.open(newline="", encoding="utf-8") as file:
        for row in list(csv.reader(file))[1:]:
            if row[0] not in rows and row[0] in shipped_types():
                rows.setdefault(f"{row[0]} as before", []).append(list(row))
    with RESULT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(sorted((row for found in rows.values() for row in found), key=str))


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
    logging.disable(logging.WARNING)
    rows: dict[str, list[list[object]]] = {}
    for kind in options.types or shipped_types():
        for task, one in (learned if options.learn else compared)(kind):
            if isinstance(one, str):
                print(f"{kind:20} {task:24} not learned: {one}", flush=True)
                continue
            said = one.refused or f"{one.difference:+.4%}"
            print(f"{kind:20} {task:24} {one.name:42} {said}", flush=True)
            cells = [one.name, one.learned, one.traced, one.refused[:120]]
            rows.setdefault(kind, []).append([kind, task, *cells])
        if options.write:
            write(dict(rows))


if __name__ == "__main__":
    main()
