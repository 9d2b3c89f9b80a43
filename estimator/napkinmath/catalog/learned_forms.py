"""Learned forms of architectures: the files that ship in `catalog/learned/`, and those that `estimate
learn` has kept on this machine.

A file holds the forms of one type, one a task. Repeated pieces stand once: `pieces` is a list in
which a text "@3" stands for the piece of that number, and `forms` are the wholes in the same
writing.
"""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SCHEMA = 3
SHIPPED = os.path.join(os.path.dirname(__file__), "learned")
_SUFFIX = ".json"


def own_folder() -> str:
    """Where this machine keeps what it has learned itself."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "napkinmath", "learned")


def shipped_types() -> list[str]:
    """Model types whose learned form ships, in alphabetical order."""
    if not os.path.isdir(SHIPPED):
        return []
    names = sorted(os.listdir(SHIPPED))
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


def is_known(model_type: object) -> bool:
    """Whether a learned form of this model type ships or was kept here."""
    return bool(_files(str(model_type)))


def forms_of(model_type: str) -> list[Mapping[str, Any]]:
    """The learned forms of a model type, those of this machine first; raises InputError for a file
    that cannot be read."""
    return [form for path in _files(model_type) for form in read_forms(path)]


def _files(model_type: str) -> list[str]:
    if not model_type or os.sep in model_type or model_type.startswith("."):
        return []
    own, found = own_folder(), list[str]()
    if os.path.isdir(own):
        names = sorted(os.listdir(own))
        found = [os.path.join(own, n) for n in names if _is_of(n, model_type)]
    shipped = os.path.join(SHIPPED, model_type + _SUFFIX)
    return [*found, *([shipped] if os.path.isfile(shipped) else [])]


def _is_of(name: str, model_type: str) -> bool:
    """Whether a file of this machine is of a type: 'type.digest.json'."""
    return name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX).rpartition(".")[0] == model_type


def read_forms(path: str) -> list[Mapping[str, Any]]:
    """One file, its pieces put in place; raises InputError for what is no learned form."""
    import json

    try:
        with open(path, encoding="utf-8") as file:
            written: Any = json.load(file)
        if written["schema"] != SCHEMA:
            raise InputError(
                f"learned form {shown(path)} has schema {written['schema']}, this version reads"
                f" {SCHEMA}; run `estimate learn` again"
            )
        pieces: list[Any] = []
        for piece in written["pieces"]:
            pieces.append(_put(piece, pieces))
        forms: list[Any] = _put(written["forms"], pieces)
        for number, form in enumerate(forms):
            form["digest"] = f"{path}:{number}"
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise InputError(
            f"learned form {shown(path)} cannot be read ({error}); remove it and run `estimate"
            " learn` again"
        ) from None
    return forms


def _put(node: Any, pieces: list[Any]) -> Any:
    if isinstance(node, str):
        return pieces[int(node[1:])] if node.startswith("@") else node
    if isinstance(node, list):
        return [_put(x, pieces) for x in node]  # type: ignore[reportUnknownVariableType]
    if isinstance(node, dict):
        return {k: _put(v, pieces) for k, v in node.items()}  # type: ignore[reportUnknownVariableType]
    return node
