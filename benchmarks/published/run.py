"""Runs the tables: understands and prices each row, and keeps what could not be."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from napkinmath.errors import InputError

from published.predict import Judgement, Outcome, Prediction
from published.rows import Row, Unreadable, read_rows
from published.understand import Job, understand


@dataclass(frozen=True)
class Skipped:
    """A row that could not be expressed, and why; `in_scope` rows count as not understood."""

    row_id: str
    source: str
    reason: str
    in_scope: bool


@dataclass
class Results:
    """Everything the report is made of."""

    predictions: list[Prediction] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    understood: list[tuple[str, str]] = field(default_factory=list)
    """(row id, source) of rows priced."""
    assumptions: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The document of `--json`."""
        return {
            "rows": [
                {"row_id": p.row_id, "quantity": p.quantity, "predicted": p.predicted, "measured": p.measured, "unit": p.unit, "low": p.low, "high": p.high} for p in self.predictions
            ],
            "verdicts": [{"row_id": j.row_id, "predicted": j.predicted, "actual": j.actual} for j in self.judgements],
            "skipped": [{"row_id": s.row_id, "reason": s.reason} for s in self.skipped],
        }  # fmt: skip


def run_tables(memory: Path | None, throughput: Path | None, *, all_gpus: bool = False) -> Results:
    """Prices every row of both tables; a run in both is priced once."""
    results = Results()
    outcomes: dict[tuple[object, ...], Outcome] = {}
    for path, wants_memory in ((memory, True), (throughput, False)):
        if path is not None:
            for row in _rows(path):
                _run(row, results, outcomes, wants_memory=wants_memory, all_gpus=all_gpus)
    return results


def _rows(path: Path) -> list[Row]:
    try:
        return read_rows(path)
    except csv.Error as error:
        raise OSError(f"{path}: {error}") from error


def _run(row: Row, results: Results, outcomes: dict[tuple[object, ...], Outcome], *, wants_memory: bool, all_gpus: bool) -> None:
    try:
        outcome = _outcome(row, outcomes)
        predictions = outcome.memory() if wants_memory else outcome.speed()
        judgement = outcome.judgement() if wants_memory else None
    except Unreadable as error:
        results.skipped.append(Skipped(row.row_id, row.source, str(error), in_scope=all_gpus or _single(row)))
        return
    except (InputError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        results.skipped.append(Skipped(row.row_id, row.source, f"could not be priced: {type(error).__name__}: {error}", in_scope=True))
        return
    results.understood.append((row.row_id, row.source))
    results.predictions += predictions
    if judgement is not None:
        results.judgements.append(judgement)
    for text in outcome.job.assumed:
        results.assumptions[text] = results.assumptions.get(text, 0) + 1


def _outcome(row: Row, outcomes: dict[tuple[object, ...], Outcome]) -> Outcome:
    job = understand(row)
    key = (job.spec.name, job.config, job.hardware.gpu.name, job.hardware.memory_bytes, job.era.name)
    found = outcomes.get(key)
    if found is None:
        found = outcomes[key] = Outcome(job)
        return found
    return found.for_job(job)


def _single(row: Row) -> bool:
    try:
        return row.whole("n_gpus", 1) == 1
    except Unreadable:
        return True


__all__ = ["Job", "Results", "Skipped", "run_tables"]
