"""What a shell makes of a variable's text: `${A##*/}`, `${A%.yaml}`, `${A/x/y}`, `${A,,}`, `${#A}`.

Grammar: POSIX.1-2017 Shell Command Language 2.6.2; `/`, `,,` and `^^` as bash has them.
"""

from __future__ import annotations

from napkinmath.inputs.scripts.shell_words import Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.shell_variables import Variables

_CASES = {",,": str.lower, "^^": str.upper}
_SPECIAL = "?[]\\$`\"'"


def made_of(inner: str, name: str, rest: str, names: Variables) -> list[Word] | None:
    """What `${inner}` makes of the variable of a name, with the words behind it; None for what is
    not followed."""
    place, bracket, behind = rest[1:].partition("]")
    if name in names.arrays and rest[:1] == "[" and bracket and place.isdecimal():  # ${NAME[1]}
        found = names.arrays[name][int(place[:4]) :][:1]
        if not behind or (behind.startswith((":-", "-")) and found and found[0].text):
            return found
    counted = inner[1:-3]
    if counted in names.arrays and inner in (f"#{counted}[@]", f"#{counted}[*]"):
        unknown = next((word for word in names.arrays[counted] if word.source), None)
        return [unknown or Word(str(len(names.arrays[counted])), 0)]
    known = names.words.get(name)
    text = None if known is None or known.source or not rest else _changed(known.text, rest)
    return None if text is None else [Word(text, 0)]


def _changed(text: str, rest: str) -> str | None:
    """A variable's text after the words behind its name; None for what is not followed."""
    if rest in _CASES:
        return _CASES[rest](text)
    if rest.startswith("/"):
        return _replaced(text, rest)
    for sign in ("##", "#", "%%", "%"):
        if rest.startswith(sign):
            return _without(text, sign, rest[len(sign) :])
    return None


def _without(text: str, sign: str, pattern: str) -> str | None:
    """Without the shortest or longest begin or end that a pattern with at most one `*` matches."""
    if any(char in pattern for char in _SPECIAL) or pattern.count("*") > 1:
        return None
    before, star, after = pattern.partition("*")
    starts = sign[0] == "#"
    if not star:
        return text.removeprefix(pattern) if starts else text.removesuffix(pattern)
    if starts:
        found = text.rfind(after) if sign == "##" else text.find(after, len(before))
        matches = text.startswith(before) and found >= len(before)
        return text[found + len(after) :] if matches else text
    last = len(text) - len(after)
    found = text.find(before) if sign == "%%" else text.rfind(before, 0, max(last, 0))
    return text[:found] if text.endswith(after) and found >= 0 else text


def _replaced(text: str, rest: str) -> str | None:
    """`/x/y` replaces the first x, `//x/y` every one."""
    every = rest.startswith("//")
    old, _, new = rest[1 + every :].partition("/")
    if not old or any(char in old + new for char in _SPECIAL + "*#%"):
        return None
    return text.replace(old, new, -1 if every else 1)
