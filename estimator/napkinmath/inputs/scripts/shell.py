"""Commands of a shell script as lists of words: quotes, continued lines, arrays and variables that
the script sets to plain text. Nothing is run; a word that needs running says what it comes from.

Grammar: POSIX.1-2017 Shell Command Language 2.2, 2.6; arrays as bash has them.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.scripts.shell_branches import TESTS, decided
from napkinmath.inputs.scripts.shell_files import SOURCES, ShellFiles
from napkinmath.inputs.scripts.shell_folders import name_script, unname_script
from napkinmath.inputs.scripts.shell_functions import Function, Given, defined, shifted
from napkinmath.inputs.scripts.shell_lists import read_array
from napkinmath.inputs.scripts.shell_reader import MAX_NESTING, ShellReader
from napkinmath.inputs.scripts.shell_sums import braced, compared, set_by
from napkinmath.inputs.scripts.shell_text import ENDS, NAME
from napkinmath.inputs.scripts.shell_variables import split_settings
from napkinmath.inputs.scripts.shell_words import Command, Word, raw_of, sources_of
from napkinmath.inputs.scripts.slurm import slurm_variables

MAX_TEXT = 1 << 20
_OPENS, _CLOSES = ("if", "for", "while", "until", "select"), ("fi", "esac", "done")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_FRONT = ("!", "time")
_TURNS = ("then", "do", "else", "elif")
_BEFORE = (*_FRONT, *_DECLARES, *_TURNS)
_SHELLS = ("bash", "sh", "zsh")


# What the command in front says, and whether it is a test.
_SUCCEEDS: tuple[bool | None, bool] = (True, False)


def commands(text: str, files: ShellFiles | None = None) -> list[Command]:
    """The simple commands of a script in the order of its lines, with those of the `files` that it
    sources. Raises InputError for a text that is larger, or grows to more, than a launch script."""
    if len(text) > MAX_TEXT:
        raise InputError(
            f"a script of {len(text)} characters is more than the {MAX_TEXT} that are read; give"
            " the launch line after `--`"
        )
    shell = _Shell(text)
    shell.files = files
    shell.names.words |= slurm_variables(text)
    if files is not None and files.script:
        name_script(shell.names, files.script, is_run=True)
    return shell.commands()


class _Shell(ShellReader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nesting = 0
        self.files: ShellFiles | None = None
        self.operator = ""
        """'&&' or '||' in front of the command that is read."""
        self.tested, self.is_tested = _SUCCEEDS
        self.functions: dict[str, Function] = {}
        self.loops: dict[str, list[Word]] = {}
        """What a variable of a loop comes from -> the texts that the loop runs over."""
        self.cases: list[Word] = []
        """What the `case` around the place compares, the innermost last."""

    # ------------------------------------------------------------ commands

    def commands(self) -> list[Command]:
        found: list[Command] = []
        words: list[Word] = []
        while self.at < len(self.text):
            self.skip_blank()
            char = self.text[self.at : self.at + 1]
            if self._is_compound(char, words):
                words = words if char == "{" else self._behind_keywords(words)
                self._compound(words)
            elif not char or char in ENDS:
                self._end(words, found)
                words = self._ended(words)
            elif self.is_redirection():
                self.redirection()
                if words and words[0].text in ("if", "elif", *TESTS):
                    words.append(Word("", self.line, "a redirection"))
            elif not _is_front(words) or not self.array_name():
                words += self.word()
                if len(words) == 1 and words[0].text in ("else", "elif"):
                    words = self._behind_keywords(words)
                elif len(words) == 3 and (words[0].text, words[2].text) == ("case", "in"):
                    words = self._case(words[1])
            else:
                words = self._behind_keywords(words)
                self.set_array()
            self.count(len(words))
        self._end(words, found)
        return found

    def _is_compound(self, char: str, words: list[Word]) -> bool:
        """Whether a sum, words in braces or a function begin here."""
        if char == "{":
            return bool(words) and bool(braced(self.text, self.at)[1])
        begins = not words or words[-1].text in (*_FRONT, *_TURNS, *_OPENS)
        if self.text.startswith("((", self.at):
            return begins and [word.text for word in words[-1:]] not in (["for"], ["select"])
        if words or self.branches.is_skipped() or (char not in NAME):
            return False
        name, function = defined(self)
        if function is not None:
            self.functions[name] = function
        return bool(name)

    def _compound(self, words: list[Word]) -> None:
        line = self.line
        if (found := braced(self.text, self.at))[1]:
            self.advance(found[1])
            words += [Word(text, line) for text in found[0]]
        elif self.text.startswith("((", self.at):
            start = self.at
            self.advance(self.closing("(", ")") - start)
            words += self._sum(self.text[start + 2 : self.at - 2], line)

    def _sum(self, text: str, line: int) -> list[Word]:
        """Sets what a sum sets; else what it says as a test."""
        made = set_by(text, line, self.names)
        if made is None:
            said = compared(text, self.names)
            told = Word("", line, "a sum") if said is None else Word(str(said).lower(), line)
            return [told]
        if not self.branches.is_skipped():
            self.names.set(*made, is_open=self.branches.is_open())
        return []

    def _ended(self, words: list[Word]) -> list[Word]:
        """What follows the end of a command: `&&`, another branch of a `case`, the next line."""
        self.target = self.document = None
        pair = self.text[self.at : self.at + 2]
        if self.cases and pair in (";;", ";&"):
            self.advance(3 if self.text.startswith(";;&", self.at) else 2)
            self._pattern()
            return []
        if words or pair in ("&&", "||"):
            self.operator = pair if pair in ("&&", "||") else ""
        self.advance(2 if pair in ("&&", "||") else 1)
        return []

    def _case(self, subject: Word) -> list[Word]:
        self.cases.append(subject)
        self.branches.open_case(self.names)
        self._pattern()
        return []

    def _pattern(self) -> None:
        """The patterns in front of a branch of the innermost `case`; nothing at its `esac`."""
        self.skip_blank()
        while self.text[self.at : self.at + 1] == "\n":
            self.advance(1)
            self.skip_blank()
        end = self.text.find(")", self.at)
        if end < 0 or self.text.startswith("esac", self.at):
            return
        patterns = self.text[self.at : end].strip(" (\t").split("|")
        self.advance(end + 1 - self.at)
        self.operator = ""
        self.branches.pick(self.names, self.cases[-1], [p.strip(" \t\"'") for p in patterns])

    def _end(self, words: list[Word], found: list[Command]) -> None:
        words = self._behind_keywords(words)
        if not words:
            return
        if self.branches.is_asked():
            self.branches.ask(words, self.operator)
            if words[0].text not in (*TESTS, "true", "false") and words[0].text:
                self._run(words, found, is_open=self.branches.is_open())
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
                if text == "esac" and self.cases:
                    self.cases.pop()
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
            elif text in _DECLARES:  # what is declared without a value is no command
                return [word for word in words[1:] if "=" in word.text]
            elif text not in _FRONT:
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
        if len(texts) == len(over) > 1:
            self.loops[told] = over

    def _run(self, words: list[Word], found: list[Command], *, is_open: bool) -> None:
        settings, words = split_settings(words, NAME)
        if words and words[0].text == "unset":
            settings, words = {word.text: Word("", word.line) for word in words[1:]}, []
        if words and words[0].text == "read" and self.document is not None:
            self._read(words, settings, self.document, is_open=is_open)
        elif words and words[0].text in ("exit", "return"):
            self.names.leave()
        elif words and words[0].text == "let":
            for word in words[1:]:
                self._sum(word.text, word.line)
        elif words and words[0].text == "shift":
            shifted(self.names, words[1:])
        elif words and words[0].text in self.functions and self.nesting < MAX_NESTING:
            found += self._called(self.functions[words[0].text], words[1:], settings)
        elif words and (beside := self._beside(words)) is not None:
            found += beside
        elif words and words[0].text == "env":
            self._run(words[1:], found, is_open=is_open)
        elif words and (looped := self._looped(words, settings)) is not None:
            found += looped
        elif words and (inner := self._inner(words, settings)) is not None:
            found += inner
        elif words:
            found.append(Command(words, self.names.exported() | settings, self.documents))
        else:
            for name, word in settings.items():
                self.names.set(name, word, is_open=is_open)

    def _read(
        self, words: list[Word], settings: dict[str, Word], text: Word, *, is_open: bool
    ) -> None:
        """`read NAME` and `read -a NAME` of a here-document or here-string."""
        array = read_array(words, settings, text)
        if array is None:
            self.names.set(words[-1].text, text, is_open=is_open)
        else:
            self.names.set_array(words[-1].text, array, text.line, adds=False, is_open=is_open)

    def _within(self, text: str) -> _Shell:
        """A reader of text that is run in this shell."""
        inside = _Shell(text)
        inside.names, inside.documents, inside.branches = self.names, self.documents, self.branches
        inside.functions, inside.files = self.functions, self.files
        inside.nesting = self.nesting + 1
        return inside

    def _beside(self, words: list[Word]) -> list[Command] | None:
        """The commands of a file that is sourced or run; None where it is not here."""
        if self.files is None or self.nesting >= MAX_NESTING:
            return None
        named = self.files.named(words)
        if named is None:
            return None
        given = Given(self.names, named[1])
        is_run = words[0].text not in SOURCES
        before = name_script(self.names, self.files.read[-1], is_run=is_run)
        inside = self._within(named[0])
        inside.calling = f"{self.calling}\n{self.text}"
        found = inside.commands()
        unname_script(self.names, before)
        given.end()
        return found

    def _called(
        self, function: Function, words: list[Word], settings: dict[str, Word]
    ) -> list[Command]:
        """The commands of a function with what it is given."""
        inside = self._within(function.text)
        inside.line = function.line
        given = Given(self.names, words)
        found = inside.commands()
        given.end()
        return [one._replace(settings=settings | dict(one.settings)) for one in found]

    def _looped(self, words: list[Word], settings: dict[str, Word]) -> list[Command] | None:
        """Commands that are texts of a loop: `for cmd in "${commands[@]}"; do eval "$cmd"; done`."""
        last = words[-1]
        is_text = len(words) == 1 or (len(words) == 2 and words[0].text == "eval")
        texts = self.loops.get(last.source) if is_text and not last.text else None
        if texts is None:
            return None
        each = [self._inner([Word("eval", text.line), text], settings) for text in texts]
        return [command for commands in each for command in commands or ()]

    def _inner(self, words: list[Word], settings: dict[str, Word]) -> list[Command] | None:
        """The commands of `eval TEXT` or `... bash -c TEXT`; None for another command."""
        names = [word.text.rpartition("/")[2] for word in words]
        texts: list[Word] = words[1:] if names[0] == "eval" else []
        for at in range(len(words) - 2):
            if names[at] in _SHELLS and words[at + 1].text.startswith("-"):
                texts = words[at + 2 : at + 3] if words[at + 1].text.endswith("c") else texts
        if not texts or self.nesting >= MAX_NESTING:
            return None
        inside = _Shell(" ".join(raw_of(word) for word in texts))
        inside.names, inside.documents = self.names, self.documents
        inside.functions = self.functions
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


def _is_front(words: list[Word]) -> bool:
    """Whether only words that come in front of a command or an array were read: `then`, `declare
    -a`."""
    return all(
        word.text in _BEFORE or (index and word.text.startswith("-") and words[0].text in _DECLARES)
        for index, word in enumerate(words)
    )
