"""Fenced blocks of Markdown pages with what the comment above them says of how they are run.

A comment in front of a block is `<!-- not run: REASON -->` or `<!-- given: NAME, ... -->`; no
reader sees it. Behind a command, `# exits 1` says its exit code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\s*$")
COMMENT = re.compile(r"^<!-- (not run|given): (.+) -->$")
EXITS = re.compile(r"#.*\bexits (\d+)")
COMMANDS = ("estimate ", "make ", "python ", "pip ")
RUN = ("sh", "python")
# Why a block may stay unrun.
REASONS = (
    "needs a GPU",
    "needs the network",
    "takes minutes",
    "waits for a browser",
    "is part of a script of yours",
    "is this test's own caller",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: where it starts, its language, its text, and what is said of it."""

    page: str
    line: int
    language: str
    text: str
    said: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and "not run" not in self.said

    def commands(self) -> list[str]:
        """The lines of a shell block that are commands, with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def exit_code(command: str) -> int:
    """The code that a command's comment says it exits with, else 0."""
    said = EXITS.search(command)
    return int(said.group(1)) if said else 0


def blocks_of(page: Path, root: Path) -> list[Block]:
    """Every fenced block of a page; a block without a language that starts with a command is one of
    sh."""
    found: list[Block] = []
    said: dict[str, str] = {}
    start, language, inside = 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if start and line.strip() == "```":
            text = "\n".join(inside)
            named = language or ("sh" if text.lstrip().startswith(COMMANDS) else "text")
            found.append(
                Block(
                    page=str(page.relative_to(root)),
                    line=start,
                    language=named,
                    text=text,
                    said=said,
                )
            )
            start, said = 0, {}
        elif start:
            inside.append(line)
        elif fence:
            start, language, inside = number, fence.group(1), []
        elif comment := COMMENT.match(line.strip()):
            said = {**said, comment.group(1): comment.group(2)}
        elif line.strip():
            said = {}
    return found
