"""Forms of a batch of one row, written with the operations of more rows wherever these say the same
of one row: most of what is shared is then the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

SINGLE = "single "
"""Before a mode: its form for a batch of one row, where the library runs other operations."""
_HELD = 5
"""The place of what an operation holds longer, which differs where other operations are near."""


def with_rows_shared(document: Mapping[str, Any]) -> dict[str, Any]:
    """A form in which 'b' stands for the one row where the form of several rows has it."""
    variants = {
        variant: {
            mode: _shared(form, modes[mode.removeprefix(SINGLE)])
            if mode.startswith(SINGLE)
            else form
            for mode, form in modes.items()
        }
        for variant, modes in document["variants"].items()
    }
    return {**document, "variants": variants}


def _shared(single: Mapping[str, Any], several: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for block in _blocks(several):
        for op in block["ops"]:
            known.setdefault(_key(_of_one_row(op)), op)
    made: dict[str, Any] = {}
    for name, piece in single.items():
        if isinstance(piece, list):
            made[name] = [_block(one, known) for one in piece]  # type: ignore[reportUnknownVariableType]
        else:
            made[name] = _block(piece, known) if piece and "ops" in piece else piece
    return made


def _blocks(form: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for piece in form.values():
        if isinstance(piece, list):
            yield from piece
        elif piece and "ops" in piece:
            yield piece


def _block(block: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    ops = [[*known.get(_key(op), op)[:_HELD], op[_HELD]] for op in block["ops"]]
    return {**block, "ops": ops}


def _key(op: list[Any]) -> str:
    return json.dumps(op[:_HELD])


def _of_one_row(node: Any) -> Any:
    """A piece of a form whose sizes have a batch of one."""
    if isinstance(node, list):
        return [_of_one_row(item) for item in node]  # type: ignore[reportUnknownVariableType]
    if isinstance(node, dict):
        return {name: _of_one_row(item) for name, item in node.items()}  # type: ignore[reportUnknownVariableType]
    if not isinstance(node, str) or not re.search(r"\bb\b", node):
        return node
    text = re.sub(r"\bb\b", "1", re.sub(r"\bb\*|\*b\b", "", node))
    return int(text) if text.isdecimal() else text
