"""Texts that lie beside the package: in its metadata once installed, at the root of a checkout."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError


def licence_text(name: str) -> bytes:
    """LICENSE or NOTICE; InputError where the installation lost it."""
    from importlib.metadata import PackageNotFoundError, distribution

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    path = os.path.join(root, name)
    if os.path.exists(path) and os.path.exists(os.path.join(root, "pyproject.toml")):
        with open(path, "rb") as file:
            return file.read()
    try:
        found = distribution("napkinmath")
    except PackageNotFoundError:
        found = None
    text = found and (found.read_text(f"licenses/{name}") or found.read_text(name))
    if not text:
        raise InputError(
            f"{name} is missing from this installation, and the page has to carry it; install"
            " napkinmath again"
        )
    return text.encode()
