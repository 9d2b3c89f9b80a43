"""The report of a run as text: tables in Markdown, so that they can be pasted into the
documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from published.machines import MANY_NODES, ONE_GPU, ONE_NODE
from published.predict import Judgement, Prediction
from published.rows import ALLOCATED, DEVICE, RESERVED, SPEED
from published.run import Results
from published.statistics import Errors, average, by_source, coverage, errors, percentile, verdicts

QUANTITIES = (ALLOCATED, RESERVED, DEVICE, SPEED)
AVERAGE, ALL = "average over sources", "all rows"
_MEMORY_PLACES = (("one GPU", (ONE_GPU,)), ("several GPUs", (ONE_NODE, MANY_NODES)))
_SPEED_PLACES = tuple((place, (place,)) for place in (ONE_GPU, ONE_NODE, MANY_NODES))


def render(results: Results, *, rows: bool = False) -> str:
    """The whole report."""
    parts = [understood_table(results)]
    parts += [error_table(title, found) for title, found in grouped(results)]
    parts += [coverage_table(results), verdict_table(results), held_out_table(results)]
    if rows:
        parts.append(row_table(results.predictions))
    parts.append(skipped_list(results))
    return "\n\n".join(part for part in parts if part)


def grouped(results: Results) -> list[tuple[str, list[Prediction]]]:
    """Predictions by quantity and place, each group with its title; those that have any."""
    groups: list[tuple[str, list[Prediction]]] = []
    for quantity in QUANTITIES:
        for name, places in _SPEED_PLACES if quantity == SPEED else _MEMORY_PLACES:
            found = [p for p in results.predictions if p.quantity == quantity and p.place in places]
            if found:
                groups.append((f"{quantity.replace('_per_', '/')}, {name}", found))
    return groups


def summary(readings: dict[str, Results]) -> str:
    """The figures of several readings side by side, averages over sources: median and 90th
    percentile of the error's size, share of measurements inside the range, and verdicts."""
    cells: dict[str, dict[str, str]] = {}
    for reading, results in readings.items():
        shares = understood_shares(results).values()
        cells.setdefault("rows understood", {})[reading] = f"{average(shares):.0%}"
        for title, found in grouped(results):
            groups = by_source(found).values()
            sizes = [errors(group) for group in groups]
            inside = average(c.inside for group in groups if (c := coverage(group)) is not None)
            half, most = (
                _percent(average(getattr(e, name) for e in sizes if e is not None))
                for name in ("median", "p90")
            )
            cells.setdefault(title, {})[reading] = f"{half}, {most}; {inside:.0%} inside"
        counted = verdicts(results.judgements)
        cells.setdefault("fits or runs out of memory, balanced", {})[reading] = (
            f"{_percent(counted.balanced)}: {counted.false_fits} false fits and"
            f" {counted.false_ooms} false OOMs of {counted.fits + counted.ooms}"
        )
    lines = [(title, *(found.get(r, "") for r in readings)) for title, found in cells.items()]
    return _table("In short", ("figure", *readings), lines)


def understood_shares(results: Results) -> dict[str, float]:
    """Share of a source's rows that are priced."""
    good = Counter(source for _, source in results.understood)
    bad = Counter(skipped.source for skipped in results.skipped)
    return {source: good[source] / (good[source] + bad[source]) for source in sorted(good | bad)}


def understood_table(results: Results) -> str:
    """Rows understood, by source."""
    good = Counter(source for _, source in results.understood)
    bad = Counter(skipped.source for skipped in results.skipped)
    shares = understood_shares(results)
    lines = [
        (source, str(good[source]), str(bad[source]), _percent(share))
        for source, share in shares.items()
    ]
    rows = good.total() + bad.total()
    whole = _percent(good.total() / rows) if rows else "-"
    lines += [
        (ALL, str(good.total()), str(bad.total()), whole),
        (AVERAGE, "", "", _percent(average(shares.values()))),
    ]
    return _table("Rows understood", ("source", "understood", "not", "share"), lines)


def error_table(title: str, found: Sequence[Prediction]) -> str:
    """Errors of one quantity at one place, by source and overall."""
    lines: list[Sequence[str]] = []
    summaries: list[Errors] = []
    for source, group in sorted(by_source(found).items()):
        summary = errors(group)
        assert summary is not None
        summaries.append(summary)
        lines.append((source, *_cells(summary)))
    whole = errors(found)
    assert whole is not None
    lines.append((ALL, *_cells(whole)))
    lines.append(
        (
            AVERAGE,
            "",
            _percent(average(s.median for s in summaries)),
            _percent(average(s.p90 for s in summaries)),
            "",
        )
    )
    return _table(
        f"Error of {title}",
        ("source", "rows", "median", "90th percentile", "signed median"),
        lines,
    )


def coverage_table(results: Results) -> str:
    """Measurements inside the printed ranges, and the ranges' widths."""
    lines: list[Sequence[str]] = []
    for quantity in QUANTITIES:
        found = [p for p in results.predictions if p.quantity == quantity]
        groups = [c for group in by_source(found).values() if (c := coverage(group)) is not None]
        whole = coverage(found)
        if whole is not None:
            lines.append(
                (
                    quantity,
                    str(whole.count),
                    _percent(whole.inside),
                    _percent(whole.width),
                    _percent(average(c.inside for c in groups)),
                    _percent(average(c.width for c in groups)),
                )
            )
    groups = [
        c
        for group in by_source([p for p in results.predictions if p.quantity != SPEED]).values()
        if (c := coverage(group)) is not None
    ]
    if groups:
        lines.append(
            (
                "memory together",
                "",
                "",
                "",
                _percent(average(c.inside for c in groups)),
                _percent(average(c.width for c in groups)),
            )
        )
    return _table(
        "Measurements inside the printed range",
        (
            "quantity",
            "rows",
            "inside",
            "median width",
            "inside, average over sources",
            "median width, average over sources",
        ),
        lines,
    )


def verdict_table(results: Results) -> str:
    """Fit/OOM verdicts, beside the verdict that always says 'fits'."""
    lines: list[Sequence[str]] = []
    balanced: list[float] = []
    for source in sorted({j.source for j in results.judgements}):
        group = [j for j in results.judgements if j.source == source]
        counted = verdicts(group)
        if counted.fits and counted.ooms:
            balanced.append(counted.balanced)
        lines.append(
            (
                source,
                str(counted.fits),
                str(counted.ooms),
                str(counted.false_fits),
                str(counted.false_ooms),
                _percent(counted.balanced),
            )
        )
    whole = verdicts(results.judgements)
    always = verdicts([Judgement(j.row_id, j.source, "fit", j.actual) for j in results.judgements])
    lines.append(
        (
            ALL,
            str(whole.fits),
            str(whole.ooms),
            str(whole.false_fits),
            str(whole.false_ooms),
            _percent(whole.balanced),
        )
    )
    lines.append(("average over sources with both", "", "", "", "", _percent(average(balanced))))
    lines.append(
        (
            "always 'fits'",
            str(always.fits),
            str(always.ooms),
            str(always.false_fits),
            str(always.false_ooms),
            _percent(always.balanced),
        )
    )
    return _table(
        "Verdicts",
        ("source", "fitted", "ran out", "false fits", "false OOMs", "balanced accuracy"),
        lines,
    )


def held_out_table(results: Results) -> str:
    """Widths that the other sources alone would give, tried on each source: nothing else is fitted
    to the tables."""
    lines: list[Sequence[str]] = []
    for quantity in QUANTITIES:
        groups = by_source([p for p in results.predictions if p.quantity == quantity])
        if len(groups) < 2:
            continue
        shares: list[float] = []
        for source, group in sorted(groups.items()):
            others = [
                p
                for name, rest in groups.items()
                if name != source
                for p in _balanced(rest, groups)
            ]
            low, high = (
                percentile([p.measured / p.predicted for p in others], 0.05),
                percentile([p.measured / p.predicted for p in others], 0.95),
            )
            inside = sum(low <= p.measured / p.predicted <= high for p in group) / len(group)
            shares.append(inside)
            lines.append(
                (quantity, source, str(len(group)), f"{low:.3f} to {high:.3f}", _percent(inside))
            )
        lines.append((quantity, AVERAGE, "", "", _percent(average(shares))))
    return _table(
        "Ranges from the other sources (measured over predicted, 5th to 95th percentile)",
        ("quantity", "held-out source", "rows", "range", "inside"),
        lines,
    )


def row_table(predictions: Sequence[Prediction]) -> str:
    """Every prediction."""
    lines = [
        (
            p.row_id,
            p.source,
            p.quantity,
            f"{p.measured:,.2f}",
            f"{p.predicted:,.2f}",
            p.unit,
            f"{p.error:+.1%}",
            "" if p.inside else "outside",
        )
        for p in predictions
    ]
    return _table(
        "Rows",
        ("row", "source", "quantity", "measured", "predicted", "unit", "error", "range"),
        lines,
    )


def skipped_list(results: Results) -> str:
    """Rows that were not priced, with the reason, equal reasons together."""
    reasons: dict[str, list[str]] = {}
    for skipped in results.skipped:
        reasons.setdefault(skipped.reason, []).append(skipped.row_id)
    lines = [
        f"- {len(ids)} rows ({', '.join(ids[:6])}{', ...' if len(ids) > 6 else ''}): {reason}"
        for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join(["## Rows not priced", "", *lines]) if lines else ""


def _balanced(group: Sequence[Prediction], groups: dict[str, list[Prediction]]) -> list[Prediction]:
    """A source's rows repeated so that every source weighs about the same."""
    largest = max(len(g) for g in groups.values())
    return list(group) * max(1, round(largest / len(group)))


def _cells(summary: Errors) -> tuple[str, str, str, str]:
    return (
        str(summary.count),
        _percent(summary.median),
        _percent(summary.p90),
        f"{summary.bias:+.1%}",
    )


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"


def _table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *lines)) for i in range(len(header))]

    def align(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"## {title}", "", align(header), rule, *(align(row) for row in lines)])
