"""Commands of a shell script as lists of words: quotes, continued lines, arrays and variables that
the script sets to plain text. Nothing is run; a word that needs running says what it comes from.

Grammar: POSIX.1-2017 Shell Command Language 2.2, 2.6; arrays as bash has them.
"""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.scripts.arithmetic import whole_number
from napkinmath.inputs.scripts.shell_words import (
    BLANK,
    UNKNOWN,
    Word,
    WordInTheMaking,
    raw_of,
    sources_of,
)
from napkinmath.inputs.scripts.slurm import GPUS_ON_NODE, slurm_variables
from napkinmath.inputs.scripts.source import EXPORTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TEXT = 1 << 20
_MAX_WORDS = 1 << 16
_MAX_NESTING = 16
_ENDS, _BREAKS = ";&|\n(){}", ";&|\n()<>"
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_LEADING = (
    *("then", "do", "else", "elif", "!", "time", "export", "local", "declare", "readonly"),
    *("typeset", *_OPENS),
)
_SHELLS = ("bash", "sh", "zsh")
_POSITIONAL = tuple(f"${sign}" for sign in "123456789@*")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789")


class Command(NamedTuple):
    """A simple command with what is set for it alone."""

    words: list[Word]
    settings: Mapping[str, Word]


def commands(text: str) -> list[Command]:
    """The simple commands of a script in the order of its lines. Raises InputError for a text that
    is larger, or grows to more, than a launch script."""
    if len(text) > MAX_TEXT:
        raise InputError(
            f"a script of {len(text)} characters is more than the {MAX_TEXT} that are read; give"
            " the launch line after `--`"
        )
    shell = _Shell(text)
    shell.variables |= slurm_variables(text)
    return shell.commands()


def quoted_line(words: list[str]) -> str:
    """Words of a command line as text that reads as the same words."""
    import shlex

    return shlex.join(words)


class _Shell:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.variables: dict[str, Word] = {}
        self.arrays: dict[str, list[Word]] = {}
        self.depth = self.nesting = 0
        self.marked: list[str] = []
        """What makes the marked places of the text, in their order."""

    # ------------------------------------------------------------ commands

    def commands(self) -> list[Command]:
        found: list[Command] = []
        words: list[Word] = []
        while self.at < len(self.text):
            self._skip_blank()
            char = self.text[self.at : self.at + 1]
            if not char or char in _ENDS:
                self._end(words, found)
                words = []
                self._advance(1)
            elif self.text.startswith(("<", ">"), self.at) or self._is_redirection():
                self._redirection()
            elif words or not self._assigns():
                words += self._word()
            self._count(len(words))
        self._end(words, found)
        return found

    def _end(self, words: list[Word], found: list[Command]) -> None:
        while words and words[0].text in _LEADING:
            self.depth += words[0].text in _OPENS
            if words[0].text in ("for", "select") and len(words) > 1:
                self.variables[words[1].text] = Word("", words[1].line, "a loop")
                return
            words = words[1:]
        if words and words[0].text in _CLOSES:
            self.depth -= 1
            return
        settings: dict[str, Word] = {}
        while words and _is_setting(words[0].text):
            name, _, value = words[0].text.partition("=")
            settings[name] = Word(value, words[0].line, words[0].source)
            words = words[1:]
        if words and words[0].text == "env":
            self._end(words[1:], found)
        elif words and (inner := self._inner(words, settings)) is not None:
            found += inner
        elif words:
            found.append(Command(words, self._exported() | settings))
        else:
            for name, word in settings.items():
                self._set(name, word)

    def _inner(self, words: list[Word], settings: dict[str, Word]) -> list[Command] | None:
        """The commands of `eval TEXT` or `... bash -c TEXT`; None for another command."""
        names = [word.text.rpartition("/")[2] for word in words]
        texts: list[Word] = words[1:] if names[0] == "eval" else []
        for at in range(len(words) - 2):
            if names[at] in _SHELLS and words[at + 1].text.startswith("-"):
                texts = words[at + 2 : at + 3] if words[at + 1].text.endswith("c") else texts
        if not texts or self.nesting >= _MAX_NESTING:
            return None
        inside = _Shell(" ".join(raw_of(word) for word in texts))
        inside.variables, inside.arrays = self.variables, self.arrays
        inside.line, inside.nesting = texts[0].line, self.nesting + 1
        inside.marked = [source for word in texts for source in sources_of(word)]
        before = words[: len(words) - len(texts)]
        return [
            Command(self._under(before, one.words), settings | dict(one.settings))
            for one in inside.commands()
        ]

    @staticmethod
    def _under(before: list[Word], words: list[Word]) -> list[Word]:
        """What a scheduler starts is started by it: `srun ... bash -c "python ..."`."""
        return [before[0], *words] if before and before[0].text == "srun" else words

    def _exported(self) -> dict[str, Word]:
        return {name: self.variables[name] for name in EXPORTED if name in self.variables}

    def _set(self, name: str, word: Word) -> None:
        """Sets a variable; where branches set it to two texts, it is neither."""
        before = self.variables.get(name)
        if before is not None and not before.source and word.source in _POSITIONAL:
            return  # an argument of the script may replace what is set before
        is_default = before is not None and before.source in _POSITIONAL and not word.source
        if self.depth > 0 and before is not None and before.text != word.text and not is_default:
            word = Word("", word.line, f"${name}, which the script sets in two ways")
        self.variables[name] = word

    # ------------------------------------------------------------ words

    def _assigns(self) -> bool:
        """Whether an array is set here: `NAME=(...)`; then it is read."""
        end = self.at
        while end < len(self.text) and self.text[end] in _NAME:
            end += 1
        name, rest = self.text[self.at : end], self.text[end : end + 3]
        more = rest.startswith("+=(")
        if not name or not (more or rest.startswith("=(")):
            return False
        self._advance(end - self.at + (3 if more else 2))
        words: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in BLANK + "\n" or self._is_comment():
                self._skip_blank()
                if self.text[self.at : self.at + 1] == "\n":
                    self._advance(1)
            elif self.text[self.at] in _ENDS:
                self._advance(1)
            else:
                words += self._word()
                self._count(len(words))
        self._advance(1)
        self.arrays[name] = [*self.arrays.get(name, []), *words] if more else words
        self._count(len(self.arrays[name]))
        return True

    def _word(self) -> list[Word]:
        """The words that one word of the script becomes: none, one, or those of an array."""
        made = WordInTheMaking(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in BLANK or char in _BREAKS:
                break
            if char == UNKNOWN:
                self._marked(made)
            elif char == "\\":
                if self.text[self.at + 1 : self.at + 2] != "\n":
                    made.add(self.text[self.at + 1 : self.at + 2])
                self._advance(2)
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                inside = self.text[self.at + 1 : end]
                made.add(inside)
                made.sources += [self._next_mark() for _ in range(inside.count(UNKNOWN))]
                self._advance(end + 1 - self.at)
            elif char == '"':
                self._double_quoted(made)
            elif char in "$`":
                made.splice(self._expansion(0), is_split=True)
            else:
                made.add(char)
                self._advance(1)
        return made.words()

    def _double_quoted(self, made: WordInTheMaking) -> None:
        self._advance(1)
        made.add("")
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                made.add(self.text[self.at + 1 : self.at + 2].strip("\n"))
                self._advance(2)
            elif char == UNKNOWN:
                self._marked(made)
            elif char in "$`":
                made.splice(self._expansion(0), is_split=False)
            else:
                made.add(char)
                self._advance(1)
        self._advance(1)

    def _marked(self, made: WordInTheMaking) -> None:
        made.splice([Word("", self.line, self._next_mark())], is_split=False)
        self._advance(1)

    def _next_mark(self) -> str:
        return self.marked.pop(0) if self.marked else "a command"

    def _expansion(self, depth: int) -> list[Word]:
        """What stands for `$...` or a command in backquotes, which begins here."""
        start, line = self.at, self.line
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            self._advance((len(self.text) if end < 0 else end + 1) - self.at)
        elif self.text.startswith("$((", self.at):
            self._advance(self._closing("(", ")") - self.at)
            value = self._arithmetic(self.text[start + 3 : self.at - 2])
            if value is not None:
                return [Word(str(value), line)]
        elif self.text.startswith("$(", self.at):
            self._advance(self._closing("(", ")") - self.at)
            inner = self.text[start + 2 : self.at - 1]
            value = self._arithmetic(inner[5:]) if inner.startswith("expr ") else None
            if value is not None:
                return [Word(str(value), line)]
            if "nvidia-smi" in inner and "wc -l" in inner and GPUS_ON_NODE in self.variables:
                return [self.variables[GPUS_ON_NODE]]
        elif self.text.startswith("${", self.at):
            self._advance(self._closing("{", "}") - self.at)
            found = self._parameter(self.text[start + 2 : self.at - 1], line, depth)
            if found is not None:
                return found
        else:
            end = self.at + 1
            while end < len(self.text) and self.text[end] in _NAME:
                end += 1
            special = end == self.at + 1 and self.text[end : end + 1] in tuple("@*#?$!-")
            self._advance(end + special - self.at)
            name = self.text[start + 1 : self.at]
            if not name:
                return [Word("$", line)]
            if name in self.variables:
                return [self.variables[name]]
        return [Word("", line, shown(self.text[start : self.at], limit=40)[1:-1])]

    def _parameter(self, inner: str, line: int, depth: int) -> list[Word] | None:
        """`${NAME}`, `${NAME:-default}`, `${NAME[@]}`; None for what is not followed."""
        end = 0
        while end < len(inner) and inner[end] in _NAME:
            end += 1
        name, rest = inner[:end], inner[end:]
        if rest in ("[@]", "[*]") and name in self.arrays:
            return self.arrays[name]
        if not rest and name in self.arrays:
            return self.arrays[name][:1]
        if name in self.variables and (not rest or rest.startswith((":-", "-", ":=", "="))):
            known = self.variables[name]
            if known.text or known.source or not rest:
                return [known]
        if not rest.startswith((":-", "-", ":=", "=")) or depth >= _MAX_NESTING:
            return None
        text = rest[2:] if rest.startswith(":") else rest[1:]
        inside = _Shell(text)
        inside.variables, inside.arrays, inside.line = self.variables, self.arrays, line
        made = WordInTheMaking(line)
        while inside.at < len(text):
            if text[inside.at] in "$`":
                made.splice(inside._expansion(depth + 1), is_split=False)
            else:
                made.add("" if text[inside.at] in "\"'" else text[inside.at])
                inside._advance(1)
        word = made.word()
        if rest.startswith((":=", "=")):
            self._set(name, word)
        return [word]

    def _arithmetic(self, text: str) -> int | None:
        """A sum or product of whole numbers and known variables; None for another."""
        import re

        def known(match: re.Match[str]) -> str:
            word = self.variables.get(match[1])
            return match[0] if word is None or word.source else f"({word.text or 0})"

        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", known, text[:400])
        if len(filled) > 400 or not re.fullmatch(r"[\d\s()+*/%-]+", filled) or "**" in filled:
            return None
        try:
            return whole_number(filled)
        except (SyntaxError, ArithmeticError, ValueError, RecursionError):
            return None

    # ------------------------------------------------------------ the text

    def _closing(self, opening: str, closing: str) -> int:
        """The place behind the closing bracket of the pair that begins here."""
        depth, at = 0, self.at
        while at < len(self.text):
            depth += (self.text[at] == opening) - (self.text[at] == closing)
            at += 1
            if not depth and self.text[at - 1] == closing:
                return at
        return len(self.text)

    def _skip_blank(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in BLANK:
                self._advance(1)
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self._advance(self.text.index("\n", self.at) + 1 - self.at)
            elif self._is_comment():
                end = self.text.find("\n", self.at)
                self._advance((len(self.text) if end < 0 else end) - self.at)
            else:
                return

    def _is_comment(self) -> bool:
        return self.text[self.at] == "#" and (
            self.at == 0 or self.text[self.at - 1] in BLANK + _ENDS
        )

    def _is_redirection(self) -> bool:
        return self.text[self.at].isdigit() and self.text[self.at + 1 : self.at + 2] in ("<", ">")

    def _redirection(self) -> None:
        """Steps over `2>&1`, `> file` and a here-document."""
        import re

        here = re.compile(r"\d?<<-?\s*[\"']?(\w+)[\"']?").match(self.text, self.at)
        if here:
            end = re.compile(rf"^\s*{here[1]}\s*$", re.M).search(self.text, here.end())
            newline = self.text.find("\n", here.end())
            if end and newline >= 0:  # the rest of the line is dropped with the document
                self._advance(end.end() - self.at)
                return
        while self.at < len(self.text) and self.text[self.at] in "0123456789<>&":
            self._advance(1)
        while self.at < len(self.text) and self.text[self.at] in BLANK:
            self._advance(1)
        if self.at < len(self.text) and self.text[self.at] not in _ENDS + "<>":
            self._word()

    def _advance(self, count: int) -> None:
        end = min(self.at + count, len(self.text))
        self.line += self.text.count("\n", self.at, end)
        self.at = max(end, self.at)

    def _count(self, words: int) -> None:
        if words > _MAX_WORDS:
            raise InputError(
                f"line {self.line} of the script grows to more than {_MAX_WORDS} words; give the"
                " launch line after `--`"
            )


def _is_setting(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals and name) and not name[0].isdigit() and set(name) <= _NAME
