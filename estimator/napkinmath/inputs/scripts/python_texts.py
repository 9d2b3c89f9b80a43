"""What methods and functions of text give: parts, trimmed words, paths. Paths are text here."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LONGEST = 1 << 14
_METHODS: dict[str, Callable[[str, list[Any]], object]] = {
    "split": lambda text, given: text.split(*given[:1]),
    "strip": lambda text, given: text.strip(*given[:1]),
    "lstrip": lambda text, given: text.lstrip(*given[:1]),
    "rstrip": lambda text, given: text.rstrip(*given[:1]),
    "lower": lambda text, _: text.lower(),
    "upper": lambda text, _: text.upper(),
    "replace": lambda text, given: text.replace(given[0], given[1]),
    "removeprefix": lambda text, given: text.removeprefix(given[0]),
    "removesuffix": lambda text, given: text.removesuffix(given[0]),
    "startswith": lambda text, given: text.startswith(given[0]),
    "endswith": lambda text, given: text.endswith(given[0]),
    **dict.fromkeys(("as_posix", "resolve", "absolute", "expanduser"), lambda text, _: text),
}
_PATHS = ("Path", "pathlib.Path", "PurePath", "PosixPath")
_OF_PATHS = ("expanduser", "abspath", "normpath", "realpath", "expandvars")


def text_method(text: str, name: str, given: list[Any]) -> tuple[object] | None:
    """(what a method of text gives), or None where that is not known."""
    method = _METHODS.get(name)
    if method is None or not all(isinstance(one, str) for one in given):
        return None
    if len(text) > _LONGEST or sum(map(len, given)) > _LONGEST:
        return None
    try:
        found = method(text, given)
    except (IndexError, TypeError, ValueError):
        return None
    return (found,) if len(str(found)) <= _LONGEST else None


def path_call(name: str, given: list[Any]) -> tuple[str] | None:
    """(the path that `Path(...)`, `os.path.join(...)` and their like give), or None."""
    if not given or not all(isinstance(one, str) for one in given):
        return None
    last = name.rpartition(".")[2]
    of_path = name.startswith(("os.path.", "path.", "osp."))
    if name in _PATHS or (of_path and last == "join"):
        return (_joined(given),)
    return (str(given[0]),) if of_path and last in _OF_PATHS else None


def _joined(parts: list[str]) -> str:
    found = ""
    for part in parts:
        found = part if part.startswith("/") or not found else f"{found.rstrip('/')}/{part}"
    return found[:_LONGEST]
