"""The folder of a shell script, as the script itself works it out.

    DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

Grammar: POSIX.1-2017 Shell Command Language 2.6.3; `BASH_SOURCE` as bash has it.
"""

from __future__ import annotations

import os
import re

from napkinmath.inputs.nearby import nearby
from napkinmath.inputs.scripts.shell_words import UNKNOWN, Command, Word, raw_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from napkinmath.inputs.scripts.shell_variables import Variables

# What a command names that is read.
_FILES = (".py", ".yaml", ".yml", ".json", ".toml")
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


def entered(folder: str, command: Command) -> str:
    """The folder after a `cd`, from the one before it, as far as its text says: of `$ROOT/train` the
    known end."""
    given = [word for word in command.words[1:] if not word.text.startswith("-")]
    text = raw_of(given[0]).rpartition(UNKNOWN)[2] if given else ""
    return os.path.join(folder, text.lstrip("/") if given and given[0].source else text)


def in_folder(command: Command, folder: str, path: str) -> Command:
    """A command of the script at `path` with the files that it names in the folder it went to, where
    they are not found without."""
    if not folder or not path:
        return command
    words = [word._replace(text=_placed(word.text, folder, path)) for word in command.words]
    return command._replace(words=words)


def _placed(text: str, folder: str, path: str) -> str:
    if not text.endswith(_FILES) or text.startswith("-") or os.path.exists(nearby(text, path)):
        return text
    inside = nearby(os.path.normpath(os.path.join(folder, text)), path)
    return inside if os.path.isfile(inside) else text
