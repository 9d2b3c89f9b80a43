"""Drives a timeline page in headless Chromium: runs a script in it and returns the page's text
afterwards."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--virtual-time-budget=4000",
    "--window-size=1300,850",
)
LIMIT_S = 60


def page_after(page: Path, script: str) -> str:
    """The document as it stands after `script` ran at the end of the page."""
    driven = page.with_name(f"driven-{page.name}")
    driven.write_text(
        page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"),
        encoding="utf-8",
    )
    command = [
        str(BROWSER),
        *FLAGS,
        f"--user-data-dir={page.parent / 'profile'}",
        "--dump-dom",
        driven.as_uri(),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
