"""A plan drawn: every candidate by memory and speed, those nothing beats in both joined by a line,
the best marked."""

from __future__ import annotations

from napkinmath.base.units import GIB
from napkinmath.base.whole_file import refuse_existing
from napkinmath.report.grid_plot import (
    FAINT,
    INK,
    load_matplotlib,
    new_figure,
    open_frame,
    save,
    subtitle,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from napkinmath.config.hardware import Hardware
    from napkinmath.planning.plan import Plan

_COLORS = {"full": "#3b6fb6", "lora": "#c8781e", "qlora": "#3f8f4f"}
_OTHER = "#a04a9c"


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both: less memory and more speed; from little memory to
    much."""
    found: list[tuple[float, float]] = []
    for memory, speed in sorted(points, key=lambda p: (p[0], -p[1])):
        if not found or speed > found[-1][1]:
            found.append((memory, speed))
    return found


def write_plan_plot(plan: Plan, path: str, *, force: bool = False) -> None:
    """Draws the first machine's candidates into a .png or .svg; raises InputError where matplotlib
    is missing or the file is there."""
    refuse_existing(path, force)
    figure, axes = new_figure(width=0.87)
    hardware = (plan.best[0].machine if plan.best else plan.space.machines[0]).hardware
    _draw_candidates(axes, plan, hardware)
    _draw_capacity(axes, hardware)
    _mark(axes, plan)
    name = plan.space.spec.name
    title: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": INK}
    figure.text(0.09, 0.94, f"{name}: speed against memory", parse_math=False, **title)
    subtitle(
        figure,
        f"{plan.num_candidates:,} candidates; each dot a batch of one combination, its requested"
        " bytes and the CUDA context",
    )
    axes.set_xlabel("GiB at the peak", color=FAINT)
    axes.set_ylabel("tokens/s", color=FAINT)
    axes.set_xlim(0, None)
    open_frame(axes)
    _legend(axes)
    save(figure, path)


def _draw_candidates(axes: Any, plan: Plan, hardware: Hardware) -> None:
    """A dot for each candidate, coloured by its method, and the line of those that nothing is
    faster than in less."""
    groups = _by_method(plan, hardware)
    for method, points in groups.items():
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            ".",
            markersize=5,
            alpha=0.5,
            color=_COLORS.get(method, _OTHER),
            label=method,
            markeredgewidth=0,
        )
    capacity = hardware.memory_bytes / GIB
    line = pareto([p for points in groups.values() for p in points if p[0] <= capacity])
    axes.step(
        [p[0] for p in line],
        [p[1] for p in line],
        where="post",
        color=INK,
        linewidth=1.2,
        label="nothing is faster in less",
    )


def _by_method(plan: Plan, hardware: Hardware) -> dict[str, list[tuple[float, float]]]:
    """(GiB with the context, tokens/s) of the candidates on a GPU, up to twice its memory."""
    context, limit = hardware.context_bytes / GIB, 2 * (hardware.memory_bytes / GIB)
    groups: dict[str, list[tuple[float, float]]] = {}
    for cloud in plan.clouds:
        if cloud.gpu == hardware.gpu.name:
            points = (
                (n / GIB + context, speed)
                for n, speed in zip(cloud.requested, cloud.tokens_per_s, strict=True)
                if speed
            )
            method = str(dict(cloud.options).get("method", "full"))
            groups.setdefault(method, []).extend(p for p in points if p[0] < limit)
    return groups


def _draw_capacity(axes: Any, hardware: Hardware) -> None:
    capacity = hardware.memory_bytes / GIB
    axes.axvline(capacity, color=FAINT, linewidth=1, linestyle=(0, (5, 4)))
    axes.annotate(
        f"{hardware.gpu.name}, {capacity:.1f} GiB",
        (capacity, 0.015),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        fontsize=8.5,
        color=FAINT,
    )


def _legend(axes: Any) -> None:
    """The methods, with dots that can be seen."""
    legend = axes.legend(
        frameon=True, framealpha=0.9, edgecolor="none", fontsize=8.5, loc="lower right"
    )
    for handle in legend.legend_handles:
        handle.set_alpha(1)
        handle.set_markersize(7)


def _mark(axes: Any, plan: Plan) -> None:
    """The best candidates, numbered as in the table."""
    halo = load_matplotlib("patheffects").withStroke(linewidth=2.5, foreground="white")
    machine = plan.best[0].machine if plan.best else None
    for number, candidate in enumerate(plan.best, 1):
        if candidate.machine is not machine:
            continue
        x = (candidate.estimate.peak.nbytes + candidate.machine.hardware.context_bytes) / GIB
        axes.plot(
            [x],
            [candidate.tokens_per_s],
            "o",
            markersize=6,
            markerfacecolor="white",
            markeredgecolor=INK,
            markeredgewidth=1.3,
        )
        axes.annotate(
            str(number),
            (x, candidate.tokens_per_s),
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            color=INK,
            path_effects=[halo],
        )
