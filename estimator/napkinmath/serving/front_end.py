"""The files of the page: what a server and a static folder give alike. Scripts and styles are kept
apart and given as one file each."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.dirname(__file__))
PAGE = os.path.join(PACKAGE, "serving", "page")
_VIEW = os.path.join(PACKAGE, "report")  # of `--timeline step.html` too
SCRIPTS = (
    (_VIEW, "timeline_view.js"),
    *((PAGE, f"{name}.js") for name in ("words", "fields", "answer", "compare", "plan", "asking")),
)
STYLES = ((_VIEW, "timeline_view.css"), (PAGE, "page.css"))
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types by suffix."""


def front_end(*transport: str) -> dict[str, bytes]:
    """Every file of the page by its name; `transport` is the path, within the page's folder, of the
    script that asks: a server's unless named."""
    asks = read(PAGE, *(transport or ("transport.js",)))
    return {
        "index.html": read(PAGE, "index.html"),
        "icon.svg": read(PAGE, "icon.svg"),
        "page.css": b"".join(read(*path) for path in STYLES),
        "page.js": asks + b"".join(read(*path) for path in SCRIPTS),
    }


def read(*path: str) -> bytes:
    """A file's bytes."""
    with open(os.path.join(*path), "rb") as file:
        return file.read()
