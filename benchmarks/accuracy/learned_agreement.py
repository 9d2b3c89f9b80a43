"""The learned forms that ship, against traced steps of the classes that they were learned from.

    python benchmarks/accuracy/learned_agreement.py [TYPE ...] [--learn] [--task TASK] [--sample]
        [--write]

Every shipped type by default. `--sample` compares three cells of each type's first form alone.
`--learn` learns the named types first, each under every task that
transformers has a class for (or under `--task` alone, other forms stay), and puts into the catalog
the forms that are at most 0.1% off in every cell. `--write` writes
benchmarks/results/cpu/learned_agreement.csv: every cell of a compared type anew, of a sampled one
the compared cells alone; others as they are. Each form at the sizes of the catalog's first model
of its type (else its class's defaults), with as few layers as show every kind, and at sizes that
no recording saw.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from napkinmath.base.errors import InputError
from napkinmath.catalog.learned_forms import SHIPPED, read_forms, shipped_types
from napkinmath.catalog.models import load_rows
from napkinmath.models.tasks import (
    ANSWERS,
    CAUSAL,
    FEATURES,
    IMAGES,
    MASKED,
    SEQ2SEQ,
    SEQUENCE,
    SPECTROGRAMS,
    TOKENS,
    VIDEOS,
)
from napkinmath_profiler.tracing.learning.checking import (
    QUICK,
    WHOLE,
    Agreement,
    Cell,
    agreement,
)
from napkinmath_profiler.tracing.learning.document_fields import for_learning
from napkinmath_profiler.tracing.learning.learner import learn
from napkinmath_profiler.tracing.learning.writing import keep
from transformers.models.auto import modeling_auto as auto

RESULT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "learned_agreement.csv"
HEADER = ["model_type", "task", "cell", "learned_bytes", "traced_bytes", "refused"]
CLOSE = 0.001
REFUSED = {
    "quantized weights": "qlora",
    "eager attention": "eager",
    "autocast": "bf16-amp",
    "checkpointing": "checkpointed",
    "adapters": "lora",
}
"""What a form may refuse by name where it is not close there, and the word of such cells."""
SAMPLE = (Cell("full", False, 2, 128, "fp32"), Cell("qlora", False, 2, 1000))
SAMPLE_UNSEEN = (Cell("lora", True, 1, 77, "bf16-amp"),)
MAPPINGS: dict[str, Mapping[Any, Any]] = {
    CAUSAL: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    SEQ2SEQ: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MASKED: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    SEQUENCE: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    TOKENS: auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ANSWERS: auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    IMAGES: auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    VIDEOS: auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    SPECTROGRAMS: auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    FEATURES: auto.MODEL_MAPPING_NAMES,
}


def config_of(model_type: str) -> dict[str, Any]:
    """The catalog's first config of a type whose heads, halved, are still of a size that kernels
    take as it is (a multiple of 8), else its first, else what its class fills in."""
    rows = [row["config"] for row in load_rows() if row["config"]["model_type"] == model_type]
    halved = (one for one in rows if _head_size(one) % 16 == 0)
    return dict(next(halved, rows[0] if rows else {"model_type": model_type}))


def _head_size(config: Mapping[str, Any]) -> int:
    heads = config.get("num_attention_heads") or 1
    return 0 if isinstance(heads, list) else config.get("hidden_size", 0) // heads


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
    if SEQ2SEQ in tasks:  # whose other heads read both stacks, or one alone
        return [SEQ2SEQ]
    encodes = MASKED in tasks
    if CAUSAL in tasks and not encodes:
        return [CAUSAL]
    return [task for task in tasks if encodes or task != FEATURES]


def learned(model_type: str, tasks: Sequence[str]) -> Iterator[tuple[str, Agreement | str]]:
    """Learns a type into the catalog; yields each task with its cells, or with why it has no
    form."""
    path = os.path.join(SHIPPED, f"{model_type}.json")
    kept: list[Any] = []
    if os.path.exists(path):
        kept = [form for form in read_forms(path) if form["task"] not in tasks]
    for task in tasks:
        waiting: list[list[str]] = [[]]
        while waiting:
            equal = waiting.pop()
            try:
                document, cells = _learned_form(model_type, task, equal)
            except Exception as error:  # whatever a class or the learner raises
                said = str(error).splitlines()[0] if str(error) else ""
                yield task, f"{type(error).__name__}: {said}"
                continue
            yield from cells
            if any(one.traced for under_, one in cells if under_ == task):
                kept += _kept(document, task, cells)
            if not equal:
                waiting = document["unequal"]
    if kept:
        kept.sort(key=lambda form: list(MAPPINGS).index(form["task"]))
        keep([{k: v for k, v in form.items() if k != "digest"} for form in kept], path)


def _learned_form(
    model_type: str, task: str, equal: Sequence[str]
) -> tuple[dict[str, Any], list[tuple[str, Agreement]]]:
    document = {**learn(_with_equal(under(model_type, task), equal)), "equal": list(equal)}
    with tempfile.TemporaryDirectory() as folder:
        (form,) = read_forms(keep([document], os.path.join(folder, "form.json")))
    return document, list(_cells(model_type, form))


def _kept(
    document: dict[str, Any], task: str, cells: Sequence[tuple[str, Agreement]]
) -> list[dict[str, Any]]:
    """The form with what it refuses; nothing where it is far off in what every user does."""
    far = {one.name for under_, one in cells if under_ == task and abs(one.difference) > CLOSE}
    words = {k: v for k, v in REFUSED.items() if v != "eager" or not document["eager_only"]}
    document["refuses"] = refuses = _refusals(far, words)
    off = {under_ for under_, one in cells if abs(one.difference) > CLOSE}
    document["classes"] = [name for name in document["classes"] if name not in off]
    if task == CAUSAL and document["model_type"] in MAPPINGS[MASKED]:
        document["classes"] = []  # an encoder's other heads are no decoder's
    allowed = {REFUSED[what] for what in refuses}
    return [] if any(not allowed & set(name.split()) for name in far) else [document]


def _refusals(far: Collection[str], words: Mapping[str, str]) -> list[str]:
    """The fewest things to refuse so that no cell that is far off is left; all that is in one where
    nothing covers them."""
    named = [what for what, word in words.items() if any(word in name.split() for name in far)]
    for count in range(len(named) + 1):
        for chosen in itertools.combinations(named, count):
            covered = {words[what] for what in chosen}
            if all(covered & set(name.split()) for name in far):
                return list(chosen)
    return named


def _with_equal(config: dict[str, Any], equal: Sequence[str]) -> dict[str, Any]:
    """The config with one size as large as the other, where the class runs otherwise."""
    if not equal:
        return config
    one, other = equal
    return {**config, one: for_learning(config)[other]}


def sampled(model_type: str) -> Iterator[tuple[str, Agreement]]:
    """Three cells of the first form that has the type's config: each method,
    with and without checkpointing and autocast, one at sizes that no recording saw."""
    for form in read_forms(os.path.join(SHIPPED, f"{model_type}.json")):
        own = _with_equal(under(model_type, form["task"]), form["equal"])
        try:
            found = agreement(own, {**form, "refuses": []}, SAMPLE, SAMPLE_UNSEEN)
        except InputError:  # a form of other values of the same type's config
            continue
        said = "=".join(form["equal"])
        yield from ((form["task"], replace(x, name=f"{said} {x.name}".strip())) for x in found)
        return


def _cells(model_type: str, form: Mapping[str, Any]) -> Iterator[tuple[str, Agreement]]:
    """Every cell of a form, and a few of each head that goes over its layers."""
    task = form["task"]
    encoder = form["model_type"] in MAPPINGS[MASKED]
    few = task in (TOKENS, ANSWERS, FEATURES) or (encoder and task == CAUSAL)
    cells = (*QUICK, WHOLE[-1]) if few else WHOLE
    own, said = _with_equal(under(model_type, task), form["equal"]), "=".join(form["equal"])
    for one in agreement(own, form, cells):
        yield task, replace(one, name=f"{said} {one.name}".strip())
    for other in form["classes"] if task == CAUSAL and not encoder else ():
        yield from ((other, one) for one in agreement(under(model_type, other), form, QUICK))


def compared(model_type: str) -> Iterator[tuple[str, Agreement | str]]:
    """Every cell of a shipped type."""
    for form in read_forms(os.path.join(SHIPPED, f"{model_type}.json")):
        try:
            yield from _cells(model_type, {**form, "refuses": []})
        except InputError:  # a form of other values of the same type's config
            continue


def write(rows: Sequence[Sequence[object]], *, whole_forms: bool) -> None:
    """One line a cell of a form that ships; cells that were not compared keep theirs, unless the
    rows are all that there is of their forms."""
    with RESULT.open(newline="", encoding="utf-8") as file:
        before = list(csv.reader(file))[1:]
    forms = {tuple(row[:2]) for row in rows} if whole_forms else set()
    whole: dict[tuple[str, ...], Sequence[object]] = {
        tuple(row[:3]): row for row in before if tuple(row[:2]) not in forms
    }
    whole |= {tuple(map(str, row[:3])): row for row in rows}
    shipped = [row for key, row in whole.items() if _ships(*key)]
    with RESULT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(sorted(shipped, key=_by_type))


def _ships(model_type: str, task: str, cell: str) -> bool:
    """Whether the form that a cell compares is in the catalog: by its task, or a head over its
    layers, and by the two sizes that it was learned as equal ('one=other' before the cell)."""
    equal = cell.partition(" ")[0].split("=") if "=" in cell else []
    path = os.path.join(SHIPPED, f"{model_type}.json")
    forms = read_forms(path) if os.path.exists(path) else []
    return any(
        form["equal"] == equal
        and (task == form["task"] or (form["task"] == CAUSAL and task in form["classes"]))
        for form in forms
    )


def _by_type(row: Sequence[object]) -> tuple[str, str]:
    return str(row[0]), str(row[1])


def main() -> None:
    """Prints every cell, and how many types of the installed transformers are answered."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--task", choices=list(MAPPINGS))
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: list[list[object]] = []
    for kind in options.types or shipped_types():
        for task, one in _chosen(kind, options):
            if isinstance(one, str):
                print(f"{kind:20} {task:24} not learned: {one}", flush=True)
                continue
            said = one.refused or f"{one.difference:+.4%}"
            print(f"{kind:20} {task:24} {one.name:42} {said}", flush=True)
            cells = [one.name, one.learned, one.traced, one.refused[:120]]
            rows.append([kind, task, *cells])
        if options.write:
            write(rows, whole_forms=not options.sample)


def _chosen(kind: str, options: argparse.Namespace) -> Iterator[tuple[str, Agreement | str]]:
    if options.learn:
        return learned(kind, [options.task] if options.task else tasks_of(kind))
    return sampled(kind) if options.sample else compared(kind)


if __name__ == "__main__":
    main()
