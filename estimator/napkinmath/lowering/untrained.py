"""Weights that a block holds and no gradient reaches."""

from __future__ import annotations

from napkinmath.ir.tape import Tape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.ledger import Value


def leave_untrained(t: Tape, results: Sequence[Value | None]) -> None:
    """Weights from which no way leads to a result get no gradient (a pooler whose output nobody
    reads), and optimizers make no state for a parameter without one (torch optim/adamw.py
    _init_group). What such operations keep goes with the block: their graph is held by its results
    alone."""
    reached = {id(value) for value in results}
    for op in reversed(t.ops):
        if any(id(out) in reached for out in op.outputs):
            reached.update(id(gradient.of) for gradient in op.gradients)
        elif op.saves:
            t.touch(*op.saves)
            op.saves = ()
    for weight in t.weights:
        if id(weight.value) not in reached and not weight.tied_to:
            weight.trainable = False
