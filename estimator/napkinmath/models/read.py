"""read_model: a ModelSpec from a catalogued name, a config.json, its folder, or a mapping."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.models import find_row, unknown_model
from napkinmath.models.families import FAMILIES, is_learned, read_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec


def read_model(
    given: str | os.PathLike[str] | Mapping[str, object], *, name: str = "", task: str = ""
) -> ModelSpec:
    """The model of a catalogued name, a config file, a folder with one, or a config as a mapping.

    A name that is in the catalog wins over a folder of that name unless it is written as a path
    ("./gpt2"). `task` is its head, where `architectures` does not say it. Raises InputError for anything that cannot be read, with the nearest names.
    """
    if not isinstance(given, (str, os.PathLike)):
        if not hasattr(given, "keys"):
            raise InputError(
                f"model {shown(given)} is neither a name, a path nor a config's mapping; write e.g."
                " 'llama-7b'"
            )
        return read_config(given, name=name, source="a mapping", task=task)
    text = os.fspath(given)
    if "\0" in text:
        raise InputError(f"model {shown(text)} is not a name; remove its null character")
    path = _config_path(given, text)
    if path is None:
        row = find_row(text)
        if row is None:
            raise unknown_model(text)
        if text.lower().startswith("unsloth/") and row["config"]["model_type"] == "phi3":
            row = {**row, "config": _unfused(row["config"])}
        return _read_row(row, name, task)
    from napkinmath.models import config_file

    return read_config(
        config_file.read(path),
        name=name or config_file.model_name(path),
        source=path,
        task=task,
    )


def _config_path(given: object, text: str) -> str | None:
    """The config file that is meant; None for a name."""
    if not _is_path(given, text) and find_row(text) is not None:
        return None
    from napkinmath.models import config_file

    return config_file.find(text) if not _is_away(text) else None


def config_in(given: object) -> Mapping[str, object] | None:
    """The config in a file or folder that names a model; None for a catalogued name, and for what
    read_model refuses."""
    is_path = isinstance(given, os.PathLike)
    text = str(given) if is_path or isinstance(given, str) else ""  # pyright: ignore[reportUnknownArgumentType]
    if not text or "\0" in text:
        return None
    path = _config_path(None if is_path else text, text)
    if path is None:
        return None
    from napkinmath.models import config_file

    return config_file.read(path)


def _read_row(row: Mapping[str, Any], name: str, task: str) -> ModelSpec:
    """The model of a catalogued row; raises InputError with the way out where only a trace knows
    its architecture."""

    kind = row["config"]["model_type"]
    if kind not in FAMILIES and not is_learned(kind):
        raise InputError(
            f"model {shown(row['name'])} is catalogued ({row['parameters'] / 1e9:.2f}B parameters,"
            f" model_type {kind}), but its family has no rules yet; run `estimate trace --model"
            f" {row['name']}`"
        )
    return read_config(row["config"], name=name or row["name"], source=row["source"], task=task)


def _unfused(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """unsloth's copies of Phi 3, 3.5 and 4 have a linear for each projection and another class: its
    notebooks' logs say "Fast Llama patching" of Phi 3.5 mini and Phi 4, and the copies with a window
    are Mistral's. Those whose heads are rotated in part stay as they are."""
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        return config
    window = config.get("sliding_window")
    is_windowed = window is not None and window < config["max_position_embeddings"]
    kind, owner = ("mistral", "Mistral") if is_windowed else ("llama", "Llama")
    kept = {key: value for key, value in config.items() if is_windowed or key != "sliding_window"}
    kept.pop("rope_scaling", None)  # factors of angles, no bytes
    return {**kept, "model_type": kind, "architectures": [f"{owner}ForCausalLM"]}


def _is_away(text: str) -> bool:
    """Whether a path leads to a folder that another machine has, named like a catalogued model:
    a training file that was written there still says which model it is."""
    if text.startswith(".") or text.endswith(".json"):
        return False
    path = os.path.expanduser(text)
    return not os.path.lexists(path) and find_row(text) is not None


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
