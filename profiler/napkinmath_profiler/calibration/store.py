"""Calibration files on disk: written whole or not at all, measured layers of other models kept
beside the new ones."""

from __future__ import annotations

import json
import os
from typing import Any

from napkinmath.base.whole_file import refusals_named, write_whole
from napkinmath.calibration.calibration import STAMPED, WHAT
from napkinmath.models import config_file


def save(content: dict[str, Any], path: str) -> None:
    """Writes a calibration file, whole or not at all, in a folder that is made if it is not there.

    InputError where the disk is full or the folder cannot be written; what stood at ``path`` before
    is still there then.
    """
    with refusals_named(path, what=WHAT):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_whole(path, text, force=True, what=WHAT)


def merged_layers(content: dict[str, Any], path: str) -> dict[str, Any]:
    """``content`` with the layers of other models that a file at ``path`` holds, if it was measured
    in the same surroundings."""
    try:
        known = config_file.parse(config_file.read_text(path, what=WHAT), path, what=WHAT)
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
