"""Published measurements re-estimated: every row of the tables priced, and how far off the
estimates are.

    python benchmarks/accuracy/published.py [--memory CSV] [--throughput CSV] [--json] [--all-gpus]
                                            [--blind] [--rows] [--csv FILE] [--plot FILE]
    python benchmarks/accuracy/published.py --several [--blind] [--rows] [--out FOLDER]

The tables' columns are described in benchmarks/data/README.md. Without `--several` a row on several
GPUs is out of scope: it is listed as skipped, and counts as not understood only with --all-gpus.
With it, those rows alone are priced, on one node and on many. Nothing is fitted to them. Exit code
0 whatever the figures are, 2 for a table that cannot be read.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from published.run import Results, run_tables
from published.several import report
from published.table import render

DATA = Path(__file__).resolve().parents[1] / "data"


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--memory",
        type=Path,
        default=None,
        help="table of memory measurements (default: the project's copy)",
    )
    parser.add_argument(
        "--throughput",
        type=Path,
        default=None,
        help="table of speed measurements (default: the project's copy)",
    )
    parser.add_argument(
        "--json", action="store_true", help="machine-readable rows, verdicts and skipped rows"
    )
    parser.add_argument("--all-gpus", action="store_true", help="count rows on several GPUs too")
    parser.add_argument(
        "--blind",
        action="store_true",
        help="read every row by the generic rules, as one of a source never looked into",
    )
    parser.add_argument("--rows", action="store_true", help="print every row's prediction")
    parser.add_argument(
        "--plot",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the predicted-against-measured plot",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        default=None,
        metavar="FILE",
        help="write every prediction beside its measurement",
    )
    parser.add_argument("--several", action="store_true", help="price the rows on several GPUs")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of --several, for its page")
    options = parser.parse_args(arguments)
    memory, throughput = options.memory, options.throughput
    if memory is None and throughput is None:
        memory, throughput = DATA / "memory.csv", DATA / "throughput.csv"
    try:
        if options.several:
            wanted = (memory or DATA / "memory.csv", throughput or DATA / "throughput.csv")
            print(report(*wanted, blind=options.blind, rows=options.rows, out=options.out))
            return 0
        results = run_tables(memory, throughput, all_gpus=options.all_gpus, blind=options.blind)
    except (OSError, UnicodeDecodeError) as error:
        print(f"published: cannot read the table: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps(results.as_json(), indent=1)
        if options.json
        else render(results, rows=options.rows)
    )
    if options.csv is not None:
        write_csv(results, options.csv)
    if options.plot is not None:
        from published.plot import plot

        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["Results", "main"]
