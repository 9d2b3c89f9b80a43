"""The one exception of this package, and the one line it carries."""

from __future__ import annotations


class KernelInputError(ValueError):
    """Input that a kernel does not take: the message says what was given, what is accepted, and the
    fallback."""

    def __init__(self, op: str, given: str, accepted: str, fallback: str) -> None:
        super().__init__(f"{op}: got {given}; accepted: {accepted}; instead: {fallback}")
        self.op = op
