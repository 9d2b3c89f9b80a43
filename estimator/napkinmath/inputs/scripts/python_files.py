"""Files of settings that a script reads: YAML, JSON and TOML by a path that its text says. No
other file is read, and none is downloaded: a folder stands for the repository it is filled from."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError
from napkinmath.inputs.nearby import nearby
from napkinmath.inputs.scripts.python_values import Made, fields_of, is_small, items_of, mapping_of
from napkinmath.models import config_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FORMS = (".yaml", ".yml", ".json", ".toml")
_OPENS = ("open", "Path", "pathlib.Path", "io.open", "codecs.open")
_LOADS = (
    *("yaml.safe_load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "json.load"),
    *("json.loads", "toml.load", "toml.loads", "tomllib.load", "tomllib.loads", "tomli.load"),
)
# Values by their names as attributes (omegaconf/omegaconf.py OmegaConf).
_OBJECTS = ("OmegaConf.load", "OmegaConf.create")
_NAMESPACES = ("argparse.Namespace", "Namespace", "SimpleNamespace", "types.SimpleNamespace")
_MAPPINGS = ("vars", "asdict", "dataclasses.asdict", "OmegaConf.to_container", "dict")
_READS = ("open", "read", "read_text", "resolve", "absolute", "expanduser")


class DataFiles:
    """What the calls of a script give that read its settings."""

    def __init__(self, path: str) -> None:
        self.script = path
        self.read: list[str] = []
        """Paths of the files that were read."""
        self._filled: dict[str, str] = {}
        """Folders that huggingface_hub's snapshot_download fills -> the repository."""

    def origin(self, model: Any) -> Any:
        """The repository that a model's folder is filled from, else the same."""
        return self._filled.get(os.path.normpath(model), model) if isinstance(model, str) else model

    def called(
        self, name: str, given: list[Any], named: dict[str, Any], line: int
    ) -> tuple[Any] | None:
        """(what a call gives), or None where it reads no settings."""
        first = given[0] if given else None
        if name.rpartition(".")[2] == "snapshot_download":
            source, folder = named.get("repo_id", first), named.get("local_dir")
            if not isinstance(source, str):
                return None
            if isinstance(folder, str):
                self._filled[os.path.normpath(folder)] = source
            return (source,)
        if name in _OPENS and isinstance(first, str) and first.lower().endswith(_FORMS):
            found = Made("file", first, line)
            return (found,)
        if name in _OPENS and isinstance(first, Made) and first.kind == "file":
            return (first,)
        if name in _LOADS and isinstance(first, Made) and first.kind == "file":
            return self._contents(first.name)
        if name in _OBJECTS and isinstance(first, str) and first.lower().endswith(_FORMS):
            made = self._contents(first)
            return None if made is None else (as_object(made[0], line),)
        if name in _OBJECTS and isinstance(first, (Made, dict)):
            return (as_object(first, line),)  # pyright: ignore[reportUnknownArgumentType]
        if name in _MAPPINGS and isinstance(first, Made) and len(given) == 1:
            return (fields_of(first),)
        if name in _NAMESPACES and not given:
            found = Made("object", "args", line)
            for key, one in named.items():
                found.set(key, one, line)
            return (found,)
        return None

    def method(self, owner: Made, name: str) -> tuple[Any] | None:
        """(what a method of an open file gives): the file again."""
        return (owner,) if owner.kind == "file" and name in _READS else None

    def _contents(self, name: str) -> tuple[Any] | None:
        """(what a file holds); None where it is not here, or is not of its form."""
        path = nearby(name, self.script) if os.path.isfile(self.script) else ""
        if not os.path.isfile(path):
            return None
        try:
            text = config_file.read_text(path, what="file")
            found = _parsed(text, path)
        except InputError:
            return None
        if not isinstance(found, dict) or not is_small(mapping_of(found)):
            return None
        self.read.append(path)
        return (mapping_of(found),)


def _parsed(text: str, path: str) -> object:
    if path.lower().endswith(".json"):
        return config_file.parse(text, path, what="file")
    if path.lower().endswith(".toml"):
        from napkinmath.inputs import toml_text

        return toml_text.load(text, path, what="file")
    from napkinmath.inputs import yaml_text

    return yaml_text.load(text, path, what="file")


def as_object(value: Any, line: int) -> Any:
    """Mappings as objects with attributes, through and through."""
    if isinstance(value, dict):
        found = Made("object", "config", line)
        for key, one in mapping_of(value).items():
            found.set(key, as_object(one, line), line)
        return found
    items = items_of(value)
    return value if items is None else [as_object(one, line) for one in items]
