"""Runs the tables: understands and prices each row, and keeps what could not be."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from napkinmath.base.errors import InputError

from published.predict import Judgement, Outcome, Prediction
from published.rows import Row, Unreadable, read_rows
from published.understand import Job, understand


@dataclass(frozen=True)
class Skipped:
    """A row that could not be expressed, and why."""

    row_id: str
    source: str
    reason: str


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
                {
                    "row_id": p.row_id,
                    "quantity": p.quantity,
                    "predicted": p.predicted,
                    "measured": p.measured,
                    "unit": p.unit,
                    "low": p.low,
                    "high": p.high,
                }
                for p in self.predictions
            ],
            "verdicts": [
                {"row_id": j.row_id, "predicted": j.predicted, "actual": j.actual}
                for j in self.judgements
            ],
            "skipped": [{"row_id": s.row_id, "reason": s.reason} for s in self.skipped],
        }


def run_tables(
    memory: Path | None, throughput: Path | None, *, blind: bool = False, source: str = ""
) -> Results:
    """Prices every row of both tables whose source matches `source`; a run in both is priced once.
    `blind` reads every row by the generic rules only."""
    run = _Run(blind)
    for path, wants_memory in ((memory, True), (throughput, False)):
        if path is not None:
            for row in _rows(path):
                if not re.search(source, row.source, re.IGNORECASE):
                    continue
                run.add(row, wants_memory=wants_memory)
    return run.results


def _rows(path: Path) -> list[Row]:
    try:
        return read_rows(path)
    except csv.Error as error:
        raise OSError(f"{path}: {error}") from error


class _Run:
    """The rows of both tables: equal runs are priced once, and what cannot be read or priced is
    kept with its reason."""

    def __init__(self, blind: bool) -> None:
        self.blind = blind
        self.results = Results()
        self._outcomes = Outcomes()

    def add(self, row: Row, *, wants_memory: bool) -> None:
        """Prices one row for its memory figures and verdict, or for its speed."""
        results = self.results
        try:
            job = understand(row, blind=self.blind, memory=wants_memory)
            outcome = self._outcomes.of(job)
            predictions = outcome.memory() if wants_memory else outcome.speed()
            judgement = outcome.judgement() if wants_memory else None
        except Unreadable as error:
            results.skipped.append(Skipped(row.row_id, row.source, str(error)))
            return
        except (
            Exception
        ) as error:  # one odd row must not lose the table: it is listed with what went wrong
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            reason = f"could not be priced: {kind}{error}"
            results.skipped.append(Skipped(row.row_id, row.source, reason))
            return
        results.understood.append((row.row_id, row.source))
        results.predictions += predictions
        if judgement is not None:
            results.judgements.append(judgement)
        for text in outcome.job.assumed.values():
            results.assumptions[text] = results.assumptions.get(text, 0) + 1


class Outcomes:
    """Jobs priced, equal ones once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Outcome] = {}

    def of(self, job: Job) -> Outcome:
        """The outcome of a job."""
        hardware = job.hardware
        key = (
            id(job.spec),
            job.config,
            hardware.gpu.name,
            hardware.memory_bytes,
            hardware.lazy_modules,
            job.spec.source,
            job.cluster,
            job.era.allocator,
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Outcome(job)
            return found
        return found.for_job(job)


__all__ = ["Job", "Outcomes", "Results", "Skipped", "run_tables"]
