"""The text of a shell script, and the place in it that is read."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.shell_words import BLANK

MAX_WORDS = 1 << 16
ENDS = ";&|\n(){}"
NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789")


class ShellText:
    """A text that is read from its begin to its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.calling = ""
        """What sources this text, and may call its functions."""

    def skip_blank(self) -> None:
        """Steps over blanks, continued lines and comments."""
        while self.at < len(self.text):
            if self.text[self.at] in BLANK:
                self.advance(1)
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self.advance(self.text.index("\n", self.at) + 1 - self.at)
            elif self.is_comment():
                end = self.text.find("\n", self.at)
                self.advance((len(self.text) if end < 0 else end) - self.at)
            else:
                return

    def is_comment(self) -> bool:
        """Whether a comment begins here."""
        return self.text[self.at] == "#" and (
            self.at == 0 or self.text[self.at - 1] in BLANK + ENDS
        )

    def is_redirection(self) -> bool:
        """Whether `<`, `>` or `2>` begins here."""
        digit = self.text[self.at].isdecimal()
        sign = self.text[self.at + digit : self.at + digit + 1]
        return sign in ("<", ">") and (digit or not self.placeholder())

    def closing(self, opening: str, closing: str) -> int:
        """The place behind the closing bracket of the pair that begins here."""
        depth, at = 0, self.at
        while at < len(self.text):
            depth += (self.text[at] == opening) - (self.text[at] == closing)
            at += 1
            if not depth and self.text[at - 1] == closing:
                return at
        return len(self.text)

    def advance(self, count: int) -> None:
        """Steps over so many characters."""
        end = min(self.at + count, len(self.text))
        self.line += self.text.count("\n", self.at, end)
        self.at = max(end, self.at)

    def count(self, words: int) -> None:
        """Raises InputError where a line grows to more words than a launch has."""
        if words > MAX_WORDS:
            raise InputError(
                f"line {self.line} of the script grows to more than {MAX_WORDS} words; give the"
                " launch line after `--`"
            )

    def placeholder(self) -> str:
        """`<PATH TO DATA>`, which a user is to replace; '' where none begins here."""
        import re

        found = re.compile(r"<[A-Za-z](?:[\w ./-]*[\w])?>").match(self.text, self.at)
        return found[0] if found else ""
