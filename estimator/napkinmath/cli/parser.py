"""Parser: a command line read against rows of flags into options; an option is there only if it was
given.

argparse takes 6 ms to load and fill with these flags, a tenth of the whole command.
"""

from __future__ import annotations

import sys

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.cli.flag_rows import ON, REPEAT, SWITCH, TEXT, meaning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napkinmath.cli.flag_rows import Group, Row

_WIDTH = 110
_HELP_COLUMN, _NARROW_COLUMN = 34, 22
_ENDING_COLUMN = 15
_ROOMY = 90  # columns of a terminal from which on names have the wider of them
# Behind a switch: transformers' HfArgumentParser takes true and yes, YAML on and off too.
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


class Words:
    """Words of a command line that belong together: a flag with its value, or a word without a flag
    (`row` is None), or all from `--` on."""

    __slots__ = ("row", "value", "words")

    def __init__(self, row: Row | None, value: str | None, words: list[str]) -> None:
        self.row, self.value, self.words = row, value, words

    @property
    def key(self) -> str:
        """The option that it sets; '' for words without a flag."""
        if self.row is None:
            return ""
        return self.row[1][0] if isinstance(self.row[1], tuple) else _key(self.row)


class Parser:
    """The flags of one command.

    `positional` is (key, metavar, help) of what may stand without a flag, any number of times if
    the metavar ends in '...'. `short` is what --help prints in place of every flag, which then is
    --help all.
    """

    def __init__(
        self,
        command: str,
        description: str,
        groups: Sequence[Group],
        *,
        positional: tuple[str, str, str] | None = None,
        usage: str = "",
        ending: Callable[[], str] | None = None,
        short: Callable[[], str] | None = None,
    ) -> None:
        self.command, self.description, self.groups, self.positional, self.ending = (
            command,
            description,
            groups,
            positional,
            ending,
        )
        self.short = short
        self.usage = usage or f"{command} {f'[{positional[1]}] ' if positional else ''}[flags]"
        self._rows: dict[str, Row] = {}
        for _, rows in groups:
            for row in rows:
                for name in row[0]:
                    self._rows[name] = row
                if row[1] == SWITCH:
                    self._rows[_negated(row)] = row

    def parse(self, argv: Sequence[str]) -> dict[str, object]:
        """Options by key; raises InputError for anything not understood, SystemExit after
        --help."""
        options: dict[str, object] = {}
        pieces = list(self.pieces(argv))
        self._refuse_bare_words(pieces)
        for piece in pieces:
            row, (name, *_) = piece.row, piece.words
            if row is None:
                is_verbatim = name == "--"
                for word in piece.words[is_verbatim:]:
                    self._add_positional(options, word, verbatim=is_verbatim)
            elif piece.value is None:
                self._set(options, row, name)
            else:
                _set_value(options, row, name.partition("=")[0], piece.value)
        return options

    def pieces(self, argv: Sequence[str]) -> Iterator[Words]:
        """The words of a command line that belong together, in order; raises as `parse` does."""
        words = list(argv)
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word in ("--help", "-h"):
                short = None if words[at : at + 1] == ["all"] else self.short
                print(short() if short else self.help())
                raise SystemExit(0)
            if word == "--":
                yield Words(None, None, words[at - 1 :])
                return
            if not word.startswith("-") or word == "-":
                yield Words(None, None, [word])
                continue
            name, equals, value = word.partition("=")
            row, began = self._rows.get(name), at - 1
            if row is None:
                words[began:] = self._in_our_words(
                    name, [*([value] if equals else ()), *words[at:]]
                )
                at = began
                continue
            if row[1] not in (TEXT, REPEAT):
                said = (value if equals else "".join(words[at : at + 1])).lower()
                if said in (*_YES, *_NO):
                    at += not equals
                    if said in _YES or row[1] == SWITCH:
                        yield Words(row, None, [name if said in _YES else _other(row, name)])
                    continue
                if equals:
                    raise InputError(
                        f"flag {name} takes no value, but {shown(value)} was given; write {name}"
                        " alone"
                    )
                yield Words(row, None, [word])
                continue
            if not equals:
                value, at = self._next_value(words, at, name, row), at + 1
            yield Words(row, value, words[began:at])

    def help(self) -> str:
        """Usage, every flag with its meaning, and what the command adds."""
        columns = _columns()
        width = min(_WIDTH, columns)
        usage = "\n  ".join(_wrapped(f"usage: {self.usage}", columns - 2))
        lines = [usage, "", *_wrapped(self.description, width)]
        if self.positional:
            lines += ["", *_entry(self.positional[1], self.positional[2], width)]
        for title, rows in self.groups:
            lines += ["", f"{title}:"]
            for row in rows:
                lines += _entry(_signature(row), meaning(row), width)
        lines += _entry("-h, --help", "show this", width)
        if self.ending:
            ending = self.ending().split("\n")
            lines += ["", *(part for line in ending for part in _broken(line, columns))]
        return "\n".join(lines)

    def _refuse_bare_words(self, pieces: Sequence[Words]) -> None:
        """Several words in the place of the one model, or a GPU in its place."""
        if self.positional is None or self.positional[0] not in ("job", "name"):
            return
        bare = [piece.words[0] for piece in pieces if piece.row is None]
        models = [word for word in bare if word != "--" and _is_model(word)]
        named = len(models) + any(piece.key == "model" for piece in pieces)
        if not models or (named < 2 and not _is_misplaced_gpu(models[0])):
            return
        from napkinmath.cli.plain_words import as_command

        flags = [word for piece in pieces if piece.row is not None for word in piece.words]
        if refusal := as_command(self.command, models, flags):
            raise refusal

    def _in_our_words(self, name: str, following: list[str]) -> list[str]:
        """The words from an unknown flag on, as this program has them; raises InputError for what
        is no trainer's flag either."""
        from napkinmath.inputs.option_table.trainers_words import in_our_words

        found = in_our_words(name, following, self._rows)
        if found is None:
            near = suggest(name, [flag for flag in self._rows if flag.startswith("--")])
            raise InputError(f"flag {shown(name)} is unknown{near}; see `{self.command} --help`")
        ours, said = found
        return [*ours, *following[said:]]

    def _next_value(self, words: list[str], at: int, name: str, row: Row) -> str:
        if at >= len(words) or words[at].startswith("--") or words[at] in self._rows:
            from napkinmath.inputs.option_table.trainers_words import ALONE_MEANS

            if row[0][0] in ALONE_MEANS:
                words.insert(at, ALONE_MEANS[row[0][0]])
                return words[at]
            found = f", but {shown(words[at])} follows" if at < len(words) else ""
            raise InputError(f"flag {name} needs a value{found}; {_signature(row)}: {meaning(row)}")
        return words[at]

    def _set(self, options: dict[str, object], row: Row, name: str) -> None:
        if isinstance(row[1], tuple):
            _append(options, *row[1])
            return
        on, key = name != _negated(row) or row[1] == ON, _key(row)
        if options.get(key, on) is not on:
            raise InputError(
                f"{row[0][0]} and {_negated(row)} contradict each other; give one of them"
            )
        options[key] = on

    def _add_positional(
        self, options: dict[str, object], word: str, *, verbatim: bool = False
    ) -> None:
        if self.positional is None:
            raise InputError(f"{shown(word)} is left over; see `{self.command} --help`")
        key, metavar, _ = self.positional
        if key == "job" and not verbatim and _is_model(word):
            _set_value(options, self._rows["--model"], "--model", word)
        elif metavar.endswith("..."):
            _append(options, key, word)
        elif options.setdefault(key, word) is not word:
            raise InputError(
                f"{shown(word)} is left over after {shown(options[key])}; see `{self.command}"
                " --help`"
            )


def _is_model(word: str) -> bool:
    """Whether a word where a job may stand is a model; what is neither is read as one, whose name
    can be corrected."""
    from napkinmath.cli.words import JOB, kind

    return kind(word) != JOB


def _is_misplaced_gpu(word: str) -> bool:
    """Whether a word names a GPU and no model."""
    from napkinmath.cli.words import kind

    if kind(word):
        return False
    from napkinmath.cli.plain_words import is_gpu

    return is_gpu(word)


def _set_value(options: dict[str, object], row: Row, name: str, value: str) -> None:
    key = _key(row)
    if row[1] == REPEAT:
        _append(options, key, value)
        return
    if options.setdefault(key, value) != value:
        raise InputError(
            f"{name} is given twice, as {shown(options[key])} and {shown(value)}; give one, or use"
            " `estimate sweep`"
        )


def _append(options: dict[str, object], key: str, value: str) -> None:
    given = options.setdefault(key, [])
    assert isinstance(given, list)
    given.append(value)  # pyright: ignore[reportUnknownMemberType]


def _key(row: Row) -> str:
    return row[0][0].removeprefix("--").replace("-", "_")


def _other(row: Row, name: str) -> str:
    """The flag that says the contrary of a switch."""
    return row[0][0] if name == _negated(row) else _negated(row)


def _negated(row: Row) -> str:
    return "--no-" + row[0][0].removeprefix("--")


def _columns() -> int:
    """Columns of the terminal; what a program reads has no width."""
    if not sys.stdout.isatty():
        return sys.maxsize
    from napkinmath.report.columns import terminal_columns

    return terminal_columns()


def _signature(row: Row) -> str:
    names = ", ".join((*row[0], *((_negated(row),) if row[1] == SWITCH else ())))
    return f"{names} {row[2]}".rstrip()


def _entry(name: str, text: str, width: int) -> list[str]:
    """A name and its meaning in two columns; a long name has a line of its own."""
    column = _HELP_COLUMN if width >= _ROOMY else _NARROW_COLUMN
    lines = _wrapped(text, width - column) or [""]
    pad = " " * column
    if len(name) + 4 > column:
        names = _wrapped(name, width - 2) if width < _WIDTH else [name]
        return [*(f"  {part}" for part in names), *(pad + line for line in lines)]
    return [f"  {name}".ljust(column) + lines[0], *(pad + line for line in lines[1:])]


def _broken(line: str, width: int) -> list[str]:
    """A line of the ending: a command with its meaning, or a sentence."""
    if len(line) <= width:
        return [line]
    if not line.startswith("  "):
        return _wrapped(line, width)
    first, *more = _wrapped(line[_ENDING_COLUMN:], width - _ENDING_COLUMN)
    return [line[:_ENDING_COLUMN] + first, *(" " * _ENDING_COLUMN + part for part in more)]


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
