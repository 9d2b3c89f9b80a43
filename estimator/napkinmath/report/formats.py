"""The forms in which a command gives its answer besides its own on the terminal: one record each.

A command makes an Answer and names the forms that it can give; a new form is a record here and the
file with its writer.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Sheet(Record):
    """A table of text: every row has as many cells as there are heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    """Heads of the columns of numbers."""
    title: str = ""
    least: tuple[str, ...] = ()
    """Heads of the columns that a narrow terminal loses first, in that order."""

    def validate(self) -> None:
        assert all(len(row) == len(self.heads) for row in self.rows), self.title


class Answer(Record):
    """What a command found: the same as JSON, as tables, and how its terminal form is printed."""

    sheets: Callable[[], Sequence[Sheet]]
    json: Callable[[], str] | None = None


class Form(Record):
    """One form; `writer` is 'module:function', from an Answer to its text."""

    key: str
    help: str
    writer: str

    def text(self, answer: Answer) -> str:
        """The answer in this form, without a newline at its end."""
        module, _, function = self.writer.partition(":")
        write: Callable[[Answer], str] = getattr(__import__(module, fromlist=[function]), function)
        return write(answer)


FORMS = (
    Form(key="json", help="the answer as JSON", writer="napkinmath.report.formats:as_json"),
    Form(key="csv", help="the table as CSV", writer="napkinmath.report.formats:as_csv"),
    Form(key="markdown", help="as Markdown", writer="napkinmath.report.markdown:as_markdown"),
)
BY_KEY = {form.key: form for form in FORMS}


def taken(options: dict[str, object]) -> Form | None:
    """The form that options ask for, which they lose; None for the terminal's own. Raises
    InputError where they ask for two."""
    asked = [form for form in FORMS if options.pop(form.key, None) is not None]
    if len(asked) > 1:
        raise InputError(
            f"--{asked[0].key} and --{asked[1].key} are two forms of the same answer; give one of"
            " them"
        )
    return asked[0] if asked else None


def as_json(answer: Answer) -> str:
    """The document that the command makes itself."""
    assert answer.json is not None
    return answer.json()


def as_csv(answer: Answer) -> str:
    """Its one table, heads first."""
    import csv
    import io

    (sheet,) = answer.sheets()
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((sheet.heads, *sheet.rows))
    return out.getvalue().rstrip("\n")
