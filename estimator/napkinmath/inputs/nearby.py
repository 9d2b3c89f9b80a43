"""Where a file lies that another one names."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError
from napkinmath.models.config_file import quoted

_ABOVE = 6


def nearby(name: str, beside: str) -> str:
    """The path of a file that the file `beside` names: from where the command runs, beside it, or
    in a folder above it, since the scripts of a repository are run from its root. The name itself
    where it is in none of them."""
    if name.startswith("$") and "/" in name and beside:
        # mostly the folder of the script that names it, or that of the repository
        name = name.rpartition(")/")[2] if name[1] == "(" else name.partition("/")[2]
    if os.path.exists(name) or os.path.isabs(name) or not beside:
        return name
    folder = os.path.dirname(os.path.abspath(beside))
    for _ in range(_ABOVE):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return os.path.relpath(path) if not os.path.isabs(beside) else path
        folder = os.path.dirname(folder)
    return name


def named_by(name: str, beside: str, notes: list[str]) -> str:
    """The path of a file that the script `beside` names; one by its place on the machine where it was
    written, '/home/me/project/configs/sft.yaml', by the longest end of it that lies near the script. Raises
    InputError where none does."""
    path = nearby(name, beside)
    if not beside or not os.path.isabs(name) or os.path.exists(path):
        return path
    parts = name.strip("/").split("/")
    for at in range(1, len(parts)):
        found = nearby("/".join(parts[at:]), beside)
        if os.path.isfile(found):
            notes.append(f"{quoted(name)} is not here: {quoted(found)} is read")
            return found
    raise InputError(
        f"{quoted(beside)} names {quoted(name)}, which is not here; put that file beside it, or give"
        " what it says with flags (`estimate --help`)"
    )
