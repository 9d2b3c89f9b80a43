"""The timeline as one HTML page that needs nothing else: zoom, hover, a legend that toggles; by
pointer and by keyboard.

The page carries the tensors, the distinct segments and their order, as the Timeline does, and
spells them out itself; scripts and styles are inlined from timeline_page.js and timeline_page.css,
and its content policy forbids fetching anything.
"""

from __future__ import annotations

import json
import os

from napkinmath.report import drawn
from napkinmath.report.palette import COLORS, STACK
from napkinmath.report.picture import Picture, beside, picture
from napkinmath.report.tensors import shape_text, tensor_axes, type_name
from napkinmath.report.timeline_svg import HEIGHT, WIDTH, escape, svg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.ledger import Role
    from napkinmath.ir.timeline import TensorInfo, Timeline, TimelineSegment
    from napkinmath.report.drawn import Shown

ACTIONS = {"+": 0, "-": 1, "=": 2, "!": 3}
STILL_COLUMNS = 600  # of the picture shown where scripts are off


def timeline_html(timeline: Timeline, estimate: Estimate | None = None, *, title: str = "") -> str:
    """The page of a timeline; `title` replaces the model's name."""
    still = picture(timeline, estimate, title=title, num_columns=STILL_COLUMNS)
    values = {
        "title": escape(still.title),
        "subtitle": escape(still.subtitle),
        "data": page_data(timeline, still),
        "style": _asset("timeline_page.css"),
        "script": _asset("timeline_page.js"),
        "still": svg(still),
        "summary": "; ".join(
            escape(row) for row, heading in beside(still, WIDTH + HEIGHT) if not heading
        ),
    }
    page = PAGE
    for name, value in values.items():
        page = page.replace("{{" + name + "}}", value)
    return page


def page_data(timeline: Timeline, still: Picture) -> str:
    """The page's data as JSON that cannot end its script element."""
    found = drawn.shown(timeline)
    data = {
        "lines": [
            {"label": line.label, "bytes": line.nbytes} for line in (*still.lines, *still.beyond)
        ],
        **compact(found),
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("{{", "{\\u007b")


def compact(found: Shown) -> dict[str, Any]:
    """Roles, tensors, distinct segments, their order, and what is alive before them; only what is
    drawn."""
    timeline = found.timeline
    used = _used(found)
    place = {tensor: number for number, tensor in enumerate(used)}
    roles = [role for role in STACK if any(timeline.tensors[t].role is role for t in used)]
    numbers: dict[int, int] = {}
    segments: list[dict[str, Any]] = []
    order: list[list[int]] = []
    for index in found.segments:
        segment = timeline.segments[index]
        number = numbers.get(id(segment))
        if number is None:
            number = numbers[id(segment)] = len(segments)
            segments.append(_segment(segment, place))
        order.append([number, segment.repeat])
    return {
        "roles": [{"name": role.value, "color": COLORS[role]} for role in roles],
        "tensors": [_tensor(timeline.tensors[t], roles) for t in used],
        "alive": [[place[t], n] for t, n in enumerate(found.counts) if n],
        "segments": segments,
        "order": order,
    }


def _used(found: Shown) -> list[int]:
    """Tensors that are alive before, or occur in, the segments drawn."""
    used = {t: None for t, n in enumerate(found.counts) if n}
    for segment in {
        id(s): s for s in (found.timeline.segments[i] for i in found.segments)
    }.values():
        for action, index in segment.events:
            if action in "+-":
                used[index] = None
            elif action == "=":
                used.update(dict.fromkeys(segment.pairs[index]))
    return list(used)


def _tensor(tensor: TensorInfo, roles: list[Role]) -> list[Any]:
    shape = shape_text(tensor) if tensor_axes(tensor) else ""
    name = tensor.name.removeprefix(
        f"{tensor.module}."
    )  # a traced parameter is named by its whole path
    return [
        name,
        roles.index(tensor.role),
        tensor.module,
        tensor.requested,
        shape,
        type_name(tensor),
        tensor.source,
    ]


def _segment(segment: TimelineSegment, place: dict[int, int]) -> dict[str, Any]:
    events: list[int] = []
    for action, index in segment.events:
        events += (ACTIONS[action], place[index] if action in "+-" else index)
    return {
        "name": segment.name,
        "phase": segment.phase.value,
        "copies": segment.repeat,
        "seconds": segment.seconds,
        "events": events,
        "pairs": [[place[old], place[new]] for old, new in segment.pairs],
        "kernels": [[k.name, k.module, k.seconds, k.bound] for k in segment.kernels],
    }


def _asset(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>{{title}}</title>
<style>{{style}}</style>
</head>
<body>
<header><h1>{{title}}</h1><p class="subtitle">{{subtitle}}</p></header>
<noscript><p>{{summary}}</p>{{still}}</noscript>
<main>
<section aria-label="plot">
<div class="tools">
<button type="button" id="peak">to the peak</button><button type="button" id="in">zoom in</button><button type="button" id="out">zoom out</button>
<button type="button" id="all">whole step</button><button type="button" id="axis">show events in order</button>
</div>
<div class="plot"><canvas id="plot" tabindex="0" role="img" aria-label="Memory over one step"></canvas><div id="tip" class="tip" aria-hidden="true"></div></div>
<p class="keys">Wheel or <kbd>+</kbd> <kbd>-</kbd> zooms, dragging moves, <kbd>0</kbd> shows all. <kbd>&larr;</kbd> <kbd>&rarr;</kbd> move the cursor (<kbd>Shift</kbd>: further),
<kbd>&uarr;</kbd> <kbd>&darr;</kbd> choose a band, <kbd>p</kbd> goes to the peak, <kbd>Home</kbd> and <kbd>End</kbd> to the ends.</p>
</section>
<aside aria-label="at the cursor">
<ul class="legend" id="legend"></ul>
<div class="total"><span>all shown</span><span class="number" id="sum"></span></div>
<h2>moment</h2>
<div aria-live="polite"><div id="moment"></div><div id="operation" class="faint"></div><div id="when" class="faint"></div></div>
<h2 id="heading">tensors at the cursor</h2>
<table><tbody id="tensors"></tbody></table>
<p class="faint" id="more"></p>
</aside>
</main>
<script type="application/json" id="timeline">{{data}}</script>
<script>{{script}}</script>
</body>
</html>
"""
