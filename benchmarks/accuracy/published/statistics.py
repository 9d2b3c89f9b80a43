"""What the predictions are worth: errors by quantity, verdicts, coverage; plain and as the average
over sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from published.predict import Judgement, Prediction


@dataclass(frozen=True)
class Errors:
    """Relative errors of one quantity: how many, median and 90th percentile of their size, and of
    the signed median."""

    count: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True)
class Coverage:
    """Share of measurements inside the printed range, and the range's median width."""

    count: int
    inside: float
    width: float


@dataclass(frozen=True)
class Verdicts:
    """Fit/OOM verdicts: how many of each, how many right, and balanced accuracy (the mean of both
    shares)."""

    fits: int
    ooms: int
    false_fits: int
    false_ooms: int

    @property
    def balanced(self) -> float:
        """Mean of the shares of right verdicts among fits and among OOMs; with one kind only, its
        share."""
        shares = []
        if self.fits:
            shares.append(1 - self.false_ooms / self.fits)
        if self.ooms:
            shares.append(1 - self.false_fits / self.ooms)
        return sum(shares) / len(shares) if shares else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def errors(predictions: Iterable[Prediction]) -> Errors | None:
    """Errors of some predictions; None of none."""
    signed = [p.error for p in predictions]
    if not signed:
        return None
    sizes = [abs(e) for e in signed]
    return Errors(len(signed), median(sizes), percentile(sizes, 0.9), median(signed))


def coverage(predictions: Iterable[Prediction]) -> Coverage | None:
    """Coverage of some predictions; None of none."""
    found = list(predictions)
    if not found:
        return None
    return Coverage(
        len(found), sum(p.inside for p in found) / len(found), median(p.width for p in found)
    )


def verdicts(judgements: Iterable[Judgement]) -> Verdicts:
    """Counts of verdicts, right and wrong."""
    found = list(judgements)
    fits, ooms = [j for j in found if j.actual == "fit"], [j for j in found if j.actual == "OOM"]
    return Verdicts(
        len(fits),
        len(ooms),
        sum(j.predicted == "fit" for j in ooms),
        sum(j.predicted == "OOM" for j in fits),
    )


def by_source(items: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Predictions grouped by who measured them."""
    groups: dict[str, list[Prediction]] = {}
    for item in items:
        groups.setdefault(item.source, []).append(item)
    return groups


def average(values: Iterable[float]) -> float:
    """Mean; not a number of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else float("nan")
