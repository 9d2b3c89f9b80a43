"""write_timeline: a timeline as SVG, PNG or HTML by the file's suffix, whole or not at all."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown
from napkinmath.base.whole_file import refuse_existing, write_whole
from napkinmath.ir.timeline import Timeline
from napkinmath.report.timeline_html import timeline_html
from napkinmath.report.timeline_png import timeline_png
from napkinmath.report.timeline_svg import timeline_svg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate

SUFFIXES = (".svg", ".html", ".png")


def write_timeline(
    source: Estimate | Timeline,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    force: bool = False,
) -> None:
    """Draws memory over one step into `path` (.svg, .html or .png).

    `source` is an estimate, or any timeline: analytic, traced or measured. Raises InputError for an
    unknown suffix, an existing file without `force`, a file that cannot be written, and PNG without
    matplotlib; nothing half-written is left behind.
    """
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1].lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"timeline file {shown(name, limit=200)} has no known suffix; use .svg, .html or .png"
        )
    refuse_existing(name, force, what="timeline file")
    timeline, estimate = (
        (source, None) if isinstance(source, Timeline) else (source.timeline, source)
    )
    drawing = _drawing(suffix, timeline, estimate, title)
    write_whole(name, drawing, force=force, what="timeline file")


def _drawing(suffix: str, timeline: Timeline, estimate: Estimate | None, title: str) -> bytes:
    if suffix == ".svg":
        return timeline_svg(timeline, estimate, title=title).encode()
    if suffix == ".html":
        return timeline_html(timeline, estimate, title=title).encode()
    return timeline_png(timeline, estimate, title=title)
