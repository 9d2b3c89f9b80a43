"""A drawing of rectangles, lines, dots and words: written as SVG, or as PNG through matplotlib (the
extra `plots`). Both come from the same shapes, in pixels from the upper left corner."""

from __future__ import annotations

import io
import os
from html import escape
from importlib import import_module

from napkinmath.base.errors import InputError, shown
from napkinmath.base.installing import pip_install
from napkinmath.base.whole_file import refuse_existing, write_whole
from napkinmath.report.words import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Point = tuple[float, float]

INK, FAINT, GRID_LINE, PAPER = "#1d2733", "#5c6873", "#dfe4e8", "#ffffff"
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif'
CHARACTER = 0.56  # width of an average character, as a share of the font's size
PNG_DPI = 150
_PIXELS_AN_INCH = 96
SUFFIXES = (".svg", ".png")


def check_file(path: str, *, force: bool) -> None:
    """Raises InputError where a drawing could not be written: an unknown suffix, a file that is
    there, a PNG without matplotlib. Asked before anything is computed."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise InputError(f"--plot {shown(path, limit=200)} has no known ending; use .svg or .png")
    refuse_existing(path, force)
    if suffix == ".png":
        _matplotlib("figure")


class Canvas:
    """Shapes in the order in which they are laid over one another."""

    def __init__(self, width: float, height: float, title: str, subtitle: str = "") -> None:
        self.width, self.height, self.title = width, height, printable(title)
        self.shapes: list[_Shape] = []
        self.rect(0, 0, width, height, PAPER)
        self.text(28, 34, title, size=18, bold=True)
        self.subtitle = printable(subtitle)
        if subtitle:
            self.text(28, 56, subtitle, color=FAINT)

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle by its upper left corner."""
        self.shapes.append(_Rect(x, y, width, height, fill))

    def line(
        self, points: Sequence[Point], color: str, *, width: float = 1.2, dash: str = ""
    ) -> None:
        """A line through points; `dash` has lengths drawn and left out: '6 4'."""
        self.shapes.append(_Line(points, color, width, dash))

    def dot(self, x: float, y: float, radius: float, fill: str, edge: str = "") -> None:
        """A disc, with an edge where a colour is named."""
        self.shapes.append(_Dot(x, y, radius, fill, edge))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        upright: bool = False,
        halo: bool = False,
    ) -> None:
        """Words whose base line begins, has its middle, or ends (`anchor`) at a point; `upright`
        reads from below, `halo` sets them off from what lies under them."""
        found = _Text(x, y, printable(words), size, color)
        found.anchor, found.bold, found.upright, found.halo = anchor, bold, upright, halo
        self.shapes.append(found)

    def svg(self) -> str:
        """The document."""
        w, h = _n(self.width), _n(self.height)
        body = "\n".join(shape.svg() for shape in self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}"'
            f' height="{h}" role="img" aria-labelledby="title desc" font-family="{escape(FONT)}">'
            f'<title id="title">{escape(self.title)}</title>'
            f'<desc id="desc">{escape(self.subtitle)}</desc>\n{body}</svg>\n'
        )

    def png(self) -> bytes:
        """The same through matplotlib; InputError names the extra where it is missing."""
        size = self.width / _PIXELS_AN_INCH, self.height / _PIXELS_AN_INCH
        figure = _matplotlib("figure").Figure(figsize=size, dpi=PNG_DPI)
        _matplotlib("backends.backend_agg").FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        for order, shape in enumerate(self.shapes):
            shape.draw(axes, order)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()

    def write(self, path: str, *, force: bool = False) -> None:
        """Writes .svg or .png, whole or not at all."""
        check_file(path, force=force)
        is_svg = os.path.splitext(path)[1].lower() == ".svg"
        write_whole(path, self.svg().encode() if is_svg else self.png(), force=True)


class _Shape:
    """Something drawn in either way; `order` is its place from the ground up."""

    def svg(self) -> str:
        raise NotImplementedError

    def draw(self, axes: Any, order: int) -> None:
        raise NotImplementedError


class _Rect(_Shape):
    def __init__(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.x, self.y, self.width, self.height, self.fill = x, y, width, height, fill

    def svg(self) -> str:
        x, y, w, h = (_n(value) for value in (self.x, self.y, self.width, self.height))
        return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{self.fill}"/>'

    def draw(self, axes: Any, order: int) -> None:
        made = _matplotlib("patches").Rectangle(
            (self.x, self.y), self.width, self.height, facecolor=self.fill, zorder=order
        )
        axes.add_patch(made)


class _Line(_Shape):
    def __init__(self, points: Sequence[Point], color: str, width: float, dash: str) -> None:
        self.points, self.color, self.width, self.dash = list(points), color, width, dash

    def svg(self) -> str:
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in self.points)
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{self.color}"'
            f' stroke-width="{_n(self.width)}"{dash}/>'
        )

    def draw(self, axes: Any, order: int) -> None:
        width = _points(self.width)
        lengths = tuple(float(length) for length in self.dash.split())
        axes.plot(
            [x for x, _ in self.points],
            [y for _, y in self.points],
            color=self.color,
            linewidth=width,
            linestyle=(0, lengths) if lengths else "-",
            zorder=order,
        )


class _Dot(_Shape):
    def __init__(self, x: float, y: float, radius: float, fill: str, edge: str) -> None:
        self.x, self.y, self.radius, self.fill, self.edge = x, y, radius, fill, edge

    def svg(self) -> str:
        edge = f' stroke="{self.edge}" stroke-width="1.5"' if self.edge else ""
        x, y, radius = _n(self.x), _n(self.y), _n(self.radius)
        return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{self.fill}"{edge}/>'

    def draw(self, axes: Any, order: int) -> None:
        axes.plot(
            [self.x],
            [self.y],
            "o",
            markersize=_points(2 * self.radius),
            markerfacecolor=self.fill,
            markeredgecolor=self.edge or "none",
            markeredgewidth=_points(1.5) if self.edge else 0,
            zorder=order,
        )


class _Text(_Shape):
    anchor = "start"
    bold = upright = halo = False

    def __init__(self, x: float, y: float, words: str, size: float, color: str) -> None:
        self.x, self.y, self.words, self.size, self.color = x, y, words, size, color

    def svg(self) -> str:
        x, y = _n(self.x), _n(self.y)
        said = f'x="{x}" y="{y}" font-size="{_n(self.size)}" fill="{self.color}"'
        said += f' text-anchor="{self.anchor}"' if self.anchor != "start" else ""
        said += ' font-weight="600"' if self.bold else ""
        said += f' transform="rotate(-90 {x} {y})"' if self.upright else ""
        if self.halo:
            said += f' paint-order="stroke" stroke="{PAPER}" stroke-width="3"'
        return f"<text {said}>{escape(self.words)}</text>"

    def draw(self, axes: Any, order: int) -> None:
        effects = _matplotlib("patheffects")
        axes.text(
            self.x,
            self.y,
            self.words,
            fontsize=_points(self.size),
            color=self.color,
            ha={"start": "left", "middle": "center", "end": "right"}[self.anchor],
            va="baseline",
            rotation=90 if self.upright else 0,
            rotation_mode="anchor",
            fontweight="bold" if self.bold else "normal",
            parse_math=False,
            path_effects=[effects.withStroke(linewidth=2.5, foreground=PAPER)] if self.halo else [],
            zorder=order,
        )


def _points(pixels: float) -> float:
    return pixels * 72 / _PIXELS_AN_INCH


def _n(value: float) -> str:
    """A coordinate without needless digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _matplotlib(module: str) -> Any:
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError:
        raise InputError(
            f"a PNG needs matplotlib: {pip_install('plots')}; .svg needs nothing more"
        ) from None
