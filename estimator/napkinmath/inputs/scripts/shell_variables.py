"""What a shell script sets: variables, arrays, and sums over them."""

from __future__ import annotations

from napkinmath.inputs.scripts.arithmetic import whole_number
from napkinmath.inputs.scripts.shell_words import (
    UNKNOWN,
    Word,
    WordInTheMaking,
    raw_of,
    sources_of,
)
from napkinmath.inputs.scripts.source import EXPORTED

_POSITIONAL = tuple(f"${sign}" for sign in "123456789@*")
_TWO_WAYS = "which the script sets in two ways"
_LONGEST_SUM = 400


class Variables:
    """Variables and arrays by their names."""

    def __init__(self) -> None:
        self.words: dict[str, Word] = {}
        self.arrays: dict[str, list[Word]] = {}

    def exported(self) -> dict[str, Word]:
        """Those that a training reads from its environment."""
        return {name: self.words[name] for name in EXPORTED if name in self.words}

    def set(self, name: str, word: Word, *, is_open: bool) -> None:
        """Sets a variable, or adds to it (`NAME+`); where open branches set it to two texts, it is
        neither, and where one adds to it, it is what it was and something unknown."""
        if name.endswith("+"):
            name = name[:-1]
            word = _joined(self.words.get(name), word)
        before = self.words.get(name)
        if before is not None and not before.source and word.source in _POSITIONAL:
            return  # an argument of the script may replace what is set before
        is_default = before is not None and before.source in _POSITIONAL and not word.source
        if is_open and before is not None and before.text != word.text and not is_default:
            word = _of_two(name, before, word)
        self.words[name] = word

    def set_array(
        self, name: str, words: list[Word], line: int, *, adds: bool, is_open: bool
    ) -> None:
        """Sets an array, or adds to it; open branches as with a variable."""
        before = self.arrays.get(name)
        if is_open and before is not None:
            kept = before if adds else []
            words = words if not words and adds else [Word("", line, _told(name, adds=adds))]
            self.arrays[name] = [*kept, *words]
        else:
            self.arrays[name] = [*(before or []), *words] if adds else words

    def sum_of(self, text: str) -> int | None:
        """A sum or product of whole numbers and known variables; None for another."""
        import re

        def known(match: re.Match[str]) -> str:
            word = self.words.get(match[1])
            return match[0] if word is None or word.source else f"({word.text or 0})"

        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", known, text[:_LONGEST_SUM])
        plain = re.fullmatch(r"[\d\s()+*/%-]+", filled)
        if len(filled) > _LONGEST_SUM or not plain or "**" in filled:
            return None
        try:
            return whole_number(filled)
        except (SyntaxError, ArithmeticError, ValueError, RecursionError):
            return None


def _told(name: str, *, adds: bool) -> str:
    return f"${name}, to which a branch of the script adds" if adds else f"${name}, {_TWO_WAYS}"


def _joined(before: Word | None, word: Word) -> Word:
    made = WordInTheMaking(word.line)
    for part in (before, word):
        if part is not None:
            made.splice([part], is_split=False)
    return made.word()


def _of_two(name: str, before: Word, word: Word) -> Word:
    """A variable that open branches set in two ways, or add to."""
    old, new = raw_of(before), raw_of(word)
    if not old.strip() or not (new.startswith(old) or new.endswith(old)):
        return Word("", word.line, _told(name, adds=False))
    told = (*sources_of(before), _told(name, adds=True))
    return Word(before.text, word.line, told[-1], f"{old} {UNKNOWN}", told)


def is_setting(text: str, names: frozenset[str]) -> bool:
    """Whether a word is NAME=VALUE or NAME+=VALUE."""
    name, equals, _ = text.partition("=")
    name = name.removesuffix("+")
    return bool(equals and name) and not name[0].isdigit() and set(name) <= names


def split_settings(words: list[Word], names: frozenset[str]) -> tuple[dict[str, Word], list[Word]]:
    """What is set in front of a command, and the command."""
    settings: dict[str, Word] = {}
    while words and is_setting(words[0].text, names):
        name, _, value = words[0].text.partition("=")
        raw = words[0].raw.partition("=")[2]
        settings[name] = words[0]._replace(text=value, raw=raw)
        words = words[1:]
    return settings, words
