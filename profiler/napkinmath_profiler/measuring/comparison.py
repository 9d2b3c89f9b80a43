"""Two or three timelines of the same step side by side: by role, and by module, each ending with
what nobody explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from napkinmath.base.units import GIB, MIB
from napkinmath.ir.ledger import Role
from napkinmath.ir.timeline import Timeline
from napkinmath.report.palette import COLORS, STACK

UNEXPLAINED = "UNEXPLAINED"
MOST_MODULES = 24
WIDTH, ROW, LEFT = 900, 46, 110  # of the picture, of a timeline in it, of its name
# Wrappers, and parts that one side names and the other books on the module around them.
DROPPED_PARTS = frozenset(
    {"base_model", "model", "module", "transformer", "base_layer", "default", "lora", "act_fn", ""}
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requested bytes at each timeline's own peak: rows of one figure a timeline, summing to
    ``totals``."""

    names: tuple[str, ...]
    totals: tuple[int, ...]
    by_role: dict[str, tuple[int, ...]]
    by_module: dict[str, tuple[int, ...]]


def compare(timelines: Mapping[str, Timeline]) -> Comparison:
    """Compare timelines, the first being what the others are held against."""
    peaks = {name: timeline.peak() for name, timeline in timelines.items()}
    roles = [
        {
            role.value if role is not Role.UNEXPLAINED else UNEXPLAINED: size
            for role, size in t.breakdown(peaks[n]).items()
        }
        for n, t in timelines.items()
    ]
    modules = [_by_module(t, t.live_counts(peaks[n])) for n, t in timelines.items()]
    totals = tuple(peak.nbytes for peak in peaks.values())
    return Comparison(tuple(timelines), totals, _rows(roles), _rows(modules))


def _rows(tables: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    names = sorted(
        {name for table in tables for name in table},
        key=lambda n: (n == UNEXPLAINED, -max(t.get(n, 0) for t in tables)),
    )
    rows = {name: tuple(table.get(name, 0) for table in tables) for name in names}
    rows.setdefault(UNEXPLAINED, tuple(0 for _ in tables))
    return rows


def _by_module(timeline: Timeline, counts: Sequence[int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for tensor, count in zip(timeline.tensors, counts, strict=True):
        if count and tensor.requested:
            place = UNEXPLAINED if tensor.role is Role.UNEXPLAINED else module_group(tensor.module)
            totals[place] = totals.get(place, 0) + count * tensor.requested
    return totals


def module_group(path: str) -> str:
    """``base_model.model.model.layers.3.self_attn.q_proj.lora_A.default`` ->
    ``layers.*.self_attn.q_proj``; the rest is the root's."""
    parts = [part for part in path.split(".") if part not in DROPPED_PARTS]
    parts = [
        part
        for part in parts
        if not part.startswith(("lora_", "quant_state", "exp_avg", "momentum", "state", "step"))
    ]
    if parts and parts[-1] in ("weight", "bias", "absmax", "code", "offset"):
        parts.pop()
    return ".".join("*" if part.isdecimal() else part for part in parts) or "(root)"


def table(comparison: Comparison) -> str:
    """Both tables as text; differences are against the first column."""
    unit, name = (GIB, "GiB") if max(comparison.totals) >= GIB else (MIB, "MiB")
    blocks = [
        _block("by role", comparison.by_role, comparison, unit, name, len(comparison.by_role))
    ]
    blocks.append(_block("by module", comparison.by_module, comparison, unit, name, MOST_MODULES))
    return "\n\n".join(blocks)


def _block(
    title: str,
    rows: Mapping[str, tuple[int, ...]],
    comparison: Comparison,
    unit: int,
    unit_name: str,
    most: int,
) -> str:
    shown = dict(list(rows.items())[: most - 1]) if len(rows) > most else dict(rows)
    if len(rows) > len(shown):
        rest = [rows[name] for name in rows if name not in shown and name != UNEXPLAINED]
        none = (0,) * len(comparison.names)
        shown["(smaller)"] = tuple(sum(column) for column in zip(none, *rest, strict=True))
        shown[UNEXPLAINED] = rows[UNEXPLAINED]
    width = max(len(title) + len(unit_name) + 2, *(len(name) for name in shown))
    lines = [
        f"{f'{title}, {unit_name}':{width}}"
        + "".join(f"{name:>12}" for name in comparison.names)
        + f"{'difference':>24}"
    ]
    for name, values in [*shown.items(), ("at the peak", comparison.totals)]:
        figures = "".join(f"{value / unit:>12.3f}" for value in values)
        lines.append(f"{name:{width}}{figures}{_difference(values, unit):>24}")
    return "\n".join(lines)


def _difference(values: Sequence[int], unit: int) -> str:
    parts = []
    for value in values[1:]:
        change = value - values[0]
        share = f" ({change / values[0]:+.1%})" if values[0] else ""
        parts.append(f"{change / unit:+.3f}{share}" if change else "=")
    return "  ".join(parts)


def as_mapping(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "schema": 1,
        "names": list(comparison.names),
        "peak": dict(zip(comparison.names, comparison.totals, strict=True)),
        "by_role": {
            name: dict(zip(comparison.names, values, strict=True))
            for name, values in comparison.by_role.items()
        },
        "by_module": {
            name: dict(zip(comparison.names, values, strict=True))
            for name, values in comparison.by_module.items()
        },
    }


def picture(comparison: Comparison) -> str:
    """A bar a timeline, stacked by role, as SVG."""
    rows = len(comparison.names)
    height = 30 + ROW * rows + 22 * (1 + len(comparison.by_role) // 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="13">'
    ]
    for column in range(rows):
        parts += _bar(comparison, column)
    used = [_name(role) for role in STACK if any(comparison.by_role.get(_name(role), ()))]
    colors = {_name(role): color for role, color in COLORS.items()}
    for index, role in enumerate(used):
        x, y = 10 + 220 * (index % 4), 30 + ROW * rows + 22 * (index // 4)
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colors[role]}"/><text'
            f' x="{x + 18}" y="{y + 11}">{escape(role)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _bar(comparison: Comparison, column: int) -> list[str]:
    """One timeline: its name, a piece a role, its bytes."""
    y, x = 20 + ROW * column, float(LEFT)
    largest = max(comparison.totals) or 1
    parts = [f'<text x="0" y="{y + 18}">{escape(comparison.names[column])}</text>']
    for role in STACK:
        sizes = comparison.by_role.get(_name(role))
        size = sizes[column] if sizes else 0
        width = size / largest * (WIDTH - LEFT - 90)
        if width > 0:
            title = f"<title>{escape(_name(role))}: {size / GIB:.3f} GiB</title>"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="28"'
                f' fill="{COLORS[role]}">{title}</rect>'
            )
            x += width
    total = comparison.totals[column]
    return [*parts, f'<text x="{x + 6:.1f}" y="{y + 18}">{total / GIB:.2f} GiB</text>']


def _name(role: Role) -> str:
    return role.value if role is not Role.UNEXPLAINED else UNEXPLAINED
