"""Published runs on several GPUs: how far off the estimates are, on one node and on many."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from published.machines import machine_of
from published.predict import Prediction
from published.rows import ALLOCATED, DEVICE, RESERVED, SPEED, Row, Unreadable, read_rows
from published.run import Results, run_rows
from published.statistics import average, by_source, percentile, verdicts

ONE_NODE = 8


def ranks_of_one_node(row: Row, *, blind: bool) -> bool:
    """Whether a run kept to one node: at most eight GPUs, unless its source says that they stood in
    several machines."""
    machine = machine_of(row, blind=blind)
    return gpus(row) <= ((machine.gpus_per_node if machine else 0) or ONE_NODE)


def gpus(row: Row) -> int:
    """GPUs of a row; 1 where the cell cannot be read."""
    try:
        return row.whole("n_gpus", 1)
    except Unreadable:
        return 1


def render(results: Results, near: set[str], *, rows: bool) -> str:
    """The tables, in Markdown; `near` are the ids of rows on one node."""
    parts = [understood(results)]
    for quantity in (ALLOCATED, RESERVED, DEVICE):
        parts.append(
            errors(
                f"Error of {quantity} memory",
                [p for p in results.predictions if p.quantity == quantity],
            )
        )
    speeds = [p for p in results.predictions if p.quantity == SPEED]
    parts.append(errors("Error of tokens/s, one node", [p for p in speeds if p.row_id in near]))
    parts.append(
        errors("Error of tokens/s, many nodes", [p for p in speeds if p.row_id not in near])
    )
    parts.append(judged(results))
    if rows:
        parts += [
            f"{p.row_id} {p.source} {p.quantity} {p.predicted:.4g} {p.measured:.4g} {p.error:+.1%}"
            for p in results.predictions
        ]
    return "\n\n".join(part for part in parts if part)


def understood(results: Results) -> str:
    """Rows priced, by source."""
    good = [source for _, source in results.understood]
    bad = [skipped.source for skipped in results.skipped]
    shares = {
        source: good.count(source) / (good + bad).count(source) for source in sorted({*good, *bad})
    }
    lines = [
        (source, str(good.count(source)), str(bad.count(source)), f"{share:.0%}")
        for source, share in shares.items()
    ]
    return table(
        "Rows understood",
        ("source", "priced", "not", "share"),
        [*lines, ("average over sources", "", "", f"{average(shares.values()):.0%}")],
    )


def errors(title: str, predictions: list[Prediction]) -> str:
    """Median, 90th percentile and signed median of the relative error, by source and averaged."""
    lines: list[tuple[str, ...]] = []
    figures: list[tuple[float, float]] = []
    for source, group in sorted(by_source(predictions).items()):
        sizes = [abs(p.error) for p in group]
        figures.append((median(sizes), percentile(sizes, 0.9)))
        lines.append(
            (
                source,
                str(len(group)),
                f"{figures[-1][0]:.1%}",
                f"{figures[-1][1]:.1%}",
                f"{median(p.error for p in group):+.1%}",
            )
        )
    if not lines:
        return ""
    sizes = [abs(p.error) for p in predictions]
    lines.append(
        (
            "all rows",
            str(len(sizes)),
            f"{median(sizes):.1%}",
            f"{percentile(sizes, 0.9):.1%}",
            f"{median(p.error for p in predictions):+.1%}",
        )
    )
    lines.append(
        (
            "average over sources",
            "",
            f"{average(f[0] for f in figures):.1%}",
            f"{average(f[1] for f in figures):.1%}",
            "",
        )
    )
    return table(title, ("source", "rows", "median", "90th percentile", "signed median"), lines)


def judged(results: Results) -> str:
    """Fit and out-of-memory verdicts."""
    counted = verdicts(results.judgements)
    cells = (
        str(counted.fits),
        str(counted.ooms),
        str(counted.false_fits),
        str(counted.false_ooms),
        f"{counted.balanced:.1%}",
    )
    return table(
        "Verdicts", ("fitted", "ran out", "false fits", "false OOMs", "balanced accuracy"), [cells]
    )


def table(title: str, heads: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table under its title."""
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"### {title}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n{body}"


def report(memory: Path, throughput: Path, *, blind: bool, rows: bool, out: Path | None) -> str:
    """The tables of all rows on several GPUs; `out` is a folder that keeps them as a page."""
    tables = [(read_rows(memory), True), (read_rows(throughput), False)]
    several = [([row for row in found if gpus(row) > 1], wanted) for found, wanted in tables]
    near = {
        row.row_id for found, _ in several for row in found if ranks_of_one_node(row, blind=blind)
    }
    results = run_rows(several, all_gpus=True, blind=blind)
    if out is not None:
        name, how = ("parallel_blind", " --blind") if blind else ("parallel", "")
        head = (
            "# Published runs on several GPUs\n\n`python benchmarks/accuracy/published.py --several"
        )
        text = f"{head}{how}`\n\n{render(results, near, rows=False)}\n"
        (out / f"{name}.md").write_text(text)
    return render(results, near, rows=rows)
