"""`estimate models [WORD ...]`: the catalog of models, filtered by words of name, alias, family or
hub id."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.cli.flag_rows import DEBUG, ON
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_PARSER = Parser(
    "estimate models",
    "List the catalog of models. Words filter by name, alias, family, model type or hub id.",
    (("output", ((("--json",), ON, "", "the rows of the catalog as JSON"), DEBUG)),),
    positional=("words", "WORD...", "e.g. qwen, moe, 7b"),
)


def run(argv: Sequence[str]) -> int:
    """Prints the rows that match; none is an error."""
    options = _PARSER.parse(argv)
    from napkinmath.catalog.models import load_rows
    from napkinmath.report.listing import matches, words_of

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
    _print(rows, as_json="json" in options)
    return 0


def _print(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(rows, indent=1))
        return
    from napkinmath.base.units import format_count
    from napkinmath.report.listing import print_rows

    table = [
        (
            row["name"],
            format_count(row["parameters"]),
            row["family"],
            _model_type(row),
            row["hub_id"] or "",
            ", ".join(row["aliases"]),
        )
        for row in rows
    ]
    print_rows(
        ("name", "parameters", "family", "model_type", "hub id", "also known as"),
        table,
        right=("parameters",),
    )


def _model_type(row: dict[str, Any]) -> str:
    """The model type, with what knows its layers where no family's rules do."""
    from napkinmath.models.families import FAMILIES

    kind = row["config"]["model_type"]
    return kind if kind in FAMILIES else f"{kind} (trace only)"
