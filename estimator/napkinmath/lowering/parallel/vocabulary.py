"""The loss over a vocabulary that ranks share: each rank holds its columns of the logits, rows
exchange maxima and sums.

Sources: torch 2.13 distributed/tensor/parallel/loss.py (loss_parallel); Megatron-LM
core/tensor_parallel/cross_entropy.py _VocabParallelCrossEntropy.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import product
from napkinmath.ir.costs import Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.tape import Tape
    from napkinmath.lowering.parallel.tensor import TensorSplit

EXCHANGES = 3  # of one number a row: the maximum, the sum of exponentials, the logit of the label


def vocabulary_loss(t: Tape, logits: Value, split: TensorSplit) -> Value:
    """Mean cross-entropy of fp32 logits of axes (..., v/t), as the style's library computes it."""
    rows, width = product(logits.axes[:-1]), logits.axes[-1]
    flat = t.view(logits, (rows, width))
    return (
        _in_place(t, flat, rows, split)
        if split.style.gathers_again
        else _chain(t, flat, rows, split)
    )


def _exchanges(rows: Size, split: TensorSplit) -> tuple[Collective, ...]:
    return tuple(
        Collective("all-reduce", rows * 4, ranks=split.degree, axis="tensor", overlaps=False)
        for _ in range(EXCHANGES)
    )


def _chain(t: Tape, x: Value, rows: Size, split: TensorSplit) -> Value:
    """loss_parallel: logits minus their maximum, exponentials, log-probabilities; the first and the
    last are alive together."""
    shifted, powers = (
        t.tensor(n, x.axes, FP32, Role.LOGITS) for n in ("logits minus maximum", "exponentials")
    )
    kept, loss = (
        t.tensor("log-probabilities", x.axes, FP32, Role.LOGITS),
        t.tensor("loss", (1,), FP32, Role.LOGITS),
    )
    out = Value(loss, (1,), FP32, x.requires_grad)
    forward = (
        (ALLOC, shifted),
        (ALLOC, powers),
        (FREE, powers),
        (ALLOC, kept),
        (FREE, shifted),
        (ALLOC, loss),
    )
    steps = [
        t.tensor(n, x.axes, FP32, Role.LOGITS)
        for n in ("gradient of the label", "exponentials", "gradient before its factor")
    ]
    gradient = t.gradient_of(x)
    gradient.role = Role.LOGITS
    label, again, summed = steps
    backward = (
        (ALLOC, label),
        (ALLOC, again),
        (ALLOC, summed),
        (FREE, again),
        (ALLOC, gradient),
        (FREE, summed),
        (FREE, label),
    )
    moved = traffic(x)
    t.append(
        "vocabulary-parallel cross_entropy",
        (x,),
        (out,),
        forward=forward,
        saves=(kept,),
        costs=(*_exchanges(rows, split), Move(8 * moved, 8)),
        backward=backward if x.requires_grad else (),
        gradients=(Gradient(x, gradient),) if x.requires_grad else (),
        backward_costs=(Move(9 * moved, 5),),
    )
    t.last_use[kept] = len(t.ops) - 1
    return out


def _in_place(t: Tape, x: Value, rows: Size, split: TensorSplit) -> Value:
    """Megatron's: the fp32 logits become their exponentials and then the gradient; two masks of one
    number a row are kept."""
    small = tuple(
        t.tensor(n, (rows,), INT64, Role.LOGITS)
        for n in ("labels of this rank", "labels of other ranks")
    )
    losses = t.tensor("loss of each row", (rows,), FP32, Role.LOGITS)
    out = Value(losses, (rows,), FP32, x.requires_grad)
    moved = traffic(x)
    t.append(
        "vocabulary-parallel cross_entropy",
        (x,),
        (out,),
        forward=(*((ALLOC, s) for s in small), (ALLOC, losses)),
        saves=(x.tensor, *small),
        costs=(*_exchanges(rows, split), Move(6 * moved, 6)),
        gradients=(Gradient(x, x.tensor),) if x.requires_grad else (),
        backward_costs=(Move(2 * moved, 2),),
    )
    for tensor in small:
        t.last_use[tensor] = len(t.ops) - 1
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)
