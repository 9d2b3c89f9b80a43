"""Prose that a non-native reader follows at once: short sentences, and the field's words."""

from __future__ import annotations

import re

import pytest
from docs.prose import Sentence, docstring_sentences, message_sentences, page_sentences, sentences

MOST_WORDS, MEAN_WORDS = 40, 20
# pattern -> what to write. Words of our own that stand for a term, and phrases cut short.
INSTEAD = {
    r"asleep\b": "idle, not trained",
    r"opened\b": "open, begun",
    r"told\b": "given, named, known, distinguished",
    r"tells? (?:\w+ )?apart\b": "distinguishes",
    r"speaks?\b": "name, describe",
    r"aloud\b": "with a note, on standard error",
    r"(?:has|have) not as many": "has fewer",
    r"keeps? (?:them|it) not\b": "does not keep",
    r"(?:has|have|had) not(?=$|[,;:)])": "lacks, does not have",
    r"(?:hath|wherein|whence|thereof|thereby|lest|nought|albeit)\b": "a word of today",
}
_PATTERN = re.compile("|".join(rf"\b{word}" for word in INSTEAD), re.I)
KINDS = {
    "pages": page_sentences,
    "docstrings": docstring_sentences,
    "messages": message_sentences,
}


def listed(found: list[Sentence]) -> str:
    return "\n".join(f"{s.place}: {s.num_words} words: {s.text}" for s in found)


@pytest.mark.parametrize("kind", KINDS)
def test_no_sentence_is_long(kind: str) -> None:
    long = [s for s in KINDS[kind]() if s.num_words > MOST_WORDS]
    assert not long, listed(long)


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_are_short_on_average(kind: str) -> None:
    counts = [s.num_words for s in KINDS[kind]()]
    assert len(counts) > 500 and sum(counts) / len(counts) <= MEAN_WORDS


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_our_own_are_not_used(kind: str) -> None:
    """INSTEAD says what to write."""
    found = [s for s in KINDS[kind]() if _PATTERN.search(s.text)]
    assert not found, listed(found)


def test_what_ends_a_sentence() -> None:
    text = "One `a. b` (e.g. this). Two: three; four!\n\n- five\n- six [a b](c.md) 0.5 GiB?"
    found = [(s.text, s.num_words) for s in sentences("", text)]
    assert found == [
        ("One code (e.g. this)", 4),
        ("Two: three; four", 3),
        ("- five", 1),
        ("- six a b 0.5 GiB", 5),
    ]


@pytest.mark.parametrize(
    "text", ["InputError where it has not as many", "a rank that it has not", "and Told so"]
)
def test_the_list_finds_its_phrases(text: str) -> None:
    assert _PATTERN.search(text)


@pytest.mark.parametrize("text", ["it has not run", "retold", "has not been measured, yet"])
def test_the_list_leaves_plain_words(text: str) -> None:
    assert not _PATTERN.search(text)
