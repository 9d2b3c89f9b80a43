"""Words of a shell script, and what in them is worked out when it runs."""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.base.errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_WORD = 1 << 16
BLANK = " \t\r"
UNKNOWN = "\0"
"""Stands in a word for what is worked out."""


class Word(NamedTuple):
    """One word of a command."""

    text: str
    line: int
    source: str = ""
    """What is run or asked to make it ('$1', '$(nproc)'); '' for plain text."""
    raw: str = ""
    """The text with a mark at each place that is worked out, where there are some."""
    sources: tuple[str, ...] = ()
    """What makes each of these places, in their order."""


class Command(NamedTuple):
    """A simple command with what is set for it alone."""

    words: list[Word]
    settings: Mapping[str, Word]
    documents: Mapping[str, Word]
    """The files that the script writes with here-documents, by their names."""


def quoted_line(words: list[str]) -> str:
    """Words of a command line as text that reads as the same words."""
    import shlex

    return shlex.join(words)


class WordInTheMaking:
    """Words while their parts are read. Raises InputError where one grows too long."""

    def __init__(self, line: int) -> None:
        self.line, self.done = line, list[Word]()
        self.text, self.sources, self.begun = list[str](), list[str](), False
        self.length = 0

    def add(self, text: str) -> None:
        """Adds text to the word that is open; raises InputError where it grows too long."""
        self.text.append(text)
        self.begun = True
        self.length += len(text)
        if self.length > MAX_WORD:
            raise InputError(
                f"line {self.line} of the script has a word of more than {MAX_WORD} characters;"
                " give the launch line after `--`"
            )

    def splice(self, words: list[Word], *, is_split: bool) -> None:
        """Adds what an expansion became; outside of quotes blanks divide it."""
        for index, word in enumerate(words):
            if index:
                self._finish()
            text, sources = raw_of(word), sources_of(word)
            self.line = word.line or self.line
            for place, part in enumerate(text.split() if is_split else [text]):
                if place:
                    self._finish()
                self.add(part)
                self.sources += sources[: part.count(UNKNOWN)]
                sources = sources[part.count(UNKNOWN) :]

    def _finish(self) -> None:
        self.done.append(self.word())
        self.text, self.sources, self.begun = [], [], False

    def word(self) -> Word:
        """The word; one whose last part after '/' is plain is a path with a known end."""
        text = "".join(self.text)
        folder, slash, end = text.rstrip("/").rpartition("/")
        if not self.sources:
            return Word(text, self.line)
        first = self.sources[0]
        if slash and end and UNKNOWN not in end and not any(c in folder for c in BLANK + "\n"):
            return Word(f"{folder.replace(UNKNOWN, first)}/{end}", self.line)
        return Word(text.replace(UNKNOWN, ""), self.line, first, text, tuple(self.sources))

    def words(self) -> list[Word]:
        """All words, the open one last where it has begun."""
        return [*self.done, self.word()] if self.begun else self.done


def raw_of(word: Word) -> str:
    """A word's text with a mark where it is worked out."""
    return word.raw or (f"{word.text}{UNKNOWN}" if word.source else word.text)


def sources_of(word: Word) -> tuple[str, ...]:
    """What makes the marked places of `raw_of`, in their order."""
    return word.sources or ((word.source,) if word.source else ())
