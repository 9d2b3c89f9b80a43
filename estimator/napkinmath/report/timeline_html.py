"""The timeline as one HTML page that needs nothing else: zoom, hover, a legend that toggles; by
pointer and by keyboard.

Scripts and styles are inlined: timeline_view.js and timeline_view.css, which the page of
`estimate serve` shows too, and timeline_page.css. The content policy forbids fetching anything.
"""

from __future__ import annotations

import json
import os

from napkinmath.report.picture import beside, picture
from napkinmath.report.timeline_data import view_data
from napkinmath.report.timeline_svg import HEIGHT, WIDTH, escape, svg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import Timeline

STILL_COLUMNS = 600  # of the picture shown where scripts are off


def timeline_html(timeline: Timeline, estimate: Estimate | None = None, *, title: str = "") -> str:
    """The page of a timeline; `title` replaces the model's name."""
    still = picture(timeline, estimate, title=title, num_columns=STILL_COLUMNS)
    values = {
        "title": escape(still.title),
        "subtitle": escape(still.subtitle),
        "data": page_data(timeline, estimate),
        "style": _asset("timeline_page.css") + _asset("timeline_view.css"),
        "script": _asset("timeline_view.js"),
        "still": svg(still),
        "summary": "; ".join(
            escape(row) for row, heading in beside(still, WIDTH + HEIGHT) if not heading
        ),
    }
    page = PAGE
    for name, value in values.items():
        page = page.replace("{{" + name + "}}", value)
    return page


def page_data(timeline: Timeline, estimate: Estimate | None) -> str:
    """The page's data as JSON that cannot end its script element."""
    data = view_data(timeline, estimate)
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("{{", "{\\u007b")


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
<main id="view"></main>
<script type="application/json" id="timeline">{{data}}</script>
<script>{{script}}
timelineView(document.getElementById("view"), JSON.parse(document.getElementById("timeline").textContent), { hidden: new Set(), inOrder: false, rows: 14 });</script>
</body>
</html>
"""
