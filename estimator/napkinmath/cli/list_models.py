"""`estimate models [WORD ...]`: the catalog of models, filtered by words of name, alias, family or
hub id."""

from __future__ import annotations

import json

from napkinmath.base.errors import InputError
from napkinmath.cli.flag_rows import DEBUG, TEXT
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, Sheet, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_OWN = (
    (
        "filter",
        (
            (
                ("--fits",),
                TEXT,
                "GPU",
                "only models whose step fits it; flags of a training say how, as those of `estimate`",
            ),
        ),
    ),
    ("output", (*form_rows(json="the rows of the catalog as JSON"), DEBUG)),
)
_WORDS = ("words", "WORD...", "e.g. qwen, moe, 7b")
_PARSER = Parser(
    "estimate models",
    "List the catalog of models. Words filter by name, alias, family, model type or hub id.",
    _OWN,
    positional=_WORDS,
)


def run(argv: Sequence[str]) -> int:
    """Prints the rows that match; none is an error."""
    if any(word.partition("=")[0] == "--fits" for word in argv):
        from napkinmath.cli.fitting_models import run as run_fitting

        return run_fitting(argv, _OWN, _WORDS)
    try:
        options = _PARSER.parse(argv)
    except InputError as error:
        if "is unknown" not in str(error):
            raise
        raise InputError(f"{error}; flags of a training go with --fits GPU") from None
    form = taken(options)
    from napkinmath.report.columns import print_sheet
    from napkinmath.report.listing import model_rows, words_of

    rows = model_rows(words_of(options))
    if form is None:
        print_sheet(_sheet(rows))
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
        least=("also known as", "hub id", "model_type"),
    )


def _model_type(row: dict[str, Any]) -> str:
    """The model type, with what knows its layers where no family's rules do."""
    from napkinmath.models.families import FAMILIES, is_learned

    kind = row["config"]["model_type"]
    return kind if kind in FAMILIES or is_learned(kind) else f"{kind} (trace only)"
