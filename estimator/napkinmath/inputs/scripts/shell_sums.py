"""Sums that a shell script works out for itself: `((N = N * 4))`, `let N+=1`, `((N > 1))`, `{1..4}`.

Grammar: bash reference manual, shell arithmetic and brace expansion.
"""

from __future__ import annotations

import re

from napkinmath.inputs.scripts.shell_words import Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.shell_variables import Variables

_SETS = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.S)
_STEPS = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*")
_COMPARES = re.compile(r"([^<>=!&|]+)(==|!=|<=|>=|<|>)([^<>=!&|]+)")
_BRACES = re.compile(r"\{(?:([\w.-]+(?:,[\w.-]+)+)|(\d+)\.\.(\d+))\}(?=[\s;]|$)")
_MOST = 256


def set_by(text: str, line: int, names: Variables) -> tuple[str, Word] | None:
    """The variable that a sum sets, and its value; None for a sum that sets nothing."""
    if found := _STEPS.fullmatch(text):
        name, sign = found[1] or found[4], (found[2] or found[3])[0]
        return name, _valued(f"{name} {sign} 1", line, names)
    found = _SETS.fullmatch(text)
    if found is None:
        return None
    name, sign, rest = found.groups()
    return name, _valued(f"{name} {sign} ({rest})" if sign else rest, line, names)


def _valued(text: str, line: int, names: Variables) -> Word:
    value = names.sum_of(text)
    return Word("", line, f"(({text.strip()}))") if value is None else Word(str(value), line)


def compared(text: str, names: Variables) -> bool | None:
    """What a comparison of two sums says; None where a run decides."""
    found = _COMPARES.fullmatch(text)
    if found is None:
        value = names.sum_of(text)
        return None if value is None else value != 0
    left, right = names.sum_of(found[1]), names.sum_of(found[3])
    if left is None or right is None:
        return None
    return {
        "==": left == right,
        "!=": left != right,
        "<=": left <= right,
        ">=": left >= right,
        "<": left < right,
        ">": left > right,
    }[found[2]]


def braced(text: str, at: int) -> tuple[list[str], int]:
    """The words of `{1,2}` or `{1..4}`, which begins at a place, and how long it is; none where
    braces group commands."""
    found = _BRACES.match(text, at)
    if found is None:
        return [], 0
    if found[1]:
        return found[1].split(","), len(found[0])
    first, last = int(found[2][:6]), int(found[3][:6])
    step = 1 if first <= last else -1
    return [str(number) for number in range(first, last + step, step)[:_MOST]], len(found[0])
