"""`estimate models [WORD ...]`: the catalog of models, filtered by words of name, alias, family or
hub id."""

from __future__ import annotations

import json

from napkinmath.base.errors import InputError, shown
from napkinmath.cli.flag_rows import DEBUG
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, Sheet, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_PARSER = Parser(
    "estimate models",
    "List the catalog of models. Words filter by name, alias, family, model type or hub id.",
    (("output", (*form_rows(json="the rows of the catalog as JSON"), DEBUG)),),
    positional=("words", "WORD...", "e.g. qwen, moe, 7b"),
)


def run(argv: Sequence[str]) -> int:
    """Prints the rows that match; none is an error."""
    options = _PARSER.parse(argv)
    form = taken(options)
    from napkinmath.catalog.models import load_rows
    from napkinmath.report.listing import matches, print_rows, words_of

    words = words_of(options)
    rows = [
        row
        for row in load_rows()
        if matches(
            words,
            row["name"],
            *row["aliases"],
            row["family"],
            str(row["config"].get("model_type")),
            row["hub_id"] or "",
        )
    ]
    if not rows:
        raise InputError(
            f"no model of the catalog matches {shown(' '.join(words))}; use fewer words, or none"
            " for the whole list"
        )
    if form is None:
        sheet = _sheet(rows)
        print_rows(sheet.heads, sheet.rows, right=sheet.right)
    else:
        made = Answer(sheets=lambda: [_sheet(rows)], json=lambda: json.dumps(rows, indent=1))
        print(form.text(made))
    return 0


def _sheet(rows: list[dict[str, Any]]) -> Sheet:
    from napkinmath.base.units import format_count

    table = tuple(
        (
            row["name"],
            format_count(row["parameters"]),
            row["family"],
            _model_type(row),
            row["hub_id"] or "",
            ", ".join(row["aliases"]),
        )
        for row in rows
    )
    return Sheet(
        heads=("name", "parameters", "family", "model_type", "hub id", "also known as"),
        rows=table,
        right=("parameters",),
    )


def _model_type(row: dict[str, Any]) -> str:
    """The model type, with what knows its layers where no family's rules do."""
    from napkinmath.models.families import FAMILIES

    kind = row["config"]["model_type"]
    return kind if kind in FAMILIES else f"{kind} (trace only)"
