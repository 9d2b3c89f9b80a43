"""How an Estimate shows itself in Python: as text, in a notebook, as a pandas frame, beside another.

The package's door hands these to `Estimate`, which stands lower and imports nothing of here.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.installing import pip_install
from napkinmath.base.record import Record
from napkinmath.base.units import GIB, format_bytes, format_seconds
from napkinmath.report import words
from napkinmath.report.components import components_of
from napkinmath.report.palette import COLORS
from napkinmath.report.plot import write_timeline
from napkinmath.report.screen import Screen
from napkinmath.report.table import SHORT
from napkinmath.report.timeline_svg import escape, timeline_svg

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.answers.estimate import Estimate

WIDTH = 88  # of the text, so that it fits a notebook's cell
BAR = 60  # characters of the bar
_SEEN = 0.004  # share of the bar from which a part is drawn


def text(e: Estimate) -> str:
    """The verdict, the bar on the GPU's scale and the step's curve, a few lines each."""
    screen = Screen(WIDTH, color=False, unicode=True)
    for write in SHORT:
        write(screen, e)
    return f"{screen.text()}{_bar_text(e)}\n"


def html(e: Estimate) -> str:
    """The same for a notebook, with the timeline as a picture."""
    parts = components_of(e)
    total = sum(part.nbytes for part in parts)
    limit = e.hardware.memory_bytes if e.hardware is not None else 0
    scale = max(total, limit) or 1
    pieces = "".join(
        f'<span title="{escape(part.label)}: {format_bytes(part.nbytes)}" style="display:block;'
        f'width:{100 * part.nbytes / scale:.2f}%;background:{COLORS[part.role]}"></span>'
        for part in parts
        if part.nbytes > _SEEN * scale
    )
    mark = f"border-right:3px solid #a4161a;width:{100 * limit / scale:.2f}%;" if limit else ""
    verdict = f"{e.verdict.value}{_margin(e)}"
    return (
        f"<div><b>{escape(words.model_name(e))}: {escape(verdict)}</b>"
        f"<br>{escape(', '.join(words.headline(e)))}"
        f'<div style="position:relative;height:1.6em;max-width:60em"><div style="display:flex;'
        f'height:100%">{pieces}</div><div style="position:absolute;inset:0 auto 0 0;{mark}"></div>'
        f"</div>{timeline_svg(e.timeline, e)}</div>"
    )


def _margin(e: Estimate) -> str:
    """' on the RTX 4090: 4.09 GiB to spare', where a GPU was named."""
    return f" on the {words.machine(e.hardware)}: {words.margin(e)[0]}" if e.hardware else ""


def _bar_text(e: Estimate) -> str:
    """The device's memory as a row of blocks, the GPU's limit as its end."""
    device = e.memory.device.value
    limit = e.hardware.memory_bytes if e.hardware is not None else 0
    scale = max(device, limit) or 1
    full = round(BAR * device / scale)
    row = "\u2588" * full + "\u2591" * (BAR - full)
    if limit:
        at = round(BAR * limit / scale)
        row = f"{row[:at]}|{row[at:]}"
    return f"  [{row}] {format_bytes(int(device))}"


def frame(e: Estimate) -> Any:
    """What is alive at the peak as a pandas DataFrame: component, role, nbytes, gib, origin."""
    rows = [(c.label, c.role.value, c.nbytes, c.nbytes / GIB, c.origin) for c in components_of(e)]
    return _pandas().DataFrame(rows, columns=["component", "role", "nbytes", "gib", "origin"])


def _pandas() -> Any:
    from importlib import import_module

    try:
        return import_module("pandas")
    except ImportError:
        raise InputError(f"to_pandas() needs pandas: {pip_install('plots')}") from None


class Drawing(Record):
    """A timeline as SVG, which a notebook shows; `save` writes it as .svg, .html or .png."""

    estimate: Estimate

    def _repr_svg_(self) -> str:
        return timeline_svg(self.estimate.timeline, self.estimate)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Writes the picture; raises InputError as `write_timeline` does."""
        write_timeline(self.estimate, path, force=force)


class EstimatePair(Record):
    """Two estimates side by side: the settings in which they differ, then the figures."""

    rows: tuple[tuple[str, str, str], ...]

    def __repr__(self) -> str:
        widths = [max(len(row[i]) for row in self.rows) for i in range(3)]
        lines = (
            f"{name.ljust(widths[0])}  {a.rjust(widths[1])}  {b.rjust(widths[2])}"
            for name, a, b in self.rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(a)}</td>"
            f"<td>{escape(b)}</td></tr>"
            for name, a, b in self.rows
        )
        return f"<table>{cells}</table>"

    def to_pandas(self) -> Any:
        """A DataFrame with the columns `first` and `second`."""
        names = [name for name, _, _ in self.rows]
        pairs = [(a, b) for _, a, b in self.rows]
        return _pandas().DataFrame(pairs, index=names, columns=["first", "second"])


def compared(first: Estimate, second: Estimate) -> EstimatePair:
    """What differs in the settings, and every figure of both."""
    both = [_settings(e) for e in (first, second)]
    names = [*both[0], *(name for name in both[1] if name not in both[0])]
    values = [(name, both[0].get(name, ""), both[1].get(name, "")) for name in names]
    # A record that only one of them has is told by its first field.
    alone = {name.partition(".")[0] for name, a, b in values if "None" in (a, b)}
    rows = [row for row in values if row[1] != row[2] and row[0] not in alone]
    rows = _one_of_each(rows, alone)
    figures = [_figures(e) for e in (first, second)]
    rows += [(name, figures[0][name], figures[1][name]) for name in figures[0]]
    return EstimatePair(rows=tuple(rows))


def _one_of_each(rows: list[tuple[str, str, str]], alone: set[str]) -> list[tuple[str, str, str]]:
    """The rows, with the first one only of each record that the other estimate lacks."""
    kept: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    for row in rows:
        record = row[0].partition(".")[0]
        if record not in alone or record not in seen:
            kept.append((record, row[1] or "none", row[2] or "none") if record in alone else row)
        seen.add(record)
    return kept


def _settings(e: Estimate) -> dict[str, str]:
    found = {"model": words.model_name(e)}
    if e.hardware is not None:
        found["gpu"] = words.machine(e.hardware)
    _flatten(dict(e.config.items()), "", found)
    return found


def _flatten(items: Mapping[str, object], path: str, found: dict[str, str]) -> None:
    for name, value in items.items():
        if isinstance(value, Record):
            _flatten(dict(value.items()), f"{path}{name}.", found)
        else:
            found[f"{path}{name}"] = str(getattr(value, "value", value))


def _figures(e: Estimate) -> dict[str, str]:
    time, whole = e.time, e.throughput
    found = {"verdict": e.verdict.value}
    for name in ("allocated", "reserved", "device"):
        found[name] = format_bytes(int(getattr(e.memory, name).value))
    if e.hardware is not None:
        found["headroom"] = words.margin(e)[0]
    found["a step"] = format_seconds(time.seconds) if time is not None else ""
    found["tokens/s"] = f"{whole.tokens_per_s:,.0f}" if whole is not None else ""
    found["MFU"] = f"{100 * time.mfu:.0f}%" if time is not None else ""
    return found
