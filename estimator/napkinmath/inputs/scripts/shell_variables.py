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

TYPE_CHECKING = False
if TYPE_CHECKING:
    _Value = Word | list[Word] | None

POSITIONAL = tuple(form for sign in "123456789@*" for form in (f"${sign}", f"${{{sign}}}"))
"""What an argument of a script is called."""
_TWO_WAYS = "which the script sets in two ways"
_LONGEST_SUM = 400


class _Branches:
    """What the branches of one `if` set."""

    def __init__(self) -> None:
        self.start: dict[str, _Value] = {}
        """What each variable that one of them sets was before."""
        self.changed: dict[str, None] = {}
        """Those that the branch which is read sets."""
        self.ends: list[dict[str, _Value]] = []
        self.leaves = False
        """Whether the branch that is read ends the script."""


class Variables:
    """Variables and arrays by their names."""

    def __init__(self) -> None:
        self.words: dict[str, Word] = {}
        self.arrays: dict[str, list[Word]] = {}
        self._around: list[_Branches] = []

    def put(self, name: str, value: _Value) -> None:
        """Sets a variable, or an array by its `NAME[]`."""
        if self._around:
            self._around[-1].start.setdefault(name, self._of(name))
            self._around[-1].changed[name] = None
        self._replace(name, value)

    def _of(self, name: str) -> _Value:
        array = name.removesuffix("[]")
        return self.words.get(name) if array == name else self.arrays.get(array)

    def _replace(self, name: str, value: _Value) -> None:
        if isinstance(value, Word):
            self.words[name] = value
        elif value is not None:
            self.arrays[name.removesuffix("[]")] = value
        else:
            self.words.pop(name, None)
            self.arrays.pop(name.removesuffix("[]"), None)

    # ------------------------------------------------------------ branches

    def open_branch(self) -> None:
        """The first branch of an `if` begins."""
        self._around.append(_Branches())

    def leave(self) -> None:
        """`exit`: what the branch sets reaches nothing behind it."""
        if self._around:
            self._around[-1].leaves = True

    def end_branch(self, *, may_run: bool) -> None:
        """A branch ends; the next one begins with what was set before them."""
        branches = self._around[-1]
        if may_run and not branches.leaves:
            branches.ends.append({name: self._of(name) for name in branches.changed})
        for name in branches.changed:
            self._replace(name, branches.start[name])
        branches.changed, branches.leaves = {}, False

    def join_branches(self, *, one_runs: bool) -> None:
        """Behind `fi`: what all branches set alike is certain. `one_runs`: no run skips them all."""
        branches = self._around.pop()
        ends = branches.ends if one_runs else [*branches.ends, {}]
        for name, before in branches.start.items() if ends else ():
            self.put(name, _of_branches(name, [end.get(name, before) for end in ends]))

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
        if before is not None and not before.source and word.source in POSITIONAL:
            return  # an argument of the script may replace what is set before
        if is_open and before is not None:
            word = _of_two(name, before, word)
        self.put(name, word)

    def set_array(
        self, name: str, words: list[Word], line: int, *, adds: bool, is_open: bool
    ) -> None:
        """Sets an array, or adds to it; open branches as with a variable."""
        before = self.arrays.get(name)
        whole = [*(before or []), *words] if adds else words
        if is_open and before is not None:
            whole = _array_of_two(name, before, whole, line)
        self.put(f"{name}[]", whole)

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


def _of_branches(name: str, values: list[_Value]) -> _Value:
    """What a variable or array is behind branches that gave it these values."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    found = given[0]
    for value in given[1:]:
        if isinstance(found, Word) and isinstance(value, Word):
            found = _of_two(name, found, value)
        elif not isinstance(found, Word) and not isinstance(value, Word):
            found = _array_of_two(name.removesuffix("[]"), found, value, 0)
    if len(given) == len(values):
        return found
    # a branch that does not set it leaves what is set elsewhere, whose words are no words here
    if isinstance(found, Word):
        return _of_two(name, Word("", found.line), found) if _groups(_split(found)) else found
    return _array_of_two(name.removesuffix("[]"), [], found, 0) if _groups(found) else found


def _of_two(name: str, before: Word, word: Word) -> Word:
    """A variable that open branches set in two ways, or add to."""
    old, new = raw_of(before), raw_of(word)
    if (old.split(), sources_of(before)) == (new.split(), sources_of(word)):
        return word
    if before.source in POSITIONAL or word.source in POSITIONAL:
        plain = [one for one in (before, word) if not one.source]
        if plain:
            return plain[0]
    parts = _words_of_two(name, _split(before), _split(word), word.line)
    if parts is not None:
        raw = " ".join(raw_of(part) for part in parts)
        told = tuple(source for part in parts for source in sources_of(part))
        text = raw.replace(UNKNOWN, "")
        return Word(text, word.line, told[0] if told else "", raw if told else "", told)
    if not old.strip() or not (new.startswith(old) or new.endswith(old)):
        return Word("", word.line, _told(name, adds=False))
    told = (*sources_of(before), _told(name, adds=True))
    return Word(before.text, word.line, told[-1], f"{old} {UNKNOWN}", told)


def _array_of_two(name: str, before: list[Word], words: list[Word], line: int) -> list[Word]:
    """An array that open branches set in two ways, or add to."""
    if [word.text for word in before] == [word.text for word in words]:
        return words
    parts = _words_of_two(name, before, words, line)
    if parts is not None:
        return parts
    adds = bool(before) and words[: len(before)] == before
    return [*(before if adds else []), Word("", line, _told(name, adds=adds))]


def _words_of_two(name: str, before: list[Word], words: list[Word], line: int) -> list[Word] | None:
    """The options that both have alike, and the others as what a run decides; None where one has
    other words than options."""
    one, other = _groups(before), _groups(words)
    if one is None or other is None:
        return None
    found: list[Word] = []
    for key in {**one, **other}:
        group = one.get(key, other.get(key, []))
        if [raw_of(word) for word in one.get(key, [])] == [raw_of(w) for w in other.get(key, [])]:
            found += group
            continue
        told = _told(name, adds=not (key in one and key in other))
        found.append(Word(f"{key}=", group[0].line or line, told, f"{key}={UNKNOWN}", (told,)))
    return found


def _groups(words: list[Word]) -> dict[str, list[Word]] | None:
    """Options by their names, with their values: `--name value`, `--name=value`, `name=value`; None
    where the words begin with another one."""
    found: dict[str, list[Word]] = {}
    key = ""
    for word in words:
        name, equals, _ = raw_of(word).partition("=")
        bare = name.lstrip("-+~").replace(".", "").replace("_", "").replace("-", "")
        if bare.isalnum() and not bare[0].isdecimal() and (name.startswith("-") or equals):
            key = name
            found[key] = [word]
        elif not key:
            return None
        else:
            found[key].append(word)
    return found


def _split(word: Word) -> list[Word]:
    made = WordInTheMaking(word.line)
    made.splice([word], is_split=True)
    return made.words()


def is_setting(text: str, names: frozenset[str]) -> bool:
    """Whether a word is NAME=VALUE or NAME+=VALUE."""
    name, equals, _ = text.partition("=")
    name = name.removesuffix("+")
    return bool(equals and name) and not name[0].isdecimal() and set(name) <= names


def split_settings(words: list[Word], names: frozenset[str]) -> tuple[dict[str, Word], list[Word]]:
    """What is set in front of a command, and the command."""
    settings: dict[str, Word] = {}
    while words and is_setting(words[0].text, names):
        name, _, value = words[0].text.partition("=")
        raw = words[0].raw.partition("=")[2]
        settings[name] = words[0]._replace(text=value, raw=raw)
        words = words[1:]
    return settings, words
