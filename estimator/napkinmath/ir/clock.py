"""What laying out a timeline asks of the clock that prices its work; only type checkers load this."""

from __future__ import annotations

from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Bindings
    from napkinmath.ir.ledger import Work
    from napkinmath.ir.timeline import Kernel


class WorkClock(Protocol):
    """Seconds of the work of an event."""

    def kernels(self, work: Work, bind: Bindings) -> list[Kernel]:
        """The kernels of an event with their seconds, its sizes bound by `bind`."""
        ...
