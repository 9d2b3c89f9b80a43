"""Flags of the forms that a command can give its answer in."""

from __future__ import annotations

from napkinmath.cli.flag_rows import ON
from napkinmath.report.formats import FORMS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.cli.flag_rows import Row


def form_rows(*, json: str = "", single_table: bool = True) -> tuple[Row, ...]:
    """A flag a form. `json` says what the JSON is, '' that it is given elsewhere; CSV is of answers
    that are a single table."""
    help_of = {form.key: form.help for form in FORMS} | {"json": json}
    if not single_table:
        help_of["csv"] = ""
    return tuple(((f"--{key}",), ON, "", text) for key, text in help_of.items() if text)
