"""What a word without a flag is: an existing path, then a model of the catalog or of a hub."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.models import find_row

JOB, MODEL = "job", "model"
_CONFIGS = (".yaml", ".yml", ".json", ".toml")


def kind(word: str) -> str:
    """JOB or MODEL; empty where a word is neither. Raises InputError where it is both."""
    is_path = os.path.exists(word) or word.endswith(_CONFIGS)
    if is_path and not _may_be_model(word):
        return JOB
    known = all(find_row(name) is not None for name in word.split(","))
    if known and is_path:
        raise InputError(
            f"{shown(word)} is a path here and a model of the catalog; write ./{word} for the path,"
            f" or --model {word}"
        )
    if known or _may_be_hub_id(word):
        return MODEL
    return JOB if is_path or "/" in word else ""


def _may_be_model(word: str) -> bool:
    """Whether the catalog may know a word: it names no file by how it begins or ends."""
    endings = (*_CONFIGS, ".sh", ".py", ".ipynb")
    return not word.startswith((".", "/", "~")) and not word.endswith(endings)


def _may_be_hub_id(word: str) -> bool:
    """Whether a word is written as OWNER/NAME of a hub, and no such folder or file is here."""
    owner, _, rest = word.partition("/")
    is_pair = bool(owner and rest) and "/" not in rest and _may_be_model(word)
    return is_pair and not os.path.exists(word) and not os.path.isdir(owner)
