"""Errors a user can cause, each one line that quotes the input, names the rule broken and says the
way out.

NapkinError            base; library code raises, only the command line prints
├── InputError         bad input (exit code 2).
├── ImpossibleFigure  a figure that cannot be, withheld (exit code 2)
└── DoesNotFit         raised by the pre-flight check when even the optimistic end of the range cannot fit (exit code 1)
"""

from __future__ import annotations


class NapkinError(Exception):
    """Base class of every error this package raises on purpose."""

    exit_code = 2


class InputError(NapkinError, ValueError):
    """The input cannot be understood or contradicts itself."""


class ImpossibleFigure(NapkinError):
    """A figure came out as nothing can be; the message names the rule that it breaks."""


class DoesNotFit(NapkinError):
    """The training step needs more memory than there is, at the optimistic end of the range too."""

    exit_code = 1


def suggest(given: str, known: list[str], *, limit: int = 3, cutoff: float = 0.5) -> str:
    """'did you mean a, b?' for the names nearest to `given`, or an empty string."""
    import difflib

    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(given.lower(), names, n=limit, cutoff=cutoff)
    return f"; did you mean {', '.join(near)}?" if near else ""


def shown(value: object, *, limit: int = 60) -> str:
    """The user's own input, quoted, on one line and not longer than `limit` characters."""
    try:
        text = repr(value)
    except (
        ValueError
    ):  # a number written in base 16, with more digits than Python writes in base 10
        text = "a number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 4] + "..." + text[-1]


def plain(text: str) -> str:
    """A line as a terminal shows it: a control character is spelt out, so that a name in somebody's
    file moves no cursor and starts no line of its own."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
