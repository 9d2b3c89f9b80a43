"""Shell files beside a script that it sources, or runs."""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError
from napkinmath.inputs.nearby import nearby
from napkinmath.models.config_file import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.shell_words import Word

SOURCES = ("source", ".")
_SHELLS = ("bash", "sh", "zsh")
_RUNS = (".sh", ".bash", ".slurm", ".sbatch")
_MOST_TEXT = 1 << 18
_MOST_FILES = 8


class ShellFiles:
    """What lies beside a script; a file is read once for each place that names it."""

    def __init__(self, script: str, *, runs: bool) -> None:
        self.script, self.runs = script if os.path.isfile(script) else "", runs
        self.read: list[str] = []
        """Paths of the files that were read."""

    def named(self, words: list[Word]) -> tuple[str, list[Word]] | None:
        """(text, its own words) of the file that `source FILE` reads, or, where they are followed,
        `bash FILE ...` or `./FILE ...` runs; None where it is not here."""
        first = words[0].text
        is_source = first in SOURCES and len(words) > 1
        if is_source or (self.runs and first in _SHELLS and len(words) > 1):
            named, rest = words[1], words[2:]
        elif self.runs and first.endswith(_RUNS):
            named, rest = words[0], words[1:]
        else:
            return None
        if not self.script or not (is_source or named.text.endswith(_RUNS)):
            return None
        # a folder that a run works out is mostly that of the script
        name = os.path.basename(named.text) if named.source else named.text
        path = nearby(name, self.script) if name else ""
        if not os.path.isfile(path) or len(self.read) >= _MOST_FILES:
            return None
        try:
            text = read_text(path, what="script")
        except InputError:
            return None
        self.read.append(path)
        return (text, rest) if len(text) <= _MOST_TEXT else None
