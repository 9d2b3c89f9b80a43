"""Words that filter the rows of a catalog."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def words_of(options: Mapping[str, object]) -> list[str]:
    """The words that filter a list."""
    words = options.get("words", [])
    return [str(word) for word in words] if isinstance(words, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def matches(words: Sequence[str], *texts: str) -> bool:
    """Whether every word occurs in one of the texts, case and punctuation aside."""
    haystack = " ".join(_plain(text) for text in texts)
    return all(_plain(word) in haystack for word in words)


def model_rows(words: list[str]) -> list[dict[str, Any]]:
    """The rows of the catalog of models that every word matches. Raises InputError where none is."""
    from napkinmath.catalog.models import load_rows

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
        near = suggest("-".join(words), [name for row in load_rows() for name in _names(row)])
        raise InputError(
            f"no model of the catalog matches {shown(' '.join(words))}{near}; use fewer words, or"
            " none for the whole list"
        )
    return rows


def _names(row: dict[str, Any]) -> list[str]:
    """What a model may be called: its names, its family, and the word that its name begins with."""
    return [row["name"], *row["aliases"], row["family"], row["name"].partition("-")[0]]


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())
