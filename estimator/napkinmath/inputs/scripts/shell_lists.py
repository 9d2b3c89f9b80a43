"""Lists in one text that a shell script splits, joins or counts: `IFS=, read -ra GPUS <<< "0,1"`,
`$(IFS=,; echo "${GPUS[*]}")`, `$(echo "0,1" | tr ',' '\\n' | wc -l)`.

Grammar: bash reference manual, `read` and word splitting; POSIX.1-2017 utilities tr, wc, awk, grep.
"""

from __future__ import annotations

import re

from napkinmath.inputs.scripts.shell_words import Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_JOINED = re.compile(r"IFS=(['\"]?)(.?)\1\s*;\s*(?:echo|printf '%s')\s+\"?\$\{(\w+)\[\*\]\}\"?\s*")
_PIPED = re.compile(r"(?:echo|printf)\s+(?:-n\s+|'%s'\s+|\"%s\"\s+)?([^|]+?)\s*\|\s*(.+?)\s*", re.S)
_IN_LINES = re.compile(r"tr\s+(?:-s\s+)?(['\"]?)(.)\1\s+(['\"]?)\\n\3\s*\|\s*wc\s+-l")
_FIELDS = re.compile(r"awk\s+-F\s*(['\"]?)(.)\1\s+(['\"])\s*\{\s*print\s+NF;?\s*\}\s*\3")
_FOUND = re.compile(r"grep\s+-o\s+(['\"]?)(.)\1\s*\|\s*wc\s+-l")
_WORDS = re.compile(r"wc\s+-w")


def read_array(words: list[Word], settings: Mapping[str, Word], text: Word) -> list[Word] | None:
    """The array that `read -a NAME <<< TEXT` sets; None where no array is read."""
    flags = [word.text for word in words[1:-1] if word.text.startswith("-")]
    if len(words) < 3 or not (flags and flags[-1].endswith("a") and len(flags) == len(words) - 2):
        return None
    if text.source:
        return [Word("", text.line, text.source)]
    apart = settings["IFS"].text if "IFS" in settings else ""
    line = text.text.partition("\n")[0]
    parts = re.split(f"[{re.escape(apart)}]", line) if apart.strip() else line.split()
    return [Word(part.strip(), text.line) for part in parts if part.strip()]


def listed(
    inner: str, arrays: Mapping[str, list[Word]], filled: Callable[[str], Word]
) -> str | None:
    """What a command in `$(...)` makes of a list: its members joined, or their number; None for
    another command. `filled` gives a text with its variables."""
    if (joined := _JOINED.fullmatch(inner.strip())) is not None:
        members = arrays.get(joined[3])
        known = members is not None and not any(word.source for word in members)
        return (joined[2] or " ").join(word.text for word in members or ()) if known else None
    piped = _PIPED.fullmatch(inner.strip())
    if piped is None:
        return None
    for pattern, more in ((_IN_LINES, 1), (_FIELDS, 1), (_FOUND, 0), (_WORDS, 0)):
        if (found := pattern.fullmatch(piped[2])) is not None:
            text = filled(piped[1])
            if text.source:
                return None
            return str(
                text.text.count(found[2]) + more if found.re.groups else len(text.text.split())
            )
    return None
