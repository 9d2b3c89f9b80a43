"""Heads of other tasks by the rules against the traced step, on the tiny configs of the families.

    python benchmarks/accuracy/tasks.py [FAMILY ...] [--task TASK ...] [--method METHOD ...] [--ctx N ...]

Prints the difference of the peak of every cell, and how many are above 0.1%. What is not priced,
and what a library refuses, is printed with its reason.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from agreement.tiny_configs import TINY
from agreement_matrix import compare
from analytic_vs_traced import Case
from napkinmath.base.errors import NapkinError
from napkinmath.models.tasks import CLASSES, ENDINGS, FEATURES

METHODS = ("full", "lora", "qlora")
LENGTHS = (17, 333, 1000)
LIMIT = 0.001
PADDING = 3  # a token that pads: without one transformers takes one sequence at a time


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, Case]]:
    """(family, task, case) of every cell that transformers has a class for."""
    for family in options.family or TINY:
        kind = TINY[family]["model_type"]
        for task in options.task:
            if kind not in CLASSES.get(task, {kind}):
                continue
            config = {"pad_token_id": PADDING, **TINY[family]}
            config["architectures"] = [f"Its{ENDINGS[task][0]}"]
            for method in options.method:
                for length in options.ctx:
                    yield (
                        family,
                        task,
                        Case(
                            config=config,
                            method=method,
                            attention="auto",
                            sequence=length,
                            optimizer="adamw-fused",
                        ),
                    )


def main() -> None:
    """Runs the cells that the arguments choose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("family", nargs="*", help="names of tiny configs [all]")
    parser.add_argument("--task", nargs="+", default=[*CLASSES, FEATURES])
    parser.add_argument("--method", nargs="+", default=list(METHODS))
    parser.add_argument("--ctx", nargs="+", type=int, default=list(LENGTHS))
    count = above = refused = 0
    for family, task, case in cases(parser.parse_args()):
        name = f"{family:20} {task:24} {case.method:6} {case.sequence:5}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                difference = compare(family, case).difference
        except NapkinError as reason:
            refused += 1
            print(f"{name} {reason}", flush=True)
            continue
        count += 1
        above += abs(difference) > LIMIT
        print(f"{name} {difference:+.4%}", flush=True)
    print(f"{count} cells, {above} above {LIMIT:.1%}, {refused} refused")


if __name__ == "__main__":
    main()
