"""The light install and the tests that need no torch, under other Pythons than the one of CI.

    python benchmarks/newcomers/pythons.py [--out FILE] [PYTHON ...]

Each interpreter (those of 3.10 and later that are found, where none is named) gets an environment
of its own with this checkout's light install, the libraries that the tests read with, and the quick
lane of the tests. Exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"python3.{minor}" for minor in range(10, 20)]
TESTING = ("pytest", "pytest-xdist", "hypothesis", "jsonschema", "rich", "pandas", "matplotlib")
VARIABLES = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


class Tested(NamedTuple):
    """How the tests went under one interpreter."""

    python: str
    """Its release."""
    tests: int
    skipped: int
    failed: list[str]
    exit_code: int
    """Of pytest."""


def tested(python: str, folder: Path) -> Tested:
    """Runs them in an environment below `folder`. Raises CalledProcessError where nothing can be
    installed."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    own, junit = folder / "environment", folder / "junit.xml"
    subprocess.run([python, "-m", "venv", str(own)], check=True)
    own_python = str(own / ("Scripts" if os.name == "nt" else "bin") / "python")
    install = [own_python, "-m", "pip", "install", "--quiet", str(ROOT), *TESTING]
    subprocess.run(install, check=True, env=environment)
    words = ["--lane", "quick", "-q", "-p", "no:cacheprovider", "--numprocesses", "auto"]
    command = [own_python, "-m", "pytest", *words, f"--junitxml={junit}"]
    run = subprocess.run(
        command, check=False, env=environment | {"NO_BROWSER": "1"}, cwd=ROOT, text=True
    )
    cases = list(ElementTree.parse(junit).iter("testcase"))
    release = subprocess.run(
        [own_python, "-c", "import platform; print(platform.python_version())"],
        check=True,
        capture_output=True,
        text=True,
    )
    return Tested(
        python=release.stdout.strip(),
        tests=len(cases),
        skipped=sum(case.find("skipped") is not None for case in cases),
        failed=[
            re.sub(r"\s+", " ", f"{case.get('classname')}.{case.get('name')}")
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ],
        exit_code=run.returncode,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    asked = parser.parse_args()
    pythons = asked.pythons or [found for name in NAMES if (found := shutil.which(name))]
    if not pythons:
        sys.exit("no Python of 3.10 or later is on PATH; name one")
    rows: list[Tested] = []
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(tested(python, Path(folder)))
        print(rows[-1])
    if asked.out:
        asked.out.write_text(
            json.dumps([row._asdict() for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    return int(any(row.exit_code for row in rows))


if __name__ == "__main__":
    sys.exit(main())
