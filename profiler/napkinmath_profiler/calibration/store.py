"""Calibration files on disk: written whole or not at all, measured layers of other models kept
beside the new ones."""

from __future__ import annotations

import errno
import glob
import json
import os
import tempfile
from typing import Any

from napkinmath.base.errors import InputError, shown
from napkinmath.calibration.calibration import STAMPED

PARTIAL = ".partial"


def save(content: dict[str, Any], path: str) -> None:
    """Write a calibration file: to a file beside it, to the disk, and then in its place, so that no
    reader ever sees half of one.

    InputError where the disk is full or the folder cannot be written; what stood at ``path`` before
    is still there then.
    """
    partial = ""
    try:
        handle, partial = _beside(path)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if partial and os.path.exists(partial):
            os.unlink(partial)
        raise InputError(
            f"calibration could not be written to {shown(path)}: {_reason(error)}; nothing that was"
            " there is lost"
        ) from error


def _beside(path: str) -> tuple[int, str]:
    """A new file in the same folder, which is made if it is not there: its handle and name."""
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    _sweep(folder, name)
    return tempfile.mkstemp(dir=folder, prefix=f"{name}.", suffix=PARTIAL)


def merged_layers(content: dict[str, Any], path: str) -> dict[str, Any]:
    """``content`` with the layers of other models that a file at ``path`` holds, if it was measured
    in the same surroundings."""
    try:
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        same = known["gpu"] == content["gpu"] and all(
            known["stamp"].get(key) == content["stamp"].get(key) for key in STAMPED
        )
        kept = [
            layers
            for layers in known.get("layers", [])
            if layers["key"] not in {new["key"] for new in content["layers"]}
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return content
    return {**content, "layers": [*content["layers"], *kept]} if same else content


def _sweep(folder: str, name: str) -> None:
    """Remove what a killed process left half-written."""
    for stale in glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(name)}.*{PARTIAL}")):
        os.unlink(stale)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full; free some space or name another place with --out"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "the folder cannot be written; name another place with --out"
    return str(error.strerror or error)
