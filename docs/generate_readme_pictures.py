"""Draws the pictures of README.md and docs/page.md: the timeline of the README's first command, and
the page in headless Chromium.

Usage: python docs/generate_readme_pictures.py [timeline|page]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "img"
COMMAND = re.compile(r"^estimate (?P<flags>.+) --timeline step\.svg$", re.MULTILINE)
SETTLED = (
    "document.getElementById('limits').textContent && !document.querySelector('.busy, .partly')"
)
WINDOW_OF_COMPARISON = (1280, 800)
COMPARED = (
    "#model=llama-3.1-8b&gpu=RTX+4090&method=qlora&bs=4&ctx=2048&rank=16&grad_accum=1&loss=chunked"
    "&vs=model%3Dllama-3.1-8b%26gpu%3DRTX%2B4090%26method%3Dlora%26bs%3D1%26ctx%3D2048%26rank%3D16"
    "%26grad_accum%3D4&price=0.35"
)
PHONE = "#model=qwen3-8b&gpu=RTX+4090&method=lora&bs=2&ctx=8192&rank=64&grad_accum=1"


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


def pages(folder: Path) -> None:
    """Screenshots of the served page in Chromium: its opening answer, and on a phone what does not
    fit beside what would."""
    sys.path[:0] = [str(ROOT / "estimator"), str(ROOT / "benchmarks" / "browsers")]
    from chromium import WIDTHS, chromium
    from napkinmath.serving.server import Server

    server = Server(0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium() as page:
            page.shape(*WIDTHS["desktop"])
            page.open(server.url)
            page.until(SETTLED)
            page.picture(folder / "page.png")
            page.shape(*WINDOW_OF_COMPARISON)
            page.open(server.url + "?2" + COMPARED)
            page.until(SETTLED)
            page.run("document.getElementById('compare-box').scrollIntoView()")
            page.picture(folder / "compare.png")
            page.run("document.getElementById('search').click()")
            page.until("document.querySelector('.card')")
            page.run("document.querySelector('#plan').previousElementSibling.scrollIntoView()")
            page.run("scrollBy(0, -170)")
            page.picture(folder / "cards.png")
            page.shape(*WIDTHS["phone"], touch=True, dark=True)
            page.open(server.url + "?3" + PHONE)
            page.until("document.querySelector('#remedy button')")
            page.run("document.getElementById('top').scrollIntoView()")
            page.picture(folder / "phone.png")
    finally:
        server.shutdown()
        server.server_close()


def main(arguments: list[str]) -> None:
    if "page" not in arguments:
        (IMAGES / "timeline.svg").write_text(timeline(), encoding="utf-8")
    if "timeline" not in arguments:
        pages(IMAGES)


if __name__ == "__main__":
    main(sys.argv[1:])
