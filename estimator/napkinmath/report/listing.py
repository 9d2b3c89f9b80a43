"""Words that filter the rows of a catalog."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def words_of(options: Mapping[str, object]) -> list[str]:
    """The words that filter a list."""
    words = options.get("words", [])
    return [str(word) for word in words] if isinstance(words, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def matches(words: Sequence[str], *texts: str) -> bool:
    """Whether every word occurs in one of the texts, case and punctuation aside."""
    haystack = " ".join(_plain(text) for text in texts)
    return all(_plain(word) in haystack for word in words)


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())
