"""Commands of a shell script as lists of words: quotes, continued lines, arrays and variables that
the script sets to plain text. Nothing is run; a word that needs running says what it comes from.

Grammar: POSIX.1-2017 Shell Command Language 2.2, 2.6; arrays as bash has them.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.scripts.shell_branches import TESTS, Branches, decided
from napkinmath.inputs.scripts.shell_parameters import made_of
from napkinmath.inputs.scripts.shell_text import ENDS, ShellText
from napkinmath.inputs.scripts.shell_variables import Variables, split_settings
from napkinmath.inputs.scripts.shell_words import (
    BLANK,
    UNKNOWN,
    Command,
    Word,
    WordInTheMaking,
    raw_of,
    sources_of,
)
from napkinmath.inputs.scripts.slurm import GPUS_ON_NODE, slurm_variables

MAX_TEXT = 1 << 20
_MAX_NESTING = 16
_BREAKS = ";&|\n()<>"
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_DECLARES = ("!", "time", "export", "local", "declare", "readonly", "typeset")
_TURNS = ("then", "do", "else", "elif")
_BEFORE = (*_DECLARES, *_TURNS)
_SHELLS = ("bash", "sh", "zsh")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789")


# What the command in front says, and whether it is a test.
_SUCCEEDS: tuple[bool | None, bool] = (True, False)


def commands(text: str) -> list[Command]:
    """The simple commands of a script in the order of its lines. Raises InputError for a text that
    is larger, or grows to more, than a launch script."""
    if len(text) > MAX_TEXT:
        raise InputError(
            f"a script of {len(text)} characters is more than the {MAX_TEXT} that are read; give"
            " the launch line after `--`"
        )
    shell = _Shell(text)
    shell.names.words |= slurm_variables(text)
    return shell.commands()


class _Shell(ShellText):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.names, self.branches = Variables(), Branches()
        self.nesting = 0
        self.target: Word | None = None
        """The file that the command's output goes to."""
        self.documents: dict[str, Word] = {}
        self.document: Word | None = None
        """The here-document that the command reads, where it goes into no file."""
        self.operator = ""
        """'&&' or '||' in front of the command that is read."""
        self.tested, self.is_tested = _SUCCEEDS
        self.marked: list[str] = []
        """What makes the marked places of the text, in their order."""

    # ------------------------------------------------------------ commands

    def commands(self) -> list[Command]:
        found: list[Command] = []
        words: list[Word] = []
        while self.at < len(self.text):
            self.skip_blank()
            char = self.text[self.at : self.at + 1]
            if not char or char in ENDS:
                self._end(words, found)
                self.target = self.document = None
                pair = self.text[self.at : self.at + 2]
                if words or pair in ("&&", "||"):
                    self.operator = pair if pair in ("&&", "||") else ""
                self.advance(2 if pair in ("&&", "||") else 1)
                words = []
            elif self.is_redirection():
                self._redirection()
                if words and words[0].text in ("if", "elif", *TESTS):
                    words.append(Word("", self.line, "a redirection"))
            elif any(word.text not in _BEFORE for word in words) or not self._array_name():
                words += self._word()
                if len(words) == 1 and words[0].text in ("else", "elif"):
                    words = self._behind_keywords(words)
            else:
                words = self._behind_keywords(words)
                self._set_array()
            self.count(len(words))
        self._end(words, found)
        return found

    def _end(self, words: list[Word], found: list[Command]) -> None:
        words = self._behind_keywords(words)
        if not words:
            return
        if self.branches.is_asked():
            self.branches.ask(words, self.operator)
            return
        runs = self._runs()
        if self.branches.is_skipped() or runs is False:
            return
        is_test = words[0].text in TESTS
        self.tested = decided(words) if is_test else True
        self.is_tested = is_test
        if not is_test:
            self._run(words, found, is_open=runs is None or self.branches.is_open())

    def _runs(self) -> bool | None:
        """Whether what stands behind `TEST &&` or `TEST ||` runs; any other command succeeds."""
        if not self.operator or (self.operator == "&&" and not self.is_tested):
            return True
        if self.tested is None or not self.is_tested:
            return None
        return self.tested == (self.operator == "&&")

    def _behind_keywords(self, words: list[Word]) -> list[Word]:
        """The command behind `if`, `then`, `export` and their like; nothing where none follows."""
        while words:
            text = words[0].text
            if text in _CLOSES:
                self.branches.close(self.names)
                return []
            if text in ("for", "select") and len(words) > 1:
                self._loop(words[1].text, words[3:], words[1].line)
                return []
            if text in _OPENS:
                self.branches.open(self.names, condition=text == "if")
            elif text in ("else", "elif"):
                self.branches.turn(self.names, condition=text == "elif")
            elif text in ("then", "do"):
                self.branches.then()
            elif text not in _DECLARES:
                return words
            words = words[1:]
            if text in (*_OPENS, *_TURNS):
                self.operator = ""
        return []

    def _loop(self, name: str, over: list[Word], line: int) -> None:
        """A loop over one plain text sets its variable; one over several leaves it open."""
        texts = [word.text for word in over if not word.source]
        self.branches.open(self.names, condition=False)
        told = f"a loop over {shown(', '.join(texts))}" if len(texts) == len(over) > 1 else "a loop"
        single = len(over) == 1 and not over[0].source and not {*over[0].text} & {*"*?[{~"}
        self.names.put(name, over[0] if single else Word("", line, told))

    def _run(self, words: list[Word], found: list[Command], *, is_open: bool) -> None:
        settings, words = split_settings(words, _NAME)
        if words and words[0].text == "unset":
            settings, words = {word.text: Word("", word.line) for word in words[1:]}, []
        if words and words[0].text == "read" and self.document is not None:
            self.names.set(words[-1].text, self.document, is_open=is_open)
        elif words and words[0].text in ("exit", "return"):
            self.names.leave()
        elif words and words[0].text == "env":
            self._run(words[1:], found, is_open=is_open)
        elif words and (inner := self._inner(words, settings)) is not None:
            found += inner
        elif words:
            found.append(Command(words, self.names.exported() | settings, self.documents))
        else:
            for name, word in settings.items():
                self.names.set(name, word, is_open=is_open)

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
        inside.names, inside.documents = self.names, self.documents
        inside.line, inside.nesting = texts[0].line, self.nesting + 1
        inside.marked = [source for word in texts for source in sources_of(word)]
        before = words[: len(words) - len(texts)]
        return [
            one._replace(
                words=self._under(before, one.words), settings=settings | dict(one.settings)
            )
            for one in inside.commands()
        ]

    @staticmethod
    def _under(before: list[Word], words: list[Word]) -> list[Word]:
        """What a scheduler starts is started by it: `srun ... bash -c "python ..."`."""
        return [before[0], *words] if before and before[0].text == "srun" else words

    # ------------------------------------------------------------ words

    def _array_name(self) -> str:
        """The name of the array that is set here, `NAME=(` or `NAME+=(`; '' where none is."""
        end = self.at
        while end < len(self.text) and self.text[end] in _NAME:
            end += 1
        sets = self.text.startswith(("=(", "+=("), end)
        return self.text[self.at : end] if sets else ""

    def _set_array(self) -> None:
        """Reads `NAME=(...)`."""
        name = self._array_name()
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
                words += self._word()
                self.count(len(words))
        self.advance(1)
        if not self.branches.is_skipped():
            is_open = self.branches.is_open()
            self.names.set_array(name, words, self.line, adds=more, is_open=is_open)
            self.count(len(self.names.arrays[name]))

    def _word(self) -> list[Word]:
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
                made.splice(self._expansion(0), is_split=True)
            else:
                made.add(char)
                self.advance(1)
        return made.words()

    def _double_quoted(self, made: WordInTheMaking) -> None:
        self.advance(1)
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
            if "nvidia-smi" in inner and "wc -l" in inner and GPUS_ON_NODE in self.names.words:
                return [self.names.words[GPUS_ON_NODE]]
        elif self.text.startswith("${", self.at):
            self.advance(self.closing("{", "}") - self.at)
            found = self._parameter(self.text[start + 2 : self.at - 1], line, depth)
            if found is not None:
                return found
        else:
            end = self.at + 1
            while end < len(self.text) and self.text[end] in _NAME:
                end += 1
            special = end == self.at + 1 and self.text[end : end + 1] in tuple("@*#?$!-")
            self.advance(end + special - self.at)
            name = self.text[start + 1 : self.at]
            if not name:
                return [Word("$", line)]
            if name in self.names.words:
                return [self.names.words[name]]
        return [Word("", line, shown(self.text[start : self.at], limit=40)[1:-1])]

    def _parameter(self, inner: str, line: int, depth: int) -> list[Word] | None:
        """`${NAME}`, `${NAME:-default}`, `${NAME[@]}`; None for what is not followed."""
        end = 0
        while end < len(inner) and inner[end] in _NAME:
            end += 1
        name, rest = inner[:end], inner[end:]
        if rest in ("[@]", "[*]") and name in self.names.arrays:
            return self.names.arrays[name]
        if not rest and name in self.names.arrays:
            return self.names.arrays[name][:1]
        if (made := made_of(inner, name, rest, self.names)) is not None:
            return made
        known = self.names.words.get(name)
        has_default = rest.startswith((":-", "-", ":=", "="))
        if known is not None and (not rest or (has_default and (known.text or known.source))):
            return [known]
        if not has_default or depth >= _MAX_NESTING:
            return None
        text = rest[2:] if rest.startswith(":") else rest[1:]
        word = self._filled(text, "\"'", depth + 1)
        if rest.startswith((":=", "=")):
            self.names.set(name, word, is_open=self.branches.is_open())
        return [word]

    # ------------------------------------------------------------ redirections

    def _redirection(self) -> None:
        """Steps over `2>&1`, `> file` and a here-document."""
        import re

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
        writes = self.text[self.at] in ">1" and self.text[self.at : self.at + 2] != ">&"
        while self.at < len(self.text) and self.text[self.at] in "0123456789<>&":
            self.advance(1)
        while self.at < len(self.text) and self.text[self.at] in BLANK:
            self.advance(1)
        if self.at < len(self.text) and self.text[self.at] not in ENDS + "<>":
            words = self._word()
            self.target = words[0] if writes and words else self.target

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
        inside = _Shell(text)
        inside.names, inside.line = self.names, self.line
        made = WordInTheMaking(self.line)
        while inside.at < len(text):
            if text[inside.at] in "$`":
                made.splice(inside._expansion(depth), is_split=False)
            else:
                made.add("" if text[inside.at] in without else text[inside.at])
                inside.advance(1)
        return made.word()
