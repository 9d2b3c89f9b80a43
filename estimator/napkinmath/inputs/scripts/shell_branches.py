"""Branches of a shell script that plain text decides: `if [ "$A" = true ]`, `[[ $N -gt 1 ]]`,
`else`; what needs running leaves a branch open.

Grammar: POSIX.1-2017 Shell Command Language 2.9.4, `test`; `[[` and `==` as bash has them.
"""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.shell_variables import Variables
    from napkinmath.inputs.scripts.shell_words import Word

TESTS = ("[", "[[", "test")
_OPPOSITE = {"!=": "=", "-ne": "-eq", "-gt": "-le", "-ge": "-lt"}


class OpenBranch(NamedTuple):
    """The branch that is read."""

    runs: bool | None
    """None: open."""
    before: bool | None
    """Whether an earlier branch of the same `if` runs."""
    is_asked: bool = False
    """Whether its condition is still being read."""
    is_if: bool = False
    """Whether what its branches set is joined at the end: in loops and `case` it is open."""
    is_else: bool = False


class Branches:
    """The branches around the place that is read."""

    def __init__(self) -> None:
        self._around: list[OpenBranch] = []

    def is_skipped(self) -> bool:
        """Whether plain text says that this place does not run."""
        return any(branch.runs is False and not branch.is_asked for branch in self._around)

    def is_open(self) -> bool:
        """Whether it may run or not, in a loop or `case`."""
        return any(branch.runs is None and not branch.is_if for branch in self._around)

    def is_asked(self) -> bool:
        """Whether a condition is being read."""
        return bool(self._around) and self._around[-1].is_asked

    def open(self, names: Variables, *, condition: bool) -> None:
        """`if`, or, without a condition, `case` and loops, whose bodies may not run."""
        self._around.append(OpenBranch(None, False, condition, is_if=condition))
        if condition:
            names.open_branch()

    def ask(self, words: list[Word], operator: str) -> None:
        """One command of a condition, behind '', '&&' or '||'."""
        branch, found = self._around[-1], decided(words)
        if operator == "&&":
            known = (branch.runs, found)
            found = False if False in known else None if None in known else True
        elif operator == "||":
            known = (branch.runs, found)
            found = True if True in known else None if None in known else False
        self._around[-1] = branch._replace(runs=found)

    def then(self) -> None:
        """The branch whose condition was read begins."""
        if self.is_asked():
            branch = self._around[-1]
            runs = False if branch.before else branch.runs
            runs = None if branch.before is None and runs else runs
            self._around[-1] = branch._replace(runs=runs, is_asked=False)

    def turn(self, names: Variables, *, condition: bool) -> None:
        """`else`, or `elif`, whose condition follows."""
        if not self._around:
            return
        branch = self._around[-1]
        ran = (branch.before, branch.runs)
        before = True if True in ran else None if None in ran else False
        runs = None if condition or before is None else not before
        self._around[-1] = OpenBranch(runs, before, condition, branch.is_if, not condition)
        if branch.is_if:
            names.end_branch(may_run=branch.runs is not False)

    def open_case(self, names: Variables) -> None:
        """`case WORD in`, none of whose branches is read yet."""
        self._around.append(OpenBranch(False, False, is_if=True))
        names.open_branch()

    def pick(self, names: Variables, word: Word, patterns: list[str]) -> None:
        """The branch of a `case` that these patterns begin."""
        if not self._around:
            return
        branch = self._around[-1]
        ran = (branch.before, branch.runs)
        before = True if True in ran else None if None in ran else False
        fits = True if "*" in patterns else _fits(word, patterns)
        runs = False if before or fits is False else fits if before is False else None
        self._around[-1] = OpenBranch(runs, before, False, True, "*" in patterns)
        names.end_branch(may_run=branch.runs is not False)

    def close(self, names: Variables) -> None:
        """`fi`, `esac`, `done`."""
        if not self._around:
            return
        branch = self._around.pop()
        if branch.is_if:
            names.end_branch(may_run=branch.runs is not False)
            names.join_branches(one_runs=branch.is_else or True in (branch.before, branch.runs))


def _fits(word: Word, patterns: list[str]) -> bool | None:
    """Whether a word is of one of the patterns; None where a run decides."""
    import re

    if word.source or any("$" in pattern for pattern in patterns):
        return None
    signs = {r"\*": ".*", r"\?": ".", r"\[": "[", r"\]": "]", r"\-": "-"}
    for pattern in patterns:
        text = re.escape(pattern)
        for escaped, sign in signs.items():
            text = text.replace(escaped, sign)
        try:
            if re.fullmatch(text, word.text, re.S):
                return True
        except re.error:
            return None
    return False


def decided(words: list[Word]) -> bool | None:
    """What a test of plain text says; None for another command, or where a run decides."""
    texts = [word.text for word in words]
    if any(word.source for word in words) or not texts:
        return None
    if texts in (["true"], ["false"]):
        return texts == ["true"]
    if texts[0] not in TESTS and texts[-1] != "]]":  # `[[ A && B ]]` comes in two pieces
        return None
    inner = texts[texts[0] in TESTS : len(texts) - (texts[-1] in ("]", "]]"))]
    turned = inner[:1] == ["!"]
    found = _test(inner[turned:])
    return None if found is None else found != turned


def _test(words: list[str]) -> bool | None:
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[0] == "-n") == bool(words[1])
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in _OPPOSITE:
        found = _test([left, _OPPOSITE[sign], right])
        return None if found is None else not found
    if sign in ("=", "=="):
        return None if any(c in right for c in "*?[") else left == right
    if sign in ("-eq", "-lt", "-le"):
        try:
            one, other = int(left), int(right)
        except ValueError:
            return None
        return one == other if sign == "-eq" else one < other if sign == "-lt" else one <= other
    return None
