"""Draws the two pictures of README.md: the timeline of its first command, and the page in headless
Chromium at its opening answer.

Usage: python docs/generate_readme_pictures.py [timeline|page]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "img"
COMMAND = re.compile(r"^estimate (?P<flags>.+) --timeline step\.svg$", re.MULTILINE)
WINDOW = "1280,1000"


def timeline() -> str:
    """The picture that the command in README.md writes; LookupError where it has none."""
    found = COMMAND.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if found is None:
        raise LookupError("README.md has no command `estimate ... --timeline step.svg`")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.svg"
        words = [*found["flags"].split(), "--timeline", str(file)]
        command = [sys.executable, "-m", "napkinmath", *words]
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT / "estimator")
        return file.read_text(encoding="utf-8")


def page(file: Path, window: str = WINDOW) -> None:
    """A screenshot of the served page; needs Chromium."""
    sys.path.insert(0, str(ROOT / "estimator"))
    from napkinmath.serving.server import Server

    server = Server(0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    try:
        with tempfile.TemporaryDirectory() as profile:
            command = [
                shutil.which("chromium") or "google-chrome",
                *flags,
                "--virtual-time-budget=15000",
                f"--window-size={window}",
                f"--user-data-dir={profile}",
                f"--screenshot={file}",
                server.url,
            ]
            subprocess.run(command, capture_output=True, check=True, timeout=120)
    finally:
        server.shutdown()
        server.server_close()


def main(arguments: list[str]) -> None:
    if "page" not in arguments:
        (IMAGES / "timeline.svg").write_text(timeline(), encoding="utf-8")
    if "timeline" not in arguments:
        page(IMAGES / "page.png")


if __name__ == "__main__":
    main(sys.argv[1:])
