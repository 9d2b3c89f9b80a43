"""Writes NOTICE from docs/data_sources.json: every bundled table with its source, its date or commit
and its licence; a test holds the file to it.

Usage: python docs/generate_notice.py
"""

from __future__ import annotations

import csv
import json
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "docs" / "data_sources.json"
NOTICE = ROOT / "NOTICE"
WIDTH = 100
# 'owner/repository' at the start of a source, before a path, a colon or the end.
REPOSITORY = re.compile(r"^([A-Za-z][\w-]*/[A-Za-z][\w.-]*)(?=[ :,;]|$)")
HEAD = """napkinmath

This product is licensed under the Apache License, Version 2.0 (the file LICENSE). It bundles tables
of figures from the sources below. "not recorded" is said where a commit or a licence was not noted.
"""


def manifest() -> dict[str, Any]:
    """The table of sources; KeyError later for what a row lacks."""
    return json.loads(MANIFEST.read_text(encoding="utf-8"))


def row_sources(path: Path, column: str) -> list[str]:
    """The source of every row of a CSV or JSON table."""
    if path.suffix == ".json":
        return [row[column] for row in json.loads(path.read_text(encoding="utf-8"))]
    with path.open(encoding="utf-8", newline="") as file:
        return [row[column] for row in csv.DictReader(file)]


def repository(source: str) -> str:
    """'owner/name' of a source that begins with one, '' of a paper, a library's file or a model's
    card."""
    found = REPOSITORY.match(source)
    return found[1] if found else ""


def origins_of(row: dict[str, Any]) -> list[str]:
    """The repositories that a bundled file was taken from."""
    if "by_row" not in row:
        return sorted(row["origins"])
    found = {repository(source) for source in row_sources(ROOT / row["path"], row["by_row"])}
    return sorted(found - {""}, key=str.lower)


def unrecorded(table: dict[str, Any]) -> list[str]:
    """Repositories that figures were taken from and whose licence nobody noted."""
    used = {name for row in table["files"] for name in origins_of(row)}
    return sorted(used - set(table["origins"]), key=str.lower)


def text() -> str:
    """The whole of NOTICE."""
    table = manifest()
    parts = [HEAD, "", "Files\n-----", ""]
    for row in table["files"]:
        parts.append(f"{row['path']}\n{_wrapped(row['holds'])}")
        parts.append(_wrapped(f"Taken: {row['taken']}.") + _wrapped(f"Licence: {row['licence']}."))
        if origins := origins_of(row):
            parts.append(_wrapped(f"From: {', '.join(origins)}."))
        parts.append("")
    parts += ["Repositories\n------------", ""]
    for name, origin in table["origins"].items():
        parts.append(f"{name}\n{_wrapped('Licence: ' + origin['licence'] + '.')}")
        parts.append(_wrapped(f"Read from: {origin['licence_read']}."))
        if "notice" in origin:
            parts.append(_wrapped(f'"{origin["notice"]}"'))
        parts.append("")
    unknown = unrecorded(table)
    parts += ["Repositories whose licence is not recorded\n" + 42 * "-", ""]
    parts.append(_wrapped(f"{', '.join(unknown)}."))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(part.rstrip("\n") for part in parts)) + "\n"


def _wrapped(line: str) -> str:
    indent = "  "
    return (
        textwrap.fill(
            line,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


if __name__ == "__main__":
    NOTICE.write_text(text(), encoding="utf-8")
