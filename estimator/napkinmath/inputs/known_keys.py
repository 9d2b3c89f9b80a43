"""What is known of the keys of a tool's job files: those without effect, and those that change
memory or time and are not priced (keys/*.json, each with its source).

A key is named in full; nothing is swallowed by how it begins. What a reader takes is priced, and
stands in no table.
"""

from __future__ import annotations

import os

from napkinmath.base.json_text import loads
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FOLDER = os.path.join(os.path.dirname(__file__), "keys")
_OFF = ("", "false", "no", "none", "null", "off")


class KnownKeys:
    """The tables of one tool and of those whose keys it takes too."""

    def __init__(self, name: str) -> None:
        self.known: dict[str, JobKey] = {}
        self.needs: dict[str, str] = {}
        """Keys that mean something only with another one."""
        self.usual: dict[str, list[object]] = {}
        """Values of a key with which the run is the one that is priced."""
        self.sections: dict[str, str] = {}
        """How the keys of another tool begin here -> that tool."""
        self.near: dict[str, str] = {}
        """What an unknown key may mean, as far as it was asked."""
        self._read(name)

    def _read(self, name: str) -> None:
        with open(os.path.join(FOLDER, f"{name}.json"), encoding="utf-8") as file:
            table: dict[str, Any] = loads(file.read())
        for other in table.get("extends", ()):
            self._read(other)
        self.sections |= table.get("sections", {})
        for why, names in table["no_effect"].items():
            for key in names:
                self.known[key] = JobKey(name=key, use=KeyUse.NO_EFFECT, why=why)
        for group in table["not_priced"]:
            memory, time = Difference(group["memory"]), Difference(group["time"])
            for key in group["keys"]:
                self.known[key] = JobKey(
                    name=key,
                    use=KeyUse.NOT_PRICED,
                    why=group["why"],
                    memory=memory,
                    time=time,
                    option=group.get("option", ""),
                )
                self.needs[key] = group.get("with", "")
                self.usual[key] = group.get("unless", [])

    def beside(self, name: str, prefix: str) -> list[str]:
        """The known keys of a dotted key's own section, without the prefix that the file has left
        out of them ('zero_optimization.')."""
        section = name.rpartition(".")[0]
        return [
            known.removeprefix(prefix)
            for known in self.known
            if known.rpartition(".")[0] == section
        ]

    def of(self, name: str, value: object, content: Mapping[str, object]) -> JobKey:
        """What becomes of a key that no reader took, with its value, among the others of its
        file."""
        if is_off(value):
            return JobKey(name=name, use=KeyUse.NO_EFFECT, why="given as off")
        if value in self.usual.get(name, ()):
            return JobKey(name=name, use=KeyUse.NO_EFFECT, why="given as what is priced")
        needed = self.needs.get(name)
        if needed and is_off(content.get(needed)):
            return JobKey(name=name, use=KeyUse.NO_EFFECT, why=f"{needed} is off")
        return self.known.get(name) or self._within(name, value, content)

    def _within(self, name: str, value: object, content: Mapping[str, object]) -> JobKey:
        """What the tool knows of a key whose part of the file it is; unknown where it is none's."""
        for start, tool in self.sections.items():
            if name.startswith(start):
                found = known_keys(tool).of(name.removeprefix(start), value, content)
                return found.replace(name=name)
        return JobKey(name=name, use=KeyUse.UNKNOWN)


_read: dict[str, KnownKeys] = {}


def known_keys(name: str) -> KnownKeys:
    """The tables of a tool, read once."""
    if name not in _read:
        _read[name] = KnownKeys(name)
    return _read[name]


def is_off(value: object) -> bool:
    """Whether a value says that its key is not used: null, false, 0, no, [] or {}."""
    if isinstance(value, str):
        return value.strip().lower() in _OFF
    return value is None or value is False or value in (0, [], {}, ())


def settled(keys: JobKeys, given: Mapping[str, object]) -> JobKeys:
    """The keys with those priced that an option given beside the file prices."""
    return keys.replace(
        keys=tuple(
            key.replace(use=KeyUse.PRICED, why="", memory=Difference.NONE, time=Difference.NONE)
            if key.use is KeyUse.NOT_PRICED and key.option in given
            else key
            for key in keys.keys
        )
    )
