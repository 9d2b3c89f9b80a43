"""Writes the report that docs/using.md shows from what the command above it prints; a test holds the
page to it.

Usage: python docs/generate_report.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "using.md"
SHOWN = re.compile(
    r"^`estimate (?P<flags>[^`]+)` prints:\n\n```text\n(?P<report>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
WIDTH = 100


def shown(page: str) -> re.Match[str]:
    """The command and its report as the page has them; LookupError where it has none."""
    found = SHOWN.search(page)
    if found is None:
        raise LookupError(
            "docs/using.md shows no report: expected a line '`estimate ...` prints:' and a fenced block"
            " of text below it"
        )
    return found


def printed(flags: str) -> str:
    """What the command prints on a terminal of WIDTH columns, without spaces at the ends of
    lines."""
    environment = {
        **os.environ,
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": str(ROOT / "estimator"),
    }
    command = [sys.executable, "-m", "napkinmath", *flags.split()]
    text = subprocess.run(
        command, capture_output=True, check=True, encoding="utf-8", env=environment
    ).stdout
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines()).lstrip("\n")


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = shown(page)
    PAGE.write_text(
        page[: found.start("report")] + printed(found["flags"]) + page[found.end("report") :],
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
