"""What a plain pickle holds: how deep, under which keys, and the opcodes that it never has."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Containers within each other; a snapshot has seven. Code in C that recurses into more may crash
the interpreter."""
KEY_TYPES = frozenset({str, int, float, bool, type(None)})
"""Of a dict; a tuple as a key would be hashed by recursion."""

RUNS_CODE = {
    b"c"[0]: "GLOBAL",
    b"\x93"[0]: "STACK_GLOBAL",
    b"R"[0]: "REDUCE",
    b"b"[0]: "BUILD",
    b"i"[0]: "INST",
    b"o"[0]: "OBJ",
    b"\x81"[0]: "NEWOBJ",
    b"\x92"[0]: "NEWOBJ_EX",
    b"P"[0]: "PERSID",
    b"Q"[0]: "BINPERSID",
    b"\x82"[0]: "EXT1",
    b"\x83"[0]: "EXT2",
    b"\x84"[0]: "EXT4",
}


def require_shallow(value: Any) -> None:
    """Raises ValueError where ``value`` is nested deeper than MAX_DEPTH, without recursion."""
    seen: set[int] = set()
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            if type(container) not in (dict, list, tuple) or id(container) in seen:
                continue
            seen.add(id(container))
            inner.extend(container.values() if type(container) is dict else container)
        if not inner:
            return
        level = inner
    raise ValueError(f"values are nested deeper than {MAX_DEPTH}")
