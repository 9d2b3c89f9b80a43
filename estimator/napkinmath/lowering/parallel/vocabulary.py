"""The loss over a vocabulary that ranks share: each rank holds its columns of the logits, rows
exchange maxima and sums.

Sources: torch 2.13 distributed/tensor/parallel/loss.py (loss_parallel); Megatron-LM
core/tensor_parallel/cross_entropy.py _VocabParallelCrossEntropy; NeMo-RL v0.6.0 (and v0.3.0)
distributed/model_utils.py DistributedLogprob.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import product
from napkinmath.ir.costs import Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Steps, Tensor
    from napkinmath.ir.tape import Tape

NAME = "vocabulary-parallel cross_entropy"
EXCHANGES = 3  # of one number a row: the maximum, the sum of exponentials, the logit of the label


def vocabulary_loss(t: Tape, logits: Value, degree: int) -> Value:
    """Mean cross-entropy of fp32 logits of axes (..., v/t) over `degree` ranks, by the stack's code:
    torch's, Megatron-LM's, NeMo-RL's log-probabilities, or slime's."""
    rows, width = product(logits.axes[:-1]), logits.axes[-1]
    flat = t.view(logits, (rows, width))
    code = t.policy.stack.loss.cross_entropy
    if degree > 1:
        code = t.policy.stack.loss.across_ranks or code
    if code == "chain":
        return _chain(t, flat, rows, degree)
    if code.startswith("log-probabilities"):
        return _log_probabilities(t, flat, rows, degree, one_hot=code != "log-probabilities")
    if code in ("probabilities", "copies with the entropy"):
        return _probabilities(t, flat, rows, degree, copies=code != "probabilities")
    return _megatron(t, flat, rows, degree)


def _exchanges(rows: Size, degree: int) -> tuple[Collective, ...]:
    if degree == 1:
        return ()
    return tuple(
        Collective("all-reduce", rows * 4, ranks=degree, axis="tensor", overlaps=False)
        for _ in range(EXCHANGES)
    )


def _chain(t: Tape, x: Value, rows: Size, degree: int) -> Value:
    """loss_parallel: logits minus their maximum, exponentials, log-probabilities; the first and the
    last are alive together."""
    shifted, powers, kept = (
        t.tensor(n, x.axes, FP32, Role.LOGITS)
        for n in ("logits minus maximum", "exponentials", "log-probabilities")
    )
    loss = t.tensor("loss", (1,), FP32, Role.LOGITS)
    made = ((ALLOC, shifted), (ALLOC, powers), (FREE, powers), (ALLOC, kept), (FREE, shifted))
    out = Value(loss, (1,), FP32, x.requires_grad)
    gradient = t.gradient_of(x)
    gradient.role = Role.LOGITS
    moved = traffic(x)
    t.append(
        NAME,
        (x,),
        (out,),
        forward=(*made, (ALLOC, loss)),
        saves=(kept,),
        costs=(*_exchanges(rows, degree), Move(8 * moved, 8)),
        backward=_chain_backward(t, x, gradient) if x.requires_grad else (),
        gradients=(Gradient(x, gradient),) if x.requires_grad else (),
        backward_costs=(Move(9 * moved, 5),),
    )
    t.last_use[kept] = len(t.ops) - 1
    return out


def _chain_backward(t: Tape, x: Value, gradient: Tensor) -> Steps:
    label, again, summed = (
        t.tensor(n, x.axes, FP32, Role.LOGITS)
        for n in ("gradient of the label", "exponentials", "gradient before its factor")
    )
    return (
        (ALLOC, label),
        (ALLOC, again),
        (ALLOC, summed),
        (FREE, again),
        (ALLOC, gradient),
        (FREE, summed),
        (FREE, label),
    )


def _log_probabilities(t: Tape, x: Value, rows: Size, degree: int, *, one_hot: bool) -> Value:
    """NeMo-RL's: by torch's operations, from a copy of the fp32 logits to probabilities, which stay.
    Their negative becomes the gradient; with `one_hot` (before 0.4) it is made of two int64 copies."""
    names = ("logits minus maximum", "exponentials", "log-probabilities", "probabilities")
    shifted, powers, logs, kept = (t.tensor(n, x.axes, FP32, Role.LOGITS) for n in names)
    scores = t.tensor("log-probability of each row", (rows,), FP32, Role.LOGITS)
    out = Value(scores, (rows,), FP32, x.requires_grad)
    moved, gradient = traffic(x), t.gradient_of(x)
    gradient.role = Role.LOGITS
    forward: Steps = (
        *((ALLOC, shifted), (ALLOC, powers), (FREE, powers), (ALLOC, logs), (FREE, shifted)),
        *((ALLOC, kept), (ALLOC, scores), (FREE, logs)),
    )
    label, chosen = (t.tensor(n, x.axes, INT64, Role.LOGITS) for n in ("one-hot labels", "chosen"))
    made: Steps = ((ALLOC, gradient),)
    if one_hot:
        made = ((ALLOC, label), (ALLOC, chosen), (FREE, label), *made, (FREE, chosen))
    t.append(
        NAME,
        (x,),
        (out,),
        forward=forward,
        saves=(kept,),
        costs=(*_exchanges(rows, degree), Move(10 * moved, 7)),
        backward=made if x.requires_grad else (),
        gradients=(Gradient(x, gradient),) if x.requires_grad else (),
        backward_costs=(Move(14 * moved, 6) if one_hot else Move(4 * moved, 3),),
    )
    t.last_use[kept] = len(t.ops) - 1
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)


def _probabilities(t: Tape, x: Value, rows: Size, degree: int, *, copies: bool) -> Value:
    """slime's: probabilities in one buffer, which stays and becomes the gradient. With `copies` (before
    July 2026) the entropy keeps a copy of the logits and its probabilities, the log-probability
    another copy, which Megatron-LM's loss writes over; their two gradients are added.

    Source: slime utils/ppo_utils.py _VocabParallelLogProbEntropy; before 6a0ee158
    calculate_log_probs_and_entropy, _VocabParallelEntropy.
    """
    names = ("copy for the entropy", "its probabilities") if copies else ()
    names += ("copy that becomes the gradient" if copies else "probabilities",)
    held = tuple(t.tensor(n, x.axes, FP32, Role.LOGITS) for n in names)
    scores = t.tensor("log-probability of each row", (rows,), FP32, Role.LOGITS)
    out, moved = Value(scores, (rows,), FP32, x.requires_grad), traffic(x)
    t.append(
        NAME,
        (x,),
        (out,),
        forward=(*((ALLOC, h) for h in held), (ALLOC, scores)),
        saves=held,
        costs=(*_exchanges(rows, degree), Move(20 * moved, 15) if copies else Move(10 * moved, 6)),
        gradients=(Gradient(x, held[-1]),) if x.requires_grad else (),
        backward_costs=(Move(16 * moved, 8) if copies else Move(4 * moved, 3),),
    )
    for tensor in held:
        t.last_use[tensor] = len(t.ops) - 1
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)


def _megatron(t: Tape, x: Value, rows: Size, degree: int) -> Value:
    """Megatron's: the fp32 logits, or before core 0.8 a copy of them, become their exponentials and
    then the gradient; two masks of one number a row are kept."""
    copies = t.policy.stack.loss.copies_logits
    kept = t.tensor("logits minus maximum", x.axes, FP32, Role.LOGITS) if copies else x.tensor
    names = ("labels of this rank", "labels of other ranks")
    small = tuple(t.tensor(n, (rows,), INT64, Role.LOGITS) for n in names)
    losses = t.tensor("loss of each row", (rows,), FP32, Role.LOGITS)
    out = Value(losses, (rows,), FP32, x.requires_grad)
    moved = traffic(x)
    t.append(
        NAME,
        (x,),
        (out,),
        forward=(
            *(((ALLOC, kept),) if copies else ()),
            *((ALLOC, s) for s in small),
            (ALLOC, losses),
        ),
        saves=(kept, *small),
        costs=(*_exchanges(rows, degree), Move(6 * moved, 6)),
        gradients=(Gradient(x, kept),) if x.requires_grad else (),
        backward_costs=(Move(2 * moved, 2),),
    )
    for tensor in (*small, kept) if copies else small:
        t.last_use[tensor] = len(t.ops) - 1
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)
