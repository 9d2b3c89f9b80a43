"""`estimate sweep [flags]`: any flag takes several values or a range; a table, CSV, Parquet or a
plot of every combination."""

from __future__ import annotations

import json
import sys

from napkinmath.base import values
from napkinmath.base.errors import InputError, plain, shown
from napkinmath.cli.flag_rows import DEBUG, ON, REPEAT, TEXT
from napkinmath.cli.flags import RUN_FILES, SHARED, parsed
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from napkinmath.cli.flag_rows import Group, Row
    from napkinmath.planning.grid import Grid
    from napkinmath.report.formats import Form

_OUTPUT: tuple[Row, ...] = (
    (("--exact",), ON, "", "replay the allocator for every job [for 64 jobs or fewer]"),
    (("--out", "-o"), TEXT, "FILE", "write .csv, .jsonl or .parquet instead of a table"),
    (
        ("--plot",),
        TEXT,
        "FILE",
        "draw .svg or .png: verdicts over two numbers that vary, lines of one",
    ),
    (
        ("--price",),
        TEXT,
        "P",
        "money for one hour of one GPU: GPU-hours and money for a billion tokens",
    ),
    (("--show",), TEXT, "NAME", "what is drawn: memory, tokens/s [memory]"),
    (("--force",), ON, "", "replace a file that is there"),
    *form_rows(json="the rows as JSON"),
    DEBUG,
)
_DESCRIPTION = (
    "Price every combination of options with several values: --bs 1,2,4 or --ctx 1k..128k"
    " (doubling) or --rank 8..64:8 (by steps); lists that hold commas themselves are divided by"
    " ';'. Jobs that differ in batch, length and rank only are priced hundreds of thousands a"
    " second."
)
MOST_SHOWN = 60


def several_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The shared flags with every value repeatable."""
    return tuple((row[0], REPEAT, *row[2:]) if row[1] == TEXT else row for row in rows)


def several_flags(own: tuple[Row, ...], title: str = "output") -> tuple[Group, ...]:
    """The shared flags but the report's own, each taking several values, and a command's own."""
    return (
        *((name, several_rows(rows)) for name, rows in SHARED if name != "output"),
        RUN_FILES,
        (title, own),
    )


def run(argv: Sequence[str]) -> int:
    """Prices the grid and prints, writes or draws it; returns 0, or 2 where nothing could be
    priced."""
    parser = Parser(
        "estimate sweep",
        _DESCRIPTION,
        several_flags(_OUTPUT),
        positional=(
            "job",
            "MODEL|JOB...",
            "a model, or job files of one run, whose values the flags replace",
        ),
    )
    options = parsed(parser, argv)
    form = taken(options)
    own = {row[0][0].lstrip("-"): options.pop(row[0][0].lstrip("-"), None) for row in _OUTPUT}
    notes: list[str] = []
    from napkinmath.config.lengths import with_lengths
    from napkinmath.inputs.job_file import with_job_file
    from napkinmath.planning.grid import Grid

    price = None if own["price"] is None else values.price(own["price"], "--price")
    grid = Grid(
        with_lengths(with_job_file(options, notes)),
        notes,
        exact=own["exact"] is not None,
        price=price,
    )
    if own["plot"] is not None and form is None:
        from napkinmath.report.grid_plot import check_plot

        show = own["show"] or "memory"
        check_plot(grid, own["plot"], show=show, force=own["force"] is not None)
    if form is None:
        _write(grid, own)
    else:
        _give(grid, own, form)
    for note in [*dict.fromkeys(notes), *refusals(grid.refused)]:
        print(f"note: {plain(note)}", file=sys.stderr)
    return 0


def refusals(refused: dict[str, int]) -> list[str]:
    """What was left out, and why."""
    return [
        f"left out {count} combination{'s' if count > 1 else ''}: {reason}"
        for reason, count in refused.items()
    ]


def _give(grid: Grid, own: dict[str, Any], form: Form) -> None:
    """Prints the rows in a form."""
    from napkinmath.report.grid_table import grid_sheet

    for key in ("out", "plot"):
        if own[key] is not None:
            raise InputError(
                f"--{key} {shown(own[key])} writes a file, --{form.key} prints; give one of them"
            )
    rows = list(_first_refused(grid))
    objects = [dict(zip(grid.names, row, strict=True)) for row in rows]
    answer = Answer(
        sheets=lambda: [grid_sheet(grid, rows)], json=lambda: json.dumps(objects, indent=1)
    )
    print(form.text(answer))


def _write(grid: Grid, own: dict[str, Any]) -> None:
    from napkinmath.report.grid_files import write_grid
    from napkinmath.report.grid_table import print_grid

    if own["plot"] is None and own["out"] is None:
        rows = list(_first_refused(grid))
        print_grid(grid, rows if not sys.stdout.isatty() else rows[:MOST_SHOWN])
        if len(rows) > MOST_SHOWN and sys.stdout.isatty():
            print(f"... and {len(rows) - MOST_SHOWN:,} more; write them with --out FILE.csv")
        return
    rows: Iterable[tuple[Any, ...]] = (
        grid.rows() if own["plot"] is None else list(_first_refused(grid))
    )
    if own["out"] is not None:
        count = write_grid(grid, rows, own["out"], force=own["force"] is not None)
        print(f"{count:,} jobs written to {own['out']}")
    if own["plot"] is not None:
        from napkinmath.report.grid_plot import write_plot

        assert isinstance(rows, list)
        write_plot(
            grid, rows, own["plot"], show=own["show"] or "memory", force=own["force"] is not None
        )
        print(f"plot written to {own['plot']}")


def _first_refused(grid: Grid) -> list[tuple[Any, ...]]:
    """All rows; InputError where nothing but refusals came."""
    rows = list(grid.rows())
    if not rows and grid.refused:
        raise InputError(next(iter(grid.refused)))
    if not rows:
        raise InputError(f"nothing to price in {shown(grid.keys)}; give --model")
    return rows
