"""The folder of a shell script, as the script itself works it out.

    DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

Grammar: POSIX.1-2017 Shell Command Language 2.6.3; `BASH_SOURCE` as bash has it.
"""

from __future__ import annotations

import os
import re

from napkinmath.inputs.scripts.shell_words import Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from napkinmath.inputs.scripts.shell_variables import Variables

_SILENT = r"(?:\s*(?:&?>\s*/dev/null|2>\s*&1|2>\s*/dev/null))*"
_ASKED = re.compile(
    rf"\s*(?:cd\s+(?:-P\s+|--\s+)?(?P<cd>.+?){_SILENT}\s*(?:&&|;)\s*pwd(?:\s+-P)?"
    r"|dirname\s+(?:--\s+)?(?P<dirname>.+?)"
    r"|(?:realpath|readlink\s+-(?:f|m|e))\s+(?:--\s+)?(?P<realpath>.+?)"
    rf"){_SILENT}\s*",
    re.DOTALL,
)


def name_script(names: Variables, path: str, *, is_run: bool) -> Mapping[str, Word | None]:
    """Sets `$BASH_SOURCE` to a script's path, and `$0` too where it `is_run`. Returns what they
    were before."""
    places = ("BASH_SOURCE", "0") if is_run else ("BASH_SOURCE",)
    before = {place: names.words.get(place) for place in places}
    for place in places:
        names.words[place] = Word(path, 0)
    names.arrays["BASH_SOURCE"] = [names.words["BASH_SOURCE"]]
    return before


def unname_script(names: Variables, before: Mapping[str, Word | None]) -> None:
    """Sets what `name_script` set to what it was `before`."""
    for place, word in before.items():
        if word is not None:
            names.words[place] = word
    names.arrays["BASH_SOURCE"] = [names.words["BASH_SOURCE"]]


def asked_folder(inner: str, filled: Callable[[str], Word]) -> str | None:
    """What `$(inner)` gives where it asks for a path's folder, by the script's own variables; None
    for another command, and for a path that is not known."""
    asked = _ASKED.fullmatch(inner)
    if asked is None:
        return None
    verb = asked.lastgroup or ""
    path = filled(asked[verb])
    if path.source or not path.text or "$" in path.text or any(c in path.text for c in " \t\n;|&"):
        return None
    if verb == "dirname":
        return os.path.dirname(path.text.rstrip("/")) or "."
    return os.path.normpath(path.text)
