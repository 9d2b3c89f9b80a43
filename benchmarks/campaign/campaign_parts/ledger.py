"""Rows written as they are made, one JSON object a line, and read again by a run that goes on."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from napkinmath.base.whole_file import append_whole

Row = dict[str, Any]
MEMBER = b"\x1f\x8b\x08"  # how a gzip member begins: magic number, deflate
PIECE = 1 << 16


class Rows:
    """A JSONL file: ``add`` appends a row and makes sure that it is on the disk; a line cut off by
    a crash is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)

    def add(self, row: Row) -> Row:
        """Append ``row``."""
        with open(self.path, "ab") as file:
            append_whole(file, (json.dumps(row) + "\n").encode())
            os.fsync(file.fileno())
        self.rows.append(row)
        return row

    def names(self, *statuses: str) -> set[str]:
        """Cases that have a row, of one of the statuses if any are named."""
        return {
            row["case"]
            for row in self.rows
            if "case" in row and (not statuses or row.get("status") in statuses)
        }


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    found: list[Row] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                found.append(row)
    return found


def append_row(path: Path, row: Row) -> None:
    """Append ``row`` to a gzipped JSONL file, as a member of its own in one write, and make sure
    that it is on the disk."""
    with open(path, "ab") as file:
        append_whole(file, gzip.compress((json.dumps(row) + "\n").encode()))
        os.fsync(file.fileno())


def compressed_rows(path: Path) -> Iterator[Row]:
    """The rows of a gzipped JSONL file made of one or several members; a member that a crash cut
    off is left out, what follows it is not."""
    data = path.read_bytes() if path.exists() else b""
    at = data.find(MEMBER)
    while at >= 0:
        text, following = _member(data, at)
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut off
                continue
            if isinstance(row, dict):
                yield row
        at = data.find(MEMBER, following)


def _member(data: bytes, start: int) -> tuple[bytes, int]:
    """What a member that begins there holds, as far as it can be read, and where to look for the
    next one."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    pieces: list[bytes] = []
    for at in range(start, len(data), PIECE):
        try:
            pieces.append(reader.decompress(data[at : at + PIECE]))
        except zlib.error:
            return b"".join(pieces), start + len(MEMBER)
        if reader.eof:
            return b"".join(pieces), min(at + PIECE, len(data)) - len(reader.unused_data)
    return b"".join(pieces), len(data)


def _end_last_line(path: Path) -> None:
    """A line that was cut off gets its end, so that the next row is a line of its own."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
