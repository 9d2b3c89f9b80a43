"""Words of a shell script: quotes, arrays, expansions and redirections, filled in from what the
script sets. What needs running says what it comes from.

Grammar: POSIX.1-2017 Shell Command Language 2.2, 2.6, 2.7; arrays as bash has them.
"""

from __future__ import annotations

import re

from napkinmath.base.errors import shown
from napkinmath.inputs.scripts.shell_branches import Branches
from napkinmath.inputs.scripts.shell_folders import asked_folder
from napkinmath.inputs.scripts.shell_lists import listed
from napkinmath.inputs.scripts.shell_parameters import made_of
from napkinmath.inputs.scripts.shell_text import ENDS, NAME, ShellText
from napkinmath.inputs.scripts.shell_variables import POSITIONAL, Variables, is_setting
from napkinmath.inputs.scripts.shell_words import BLANK, UNKNOWN, Word, WordInTheMaking
from napkinmath.inputs.scripts.slurm import GPUS_ON_NODE

MAX_NESTING = 16
_BREAKS = ";&|\n()<>"
_LIST_ALONE = re.compile(r'(\$@|\$\{(@|\w+\[@\])\})"')


class ShellReader(ShellText):
    """A script's text, with what is set at the place that is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.names, self.branches = Variables(), Branches()
        self.target: Word | None = None
        """The file that the command's output goes to."""
        self.documents: dict[str, Word] = {}
        self.document: Word | None = None
        """The here-document or here-string that the command reads, where it goes into no file."""
        self.marked: list[str] = []
        """What makes the marked places of the text, in their order."""

    # ------------------------------------------------------------ words

    def array_name(self) -> str:
        """The name of the array that is set here, `NAME=(` or `NAME+=(`; '' where none is."""
        end = self.at
        while end < len(self.text) and self.text[end] in NAME:
            end += 1
        sets = self.text.startswith(("=(", "+=("), end)
        return self.text[self.at : end] if sets else ""

    def set_array(self) -> None:
        """Reads `NAME=(...)`."""
        name = self.array_name()
        more = self.text[self.at + len(name)] == "+"
        self.advance(len(name) + (3 if more else 2))
        words: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in BLANK + "\n" or self.is_comment():
                self.skip_blank()
                if self.text[self.at : self.at + 1] == "\n":
                    self.advance(1)
            elif self.text[self.at] in _BREAKS:
                self.advance(1)
            else:
                words += self.word()
                self.count(len(words))
        self.advance(1)
        if not self.branches.is_skipped():
            is_open = self.branches.is_open()
            self.names.set_array(name, words, self.line, adds=more, is_open=is_open)
            self.count(len(self.names.arrays[name]))

    def word(self) -> list[Word]:
        """The words that one word of the script becomes: none, one, or those of an array."""
        made = WordInTheMaking(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "<" and (inside := self.placeholder()):
                made.add(inside)
                self.advance(len(inside))
                continue
            if char in BLANK or char in _BREAKS:
                break
            if char == UNKNOWN:
                self._marked(made)
            elif char == "\\":
                if self.text[self.at + 1 : self.at + 2] != "\n":
                    made.add(self.text[self.at + 1 : self.at + 2])
                self.advance(2)
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                inside = self.text[self.at + 1 : end]
                made.add(inside)
                made.sources += [self._next_mark() for _ in range(inside.count(UNKNOWN))]
                self.advance(end + 1 - self.at)
            elif char == '"':
                self._double_quoted(made)
            elif char in "$`":
                sets = not made.done and is_setting("".join(made.text), NAME)
                made.splice(
                    self._expansion(0), is_split=not sets
                )  # POSIX 2.9.1: settings are whole
            else:
                made.add(char)
                self.advance(1)
        return made.words()

    def _double_quoted(self, made: WordInTheMaking) -> None:
        self.advance(1)
        if not _LIST_ALONE.match(self.text, self.at):  # an empty one becomes no word
            made.add("")
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                made.add(self.text[self.at + 1 : self.at + 2].strip("\n"))
                self.advance(2)
            elif char == UNKNOWN:
                self._marked(made)
            elif char in "$`":
                made.splice(self._expansion(0), is_split=False)
            else:
                made.add(char)
                self.advance(1)
        self.advance(1)

    def _marked(self, made: WordInTheMaking) -> None:
        made.splice([Word("", self.line, self._next_mark())], is_split=False)
        self.advance(1)

    def _next_mark(self) -> str:
        return self.marked.pop(0) if self.marked else "a command"

    def _expansion(self, depth: int) -> list[Word]:
        """What stands for `$...` or a command in backquotes, which begins here."""
        start, line = self.at, self.line
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            self.advance((len(self.text) if end < 0 else end + 1) - self.at)
        elif self.text.startswith(("$((", "$["), self.at):
            wide = self.text[self.at + 1] == "("
            self.advance(self.closing(*("()" if wide else "[]")) - self.at)
            value = self.names.sum_of(self.text[start + 2 + wide : self.at - 1 - wide])
            if value is not None:
                return [Word(str(value), line)]
        elif self.text.startswith("$(", self.at):
            self.advance(self.closing("(", ")") - self.at)
            inner = self.text[start + 2 : self.at - 1]
            value = (
                self.names.sum_of(inner[5:].replace("\\", ""))
                if inner.startswith("expr ")
                else None
            )
            if value is not None:
                return [Word(str(value), line)]
            if (program := _sought(inner)) is not None:
                return [Word(program, line)]
            if depth < MAX_NESTING:
                told = asked_folder(inner, lambda text: self._filled(text, "\"'", depth + 1))
                if told is not None:
                    return [Word(told, line)]
            said = listed(inner, self.names.arrays, lambda text: self._filled(text, "\"'", depth))
            if said is not None:
                return [Word(said, line)]
            if "nvidia-smi" in inner and "wc -l" in inner and GPUS_ON_NODE in self.names.words:
                return [self.names.words[GPUS_ON_NODE]]
        elif self.text.startswith("${", self.at):
            self.advance(self.closing("{", "}") - self.at)
            found = self._parameter(self.text[start + 2 : self.at - 1], line, depth)
            if found is not None:
                return found
        else:
            end = self.at + 1
            while end < len(self.text) and self.text[end] in NAME:
                end += 1
            special = end == self.at + 1 and self.text[end : end + 1] in tuple("@*#?$!-")
            self.advance(end + special - self.at)
            name = self.text[start + 1 : self.at]
            if not name:
                return [Word("$", line)]
            if name in ("@", "*") and "@" in self.names.arrays:
                return self.names.arrays["@"]
            if name in self.names.words:
                return [self.names.words[name]]
        return [Word("", line, shown(self.text[start : self.at], limit=40)[1:-1])]

    def _parameter(self, inner: str, line: int, depth: int) -> list[Word] | None:
        """`${NAME}`, `${NAME:-default}`, `${NAME[@]}`; None for what is not followed."""
        end = 0
        while end < len(inner) and inner[end] in NAME:
            end += 1
        name, rest = inner[:end], inner[end:]
        if not name and rest[:1] in ("@", "*") and "@" in self.names.arrays:  # a function's
            behind = rest[2:] if rest[1:2] == ":" else ""
            return self.names.arrays["@"][
                max(0, int(behind[:4]) - 1) if behind.isdecimal() else 0 :
            ]
        if rest in ("[@]", "[*]") and name in self.names.arrays:
            return self.names.arrays[name]
        if not rest and name in self.names.arrays:
            return self.names.arrays[name][:1]
        if (made := made_of(inner, name, rest, self.names)) is not None:
            return made
        known = self.names.words.get(name)
        has_default = rest.startswith((":-", "-", ":=", "="))
        is_given = known is not None and bool(known.text or known.source)
        if is_given and known is not None and known.source in POSITIONAL:
            is_given = False  # an argument that nobody gives
        if known is not None and (not rest or (has_default and is_given)):
            return [known]
        if not has_default or depth >= MAX_NESTING:
            return None
        text = rest[2:] if rest.startswith(":") else rest[1:]
        word = self._filled(text, "\"'", depth + 1)
        if rest.startswith((":=", "=")):
            self.names.set(name, word, is_open=self.branches.is_open())
        return [word]

    # ------------------------------------------------------------ redirections

    def redirection(self) -> None:
        """Steps over `2>&1`, `> file` and a here-document."""
        here = re.compile(r"\d?<<-?\s*([\"']?)(\w+)[\"']?").match(self.text, self.at)
        if here:
            end = re.compile(rf"^\s*{here[2]}\s*$", re.M).search(self.text, here.end())
            newline = self.text.find("\n", here.end())
            if end and newline >= 0:  # the rest of the line is dropped with the document
                into = re.search(r">\s*([^\s;|&]+)", self.text[here.end() : newline])
                if into is not None:
                    self.target = self._filled(into[1], "\"'")
                self._document(self.text[newline + 1 : end.start()], is_plain=bool(here[1]))
                self.advance(end.end() - self.at)
                return
        is_text = self.text.startswith("<<<", self.at)
        writes = self.text[self.at] in ">1" and self.text[self.at : self.at + 2] != ">&"
        while self.at < len(self.text) and self.text[self.at] in "0123456789<>&":
            self.advance(1)
        while self.at < len(self.text) and self.text[self.at] in BLANK:
            self.advance(1)
        if self.at < len(self.text) and self.text[self.at] not in ENDS + "<>":
            words = self.word()
            self.target = words[0] if writes and words else self.target
            self.document = words[0] if is_text and words else self.document

    def _document(self, text: str, *, is_plain: bool) -> None:
        """Keeps a here-document, by the name of the file that it goes into."""
        text = text if is_plain else text.replace("\\\n", "")
        found = Word(text, self.line) if is_plain else self._filled(text, "")
        if self.target is not None and self.target.text:
            self.documents[self.target.text] = found
        else:
            self.document = found

    def _filled(self, text: str, without: str, depth: int = 0) -> Word:
        """A text with its variables filled in, and without some characters."""
        inside = ShellReader(text)
        inside.names, inside.line = self.names, self.line
        made = WordInTheMaking(self.line)
        while inside.at < len(text):
            if text[inside.at] in "$`":
                made.splice(inside._expansion(depth), is_split=False)
            else:
                made.add("" if text[inside.at] in without else text[inside.at])
                inside.advance(1)
        return made.word()


def _sought(inner: str) -> str | None:
    """'swift' of `which swift` and `command -v swift`: a program by its own name."""
    words = inner.split()
    if len(words) > 1 and words[:-1] in (["which"], ["command", "-v"], ["type", "-P"]):
        return words[-1] if words[-1].replace("-", "").replace(".", "").isalnum() else None
    return None
