"""Writes constraints.txt from pip's report of a fresh resolution: `make constraints` runs it."""

from __future__ import annotations

import json
import sys
from typing import Any

HEAD = """\
# Exact versions of what `make test` installs, with the sha256 of their wheels; `make constraints` makes
# this file again. The hashes are of {implementation} {python} on {system} {machine}, where CI runs; on any other
# Python or platform `make test` takes what the extras in pyproject.toml allow. torch is pinned in the
# Makefile, because its CPU build has another hash in every place that it comes from.
"""
LEFT_OUT = {"torch", "setuptools", "napkinmath"}


def line(package: dict[str, Any]) -> str:
    """One package, as pip's hash-checking mode reads it."""
    metadata, hashes = package["metadata"], package["download_info"]["archive_info"]["hashes"]
    return f"{metadata['name'].lower()}=={metadata['version']} --hash=sha256:{hashes['sha256']}"


def constraints(report: dict[str, Any]) -> str:
    """The file's text: its head and a line for each package, by name."""
    where = report["environment"]
    head = HEAD.format(
        implementation=where["platform_python_implementation"],
        python=where["python_version"],
        system=where["platform_system"],
        machine=where["platform_machine"],
    )
    packages = [
        each for each in report["install"] if each["metadata"]["name"].lower() not in LEFT_OUT
    ]
    return head + "\n".join(sorted(map(line, packages))) + "\n"


if __name__ == "__main__":
    print(constraints(json.load(sys.stdin)), end="")
