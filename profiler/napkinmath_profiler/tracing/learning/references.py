"""Storages of an operation written by the tensor of it that they are as large as, so that the same
operation is the same text at every size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Any
"""[extents, type]; written, the name of a tensor alike ('o0', 'i1'), or ['o0', type]."""


def with_references(document: Mapping[str, Any]) -> dict[str, Any]:
    """A form whose rows of storages refer to their operation's tensors (LearnedReplay reads
    them)."""
    variants = {
        variant: {mode: _form(form) for mode, form in modes.items()}
        for variant, modes in document["variants"].items()
    }
    return {**document, "variants": variants}


def _form(form: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, piece in form.items():
        if isinstance(piece, list):
            made[name] = [_block(one) for one in piece]  # type: ignore[reportUnknownVariableType]
        else:
            made[name] = _block(piece) if piece and "ops" in piece else piece
    return made


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    rows: list[Row | None] = [None] * len(block["inputs"])
    ops: list[Any] = []
    for name, module, back, outs, facts, held in block["ops"]:
        if "branches" in facts:
            given = [_given(block, rows, n) for n in back]
            facts = _facts(facts, {f"o{i}": row[:2] for i, row in enumerate(outs)}, given)
        ops.append([name, module, back, outs, facts, held])
        rows += [row[:2] for row in outs]
    return {**block, "ops": ops}


def _given(block: Mapping[str, Any], rows: Sequence[Row | None], back: int) -> Row | None:
    """What an operation reads: a weight, or what one before it made; None for a block's input."""
    if back >= 0:
        return rows[len(rows) - back]
    _, _, dtype, _, axes = block["weights"][-1 - back]
    return [axes, dtype]


def _facts(
    facts: Mapping[str, Any], outs: Mapping[str, Row], given: Sequence[Row | None]
) -> dict[str, Any]:
    tensors = {**outs, **{f"i{i}": row for i, row in enumerate(given) if row is not None}}

    def referred(rows: Sequence[Row]) -> list[Row]:
        return [_reference(row, tensors) for row in rows]

    branches = {
        bits: [saves, outputs, referred(made), *rest[:-1], referred(rest[-1])]
        for bits, (saves, outputs, made, *rest) in facts["branches"].items()
    }
    return {**facts, "made": referred(facts["made"]), "branches": branches}


def _reference(row: Row, tensors: Mapping[str, Row]) -> Row:
    if isinstance(row, str) or isinstance(row[0], str):
        return row  # read from a form that has them
    alike = [name for name, other in tensors.items() if other[0] == row[0]]
    same = next((name for name in alike if tensors[name][1] == row[1]), None)
    return same or ([alike[0], row[1]] if alike else row)
