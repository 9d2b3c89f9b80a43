"""A results folder as one file: some machines give back few files, and none after a kill."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

#: Seconds between two archives of a run that goes on: what a kill may cost.
EVERY_S = 20.0


class Archive:
    """A folder in one .tar.gz, which is whole at any moment; no file, nothing is done."""

    def __init__(self, folder: Path | None, file: Path | None) -> None:
        self.folder, self.file = folder, file
        self._written = -EVERY_S

    def keep(self, *, at_once: bool = False) -> None:
        """Writes the folder as it is now, unless it was written a moment ago."""
        if self.file is None or self.folder is None:
            return
        now = time.monotonic()
        if not at_once and now - self._written < EVERY_S:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_name(self.file.name + ".part")
        with tarfile.open(beside, "w:gz", compresslevel=1) as found:
            for path in sorted(self.folder.iterdir()):
                if path.is_file() and path not in (self.file, beside):
                    found.add(path, path.name)
        os.replace(beside, self.file)
        self._written = now
