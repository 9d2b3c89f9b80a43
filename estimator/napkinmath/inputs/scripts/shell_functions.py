"""Functions of a shell script: their bodies are read where they are called, with what they are
given.

Grammar: POSIX.1-2017 Shell Command Language 2.9.5; `function NAME` as bash has it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from napkinmath.inputs.scripts.shell_words import Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.shell_text import ShellText
    from napkinmath.inputs.scripts.shell_variables import Variables

_HEAD = re.compile(
    r"(?:function\s+([A-Za-z_][\w-]*)\s*(?:\(\s*\))?|([A-Za-z_][\w-]*)\s*\(\s*\))\s*\{"
)
_CALLED = r"(?:^|[;&|({{]|\b(?:do|then|else|if|!))[ \t]*(?:\w+=\S* +)*{}(?=[\s;&|)]|$)"
_PLACES = "123456789"


class Function(NamedTuple):
    """A function's commands, not read yet."""

    text: str
    line: int


def defined(text: ShellText) -> tuple[str, Function | None]:
    """The function whose definition begins here, by its name, behind which the text goes on; ''
    where none begins, None where nothing calls it, so that its commands stay where they are."""
    head = _HEAD.match(text.text, text.at)
    if head is None:
        return "", None
    name, begin = head[1] or head[2], head.end()
    line = text.line + text.text.count("\n", text.at, begin)
    inner = type(text)(text.text)
    inner.at = begin - 1
    end = inner.closing("{", "}")
    others = f"{text.calling}\n{text.text[: text.at]}\n{text.text[end:]}"
    if re.search(_CALLED.format(re.escape(name)), others, re.M) is None:
        text.advance(begin - text.at)
        return name, None
    text.advance(end - text.at)
    return name, Function(inner.text[begin : end - 1], line)


class Given:
    """What a function was given, as its `$1`, `$@` and `$#`, in place of what was there."""

    def __init__(self, names: Variables, words: list[Word]) -> None:
        self._names = names
        self._before = {place: names.words.get(place) for place in (*_PLACES, "#")}
        self._all = names.arrays.get("@")
        self._put(words)

    def _put(self, words: list[Word]) -> None:
        line = words[0].line if words else 0
        for index, place in enumerate(_PLACES):
            self._names.words[place] = words[index] if index < len(words) else Word("", line)
        self._names.words["#"] = Word(str(len(words)), line)
        self._names.arrays["@"] = words

    def end(self) -> None:
        """The function returns."""
        for place, word in self._before.items():
            if word is None:
                self._names.words.pop(place, None)
            else:
                self._names.words[place] = word
        if self._all is None:
            self._names.arrays.pop("@", None)
        else:
            self._names.arrays["@"] = self._all


def shifted(names: Variables, words: list[Word]) -> None:
    """`shift`, `shift 2`: what a function was given moves up; a script's own is not known."""
    if "@" in names.arrays:
        count = int(words[0].text) if words and words[0].text.isdecimal() else 1
        Given(names, names.arrays["@"][count:])
