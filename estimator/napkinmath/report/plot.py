"""write_timeline: a timeline as SVG, PNG or HTML by the file's suffix, whole or not at all."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown
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
    _refuse_existing(name, force)
    timeline, estimate = (
        (source, None) if isinstance(source, Timeline) else (source.timeline, source)
    )
    _write_whole(name, _drawing(suffix, timeline, estimate, title))


def _refuse_existing(name: str, force: bool) -> None:
    if os.path.isdir(name):
        raise InputError(f"timeline file {shown(name, limit=200)} is a folder; name a file in it")
    if os.path.exists(name) and not os.path.isfile(name):
        raise InputError(
            f"timeline file {shown(name, limit=200)} is not a regular file; name another"
        )
    if os.path.lexists(name) and not force:
        raise InputError(
            f"timeline file {shown(name, limit=200)} exists; add --force to replace it, or name"
            " another"
        )


def _drawing(suffix: str, timeline: Timeline, estimate: Estimate | None, title: str) -> bytes:
    if suffix == ".svg":
        return timeline_svg(timeline, estimate, title=title).encode()
    if suffix == ".html":
        return timeline_html(timeline, estimate, title=title).encode()
    return timeline_png(timeline, estimate, title=title)


def _write_whole(name: str, content: bytes) -> None:
    """Writes a temporary neighbour and renames it, so that `name` is either whole or untouched."""
    folder, base = os.path.split(os.path.abspath(name))
    temporary = os.path.join(folder, f".{base[:100]}.{os.getpid()}.part")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name)
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot write timeline file {shown(name, limit=200)}: {reason}; name a file in a"
            " folder that exists and can be written"
        ) from None
