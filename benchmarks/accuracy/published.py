"""Published measurements re-estimated: every row of the tables priced, and how far off the
estimates are.

    python benchmarks/accuracy/published.py [--memory CSV] [--throughput CSV] [--blind | --informed]
                                            [--source PATTERN] [--rows] [--json] [--csv FILE] [--plot FILE]
                                            [--out FOLDER]

The tables' columns are described in benchmarks/data/README.md. Every row is read twice: informed,
with what is known of its source, and blind, by the generic rules alone, as one of a source never
looked into. `--informed` and `--blind` keep to one reading; `--json`, `--csv`, `--plot` and
`--rows` are of the first. Nothing is fitted to a row. `--out` keeps both readings as pages. Exit
code 0 whatever the figures are, 2 for a table that cannot be read.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from published.run import Results, run_tables
from published.table import render, summary

DATA = Path(__file__).resolve().parents[1] / "data"
INFORMED, BLIND = "informed", "blind"


def write_csv(results: Results, path: Path) -> None:
    """Every prediction as a line: row, source, quantity, unit, measured, predicted, low, high."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ("row_id", "source", "quantity", "unit", "measured", "predicted", "low", "high")
        )
        for p in results.predictions:
            figures = (
                f"{value:.4g}" if value < 1000 else f"{value:.1f}"
                for value in (p.measured, p.predicted, p.low, p.high)
            )
            table.writerow((p.row_id, p.source, p.quantity, p.unit, *figures))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for table in ("memory", "throughput"):
        made.add_argument(
            f"--{table}",
            type=Path,
            help=f"table of {table} measurements (default: the project's copy)",
        )
    one = made.add_mutually_exclusive_group()
    one.add_argument("--informed", action="store_true", help="the informed reading alone")
    one.add_argument("--blind", action="store_true", help="the blind reading alone")
    made.add_argument(
        "--source", metavar="PATTERN", default="", help="only rows whose source matches"
    )
    made.add_argument(
        "--json", action="store_true", help="machine-readable rows, verdicts and skipped rows"
    )
    made.add_argument("--rows", action="store_true", help="print every row's prediction")
    made.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the predicted-against-measured plot"
    )
    made.add_argument(
        "--csv", type=Path, metavar="FILE", help="write every prediction beside its measurement"
    )
    made.add_argument("--out", type=Path, metavar="FOLDER", help="keep every reading as a page")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    memory, throughput = options.memory, options.throughput
    if memory is None and throughput is None:
        memory, throughput = DATA / "memory.csv", DATA / "throughput.csv"
    alone = options.json or options.csv or options.plot
    readings = [BLIND] if options.blind else [INFORMED] if options.informed else [INFORMED, BLIND]
    readings = readings[:1] if alone else readings
    try:
        with ProcessPoolExecutor(len(readings)) as pool:
            asked = [
                pool.submit(
                    run_tables,
                    memory,
                    throughput,
                    blind=reading == BLIND,
                    source=options.source,
                )
                for reading in readings
            ]
            found = {name: each.result() for name, each in zip(readings, asked, strict=True)}
    except (OSError, UnicodeDecodeError) as error:
        print(f"published: cannot read the table: {error}", file=sys.stderr)
        return 2
    first = found[readings[0]]
    print(json.dumps(first.as_json(), indent=1) if options.json else _report(found, options.rows))
    if options.csv is not None:
        write_csv(first, options.csv)
    if options.plot is not None:
        from published.plot import plot

        plot(first, options.plot)
    if options.out is not None:
        keep(found, options.out)
    return 0


def _report(found: dict[str, Results], rows: bool) -> str:
    return "\n\n".join(
        (
            summary(found),
            *(f"# {name.title()}\n\n{render(each, rows=rows)}" for name, each in found.items()),
        )
    )


def keep(found: dict[str, Results], folder: Path) -> None:
    """Writes the summary, and a page and a table of predictions of each reading."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.md").write_text(summary(found) + "\n", encoding="utf-8")
    for name, results in found.items():
        page = f"# Published runs, {name}\n\n{render(results)}\n"
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
        write_csv(results, folder / f"{name}.csv")


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["Results", "main"]
