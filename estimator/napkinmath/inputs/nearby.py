"""Where a file lies that another one names."""

from __future__ import annotations

import os

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
