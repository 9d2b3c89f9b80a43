"""Segments that come to the same: layers of two kinds in turn have as many segments as layers, and a
few contents."""

from __future__ import annotations

from napkinmath.ir.ledger import Tensor, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from napkinmath.base.expr import Size
    from napkinmath.ir.step import Segment


class Alike:
    """What was found of segments, once for all that are alike: of the same phase and symbols, with
    the same events or with what `content` gives of them."""

    __slots__ = ("_by_content", "_by_events", "_content")

    def __init__(self, content: Callable[[Segment], tuple[object, ...]]) -> None:
        self._content = content
        self._by_events: dict[tuple[object, ...], Any] = {}
        self._by_content: dict[tuple[object, ...], Any] = {}

    def of(self, segment: Segment, make: Callable[[Segment], Any]) -> Any:
        """What is known of a segment like this one, else what `make` finds."""
        kind = segment.phase, segment.symbols
        same = *kind, id(segment.events)
        found = self._by_events.get(same)
        if found is None:
            alike = *kind, self._content(segment)
            found = self._by_content.get(alike)
            if found is None:
                found = self._by_content[alike] = make(segment)
            self._by_events[same] = found
        return found


def moves(segment: Segment) -> Iterator[tuple[str, Size]]:
    """What is allocated and freed, in order, with its bytes."""
    for action, payload in segment.events:
        if isinstance(payload, Tensor):
            yield action, payload.requested


def works(segment: Segment) -> Iterator[Work]:
    """What is computed, in order."""
    for _, payload in segment.events:
        if isinstance(payload, Work):
            yield payload
