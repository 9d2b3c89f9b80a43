"""A config.json on disk: found in a folder, refused before it is read if it cannot be one."""

from __future__ import annotations

import os
import stat

from napkinmath.base.errors import InputError, shown
from napkinmath.base.json_input import NotJson, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

MAX_FILE_BYTES = 8 << 20
"""The largest configs people publish (long label lists) stay below 1 MiB."""
LONGEST_PATH = 160


def find(text: str) -> str | None:
    """The config file a path means: itself, or config.json in that folder; None where nothing of
    that name exists."""
    if "\0" in text:
        raise InputError(f"path {quoted(text)} is not a path; remove its null character")
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return _in_folder(path, text)
    if os.path.lexists(path):
        return path
    if text.endswith(".json") or text.startswith((".", "/", "~")):
        raise InputError(
            f"config file {shown(text)} does not exist; check the path, or name a model of"
            " `estimate models`"
        )
    return _cached_by_hub(text)


def read(path: str) -> Mapping[str, Any]:
    """The JSON object in a config file; raises InputError for one that is too large, unreadable,
    broken or not an object."""
    return parse(read_text(path, what="config file"), path, what="config file")


def read_text(path: str, *, what: str) -> str:
    """A small text file's contents; anything else is refused unread."""
    shown_path = quoted(path)
    if "\0" in path:
        raise InputError(f"{what} {shown_path} is not a path; remove its null character")
    from napkinmath.base.opener import without_waiting

    try:
        with open(path, "rb", opener=without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{what} {shown_path} is not a regular file; give a file's path")
            if status.st_size > MAX_FILE_BYTES:
                raise InputError(
                    f"{what} {shown_path} has {status.st_size} bytes, more than the"
                    f" {MAX_FILE_BYTES} that are read; give a file of settings, such as the model's"
                    " config.json, not its weights or data"
                )
            return file.read(MAX_FILE_BYTES + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} {shown_path} is not text in UTF-8 (byte {error.start}); give a text file"
        ) from None
    except IsADirectoryError:
        raise InputError(f"{what} {shown_path} is a folder; give a file's path") from None
    except PermissionError:
        raise InputError(
            f"{what} {shown_path} cannot be read: permission denied; change its mode or copy it"
        ) from None
    except OSError as error:
        raise InputError(
            f"{what} {shown_path} cannot be read: {error.strerror or error}; check the path"
        ) from None


def parse(text: str, path: str, *, what: str) -> dict[str, Any]:
    """Text as a JSON object; raises InputError with the place of what is wrong."""
    shown_path = quoted(path)
    try:
        value = loads(text)
    except NotJson as error:
        raise InputError(f"{what} {shown_path} {error}") from None
    if not isinstance(value, dict):
        raise InputError(
            f"{what} {shown_path} holds {_kind(value)} at its top level, not an object; give a"
            " Hugging Face config.json"
        )
    return value  # pyright: ignore[reportUnknownVariableType]


def quoted(path: str) -> str:
    """A path as messages show it: its end distinguishes files, so a long one loses its
    front."""
    return (
        shown(path, limit=2 * LONGEST_PATH)
        if len(path) <= LONGEST_PATH
        else f"'...{shown(path[-LONGEST_PATH:], limit=2 * LONGEST_PATH)[1:]}"
    )


def model_name(path: str) -> str:
    """What a config file's model is called: its folder, or the file's name where it is not
    config.json."""
    folder, file = os.path.split(os.path.abspath(path))
    return os.path.basename(folder) or file if file == "config.json" else file.removesuffix(".json")


def _in_folder(path: str, text: str) -> str:
    file = os.path.join(path, "config.json")
    if os.path.lexists(file):
        return file
    if not os.access(path, os.R_OK | os.X_OK):
        raise InputError(
            f"folder {quoted(text)} cannot be read: permission denied; change its mode or give a"
            " config.json"
        )
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        raise InputError(
            f"folder {quoted(text)} holds an adapter, not a model; give its base model and --lora"
            " with the adapter's --rank"
        )
    raise InputError(
        f"folder {quoted(text)} has no config.json; give a model's folder, or a name of `estimate"
        " models`"
    )


def _cached_by_hub(text: str) -> str | None:
    """The newest config.json of a hub id that the hub's client has already downloaded; None if
    there is none."""
    if text.count("/") != 1:
        return None
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    snapshots = os.path.join(home, "models--" + text.replace("/", "--"), "snapshots")
    try:
        found = [
            os.path.join(snapshots, revision, "config.json") for revision in os.listdir(snapshots)
        ]
        found = [file for file in found if os.path.exists(file)]
        return max(found, key=os.path.getmtime) if found else None
    except (OSError, ValueError):
        return None


def _kind(value: object) -> str:
    return {
        "list": "a list",
        "str": "a string",
        "int": "a number",
        "float": "a number",
        "bool": "a boolean",
        "NoneType": "null",
    }.get(type(value).__name__, type(value).__name__)
