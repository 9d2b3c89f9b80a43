"""A progress bar over a budget of seconds, on standard error; silent where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from napkinmath_profiler.calibration.allowance import Allowance


@contextmanager
def progress(allowed: Allowance) -> Generator[Callable[[str], None]]:
    """Yields a function that takes the name of what is measured next; the bar shows how much of the budget is
    spent."""
    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=allowed.seconds)

        def advance(what: str) -> None:
            bar.update(
                task,
                completed=min(allowed.seconds, allowed.seconds - allowed.seconds_left),
                description=what,
            )

        yield advance
