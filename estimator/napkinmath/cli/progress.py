"""One line on a terminal's standard error while a command works for longer than half a second; it
is gone before anything else is written.

A thread draws it, so that what imports or compiles for seconds shows its time as well. It is made
with `_thread`, which costs the start nothing.
"""

from __future__ import annotations

import sys
import time

from napkinmath.base.progress import NOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

AFTER_S, EVERY_S = 0.5, 0.1
BAR = 24
# These wait for somebody, write as they go, or draw a bar of their own.
SILENT = ("serve", "watch", "calibrate", "bench", "oom")
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Draws on `stream` until `end`; what is written through `guarded` streams takes its place."""

    def __init__(self, stream: TextIO, name: str) -> None:
        import _thread

        self._stream, self._name = stream, name
        self._last = self._start = self._since = time.monotonic()
        self._what = ""
        self._drawn = self._within_line = False
        self._writing, self._ended, self._gone = (_thread.allocate_lock() for _ in range(3))
        self._ended.acquire()
        self._gone.acquire()
        _thread.start_new_thread(self._draw_until_ended, ())

    def _draw_until_ended(self) -> None:
        try:
            while not self._ended.acquire(timeout=EVERY_S):
                with self._writing:
                    self._draw()
        except (OSError, ValueError):  # the terminal is gone
            pass
        finally:
            self._gone.release()

    def _draw(self) -> None:
        now = time.monotonic()
        if self._what != NOW.what:
            self._what, self._since = NOW.what, now
        if self._within_line or now - self._last < AFTER_S:
            return
        seconds = now - self._start, now - self._since
        text = line(self._name, *seconds, unicode=_is_unicode(self._stream))
        self._drawn = True
        self._stream.write(_CLEAR + text[: _columns(self._stream) - 1])
        self._stream.flush()

    def clear(self) -> None:
        """Takes the line off the terminal."""
        if self._drawn:
            self._drawn = False
            self._stream.write(_CLEAR)
            self._stream.flush()

    def give_way(self, write: Callable[[str], int], text: str) -> int:
        """Writes text where the line stood; the line waits half a second, and for the text's last
        newline."""
        with self._writing:
            self.clear()
            self._last = time.monotonic()
            self._within_line = not text.endswith("\n") if text else self._within_line
            return write(text)

    def end(self) -> None:
        """Stops the thread and takes the line off."""
        self._ended.release()
        self._gone.acquire()
        try:
            self.clear()
        except (OSError, ValueError):
            self._drawn = False


class Guarded:
    """A stream whose text takes the place of the line."""

    def __init__(self, stream: TextIO, drawn: ProgressLine) -> None:
        self._stream, self._line = stream, drawn

    def write(self, text: str) -> int:
        """Writes text where the line stood; returns its characters."""
        return self._line.give_way(self._stream.write, text)

    def writelines(self, lines: list[str]) -> None:
        """Writes the lines as one text."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def started(arguments: list[str]) -> ProgressLine | None:
    """The line of a command whose standard error is a terminal, with both streams guarded; None
    where nobody looks on."""
    import os

    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if name in SILENT or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty():
        return None
    drawn = ProgressLine(sys.stderr, name)
    sys.stderr = Guarded(sys.stderr, drawn)  # pyright: ignore[reportAttributeAccessIssue]
    if sys.stdout.isatty():
        sys.stdout = Guarded(sys.stdout, drawn)  # pyright: ignore[reportAttributeAccessIssue]
    return drawn


def line(name: str, seconds: float, in_loop: float, *, unicode: bool) -> str:
    """'plan  ████      312 of 1,024 combinations  3 s, 7 s left', from what the outermost loop
    says and the seconds since the command and the loop began."""
    what, done, total = NOW.what, NOW.done, NOW.total
    parts = [name or "estimate"]
    if what and total:
        filled = BAR * min(done, total) // total
        parts.append(f"{('█' if unicode else '#') * filled:<{BAR}}")
        parts.append(f"{done:,} of {total:,} {what}")
    elif what:
        parts.append(f"{done:,} {what}" if done else what)
    left = in_loop * (total - done) / done if what and 0 < done < total else 0.0
    return "  ".join([*parts, f"{seconds:.0f} s" + (f", {left:.0f} s left" if left else "")])


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _columns(stream: TextIO) -> int:
    import os

    try:
        return max(os.get_terminal_size(stream.fileno()).columns, 20)
    except (OSError, ValueError):
        return 80
