"""read_model: a ModelSpec from a catalogued name, a config.json, its folder, or a mapping."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.models import find_row, unknown_model
from napkinmath.models.families import read_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec


def read_model(
    given: str | os.PathLike[str] | Mapping[str, object], *, name: str = ""
) -> ModelSpec:
    """The model of a catalogued name, a config file, a folder with one, or a config as a mapping.

    A name that is in the catalog wins over a folder of that name unless it is written as a path
    ("./gpt2"). Raises InputError for anything that cannot be read, with the nearest names.
    """
    if not isinstance(given, (str, os.PathLike)):
        if not hasattr(given, "keys"):
            raise InputError(
                f"model {shown(given)} is neither a name, a path nor a config's mapping; write e.g."
                " 'llama-7b'"
            )
        return read_config(given, name=name, source="a mapping")
    text = os.fspath(given)
    if "\0" in text:
        raise InputError(f"model {shown(text)} is not a name; remove its null character")
    row = None if _is_path(given, text) else find_row(text)
    if row is not None:
        return read_config(row["config"], name=name or row["name"], source=row["source"])
    from napkinmath.models import config_file

    path = config_file.find(text)
    if path is None:
        raise unknown_model(text)
    return read_config(
        config_file.read(path), name=name or config_file.model_name(path), source=path
    )


def read_teacher(config: TrainConfig) -> ModelSpec | None:
    """The model that teaches, or that scores rollouts; None where there is none.

    It is one of the catalog: a path is none, so that a configuration never opens a file. Raises
    InputError for other names.
    """
    name = config.workload.teacher
    if not name:
        return None
    if find_row(name) is None:
        raise InputError(f"--teacher {shown(name)} is not in the catalog; list: estimate models")
    return read_model(name.rpartition("/")[2])


def _is_path(given: object, text: str) -> bool:
    if not isinstance(given, str):
        return True
    return (
        text.startswith((".", "/", "~", "\\"))
        or text.endswith((".json", os.sep))
        or (os.sep in text and os.path.exists(text))
    )
