"""What a long computation is at: loops say it here, and the command line draws it where somebody
looks on. It costs an attribute a step where nobody does."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeVar

    T = TypeVar("T")


class RunningLoop:
    """The outermost loop that is running: what it counts, how many are done and how many there are
    (0: not known)."""

    def __init__(self) -> None:
        self.what, self.done, self.total = "", 0, 0

    def say(self, what: str, done: int = 0, total: int = 0) -> None:
        """Sets all three; an empty `what` is no loop."""
        self.what, self.done, self.total = what, done, total


NOW = RunningLoop()


def counted(items: Iterable[T], what: str, total: int = 0) -> Iterator[T]:
    """The items, each counted once it is worked on; a loop within another one stays silent."""
    if NOW.what:
        yield from items
        return
    NOW.say(what, 0, total)
    try:
        for item in items:
            yield item
            NOW.done += 1
    finally:
        NOW.say("")
