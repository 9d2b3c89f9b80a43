"""Seconds of collectives of a step by phase: within a node and between nodes, in line and beside the
work."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.timing.overlap import COMMUNICATION, COMMUNICATION_STREAM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Phase
    from napkinmath.ir.order import Order
    from napkinmath.ir.timeline import TimelineSegment


class Sent(Record):
    """Seconds of collectives by the link that they take, hidden or not: beside kernels, and in
    line with them."""

    within_node: float = 0.0
    between_nodes: float = 0.0
    within_node_in_line: float = 0.0
    between_nodes_in_line: float = 0.0

    def plus(self, other: Sent, times: float = 1.0) -> Sent:
        """The sum, the other so many times."""
        return Sent(
            **{
                name: getattr(self, name) + times * getattr(other, name)
                for name in Sent.__record_fields__
            }
        )


def sent_by_phase(segments: Order[TimelineSegment]) -> dict[Phase, Sent]:
    """Seconds of collectives by phase."""
    found: dict[Phase, Sent] = {}
    known: dict[int, Sent] = {}
    for times, segment in segments.counted():
        own = known.get(id(segment))
        if own is None:
            own = known[id(segment)] = _sent_in(segment)
        found[segment.phase] = found.get(segment.phase, Sent()).plus(own, times)
    return found


def _sent_in(segment: TimelineSegment) -> Sent:
    """Seconds of collectives of all repetitions of a segment."""
    seconds = {name: 0.0 for name in Sent.__record_fields__}
    for kernel in segment.kernels:
        if kernel.bound in (COMMUNICATION, COMMUNICATION_STREAM):
            link = "between_nodes" if kernel.between_nodes else "within_node"
            name = f"{link}_in_line" if kernel.bound == COMMUNICATION else link
            seconds[name] += kernel.seconds * segment.repeat
    return Sent(**seconds)
