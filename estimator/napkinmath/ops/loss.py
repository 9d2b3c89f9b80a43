"""Losses over the vocabulary: transformers' fp32 cross-entropy, and the chunked and fused linear
forms that never hold all logits."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64, DType
from napkinmath.base.expr import Size, ceil_div, minimum, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import constant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def cross_entropy(t: Tape, logits: Value, *, upcast: bool = True, shifted: bool = False) -> Value:
    """`logits.float()` then `F.cross_entropy`: log-probabilities are kept in fp32, and backward
    makes two more tensors of b·s·v.

    nll_loss's backward fills a zero tensor, log_softmax's backward makes the gradient, the upcast's
    backward casts it.
    """
    wide = (
        cast(t, logits, FP32, role=Role.LOGITS)
        if upcast or t.policy.autocast is not None
        else logits
    )
    split = t.policy.tensor
    if split is not None and split.splits_loss(logits):
        targets = next_token_labels(t, wide) if shifted else None
        loss = split.loss(t, wide)
        t.touch(wide.tensor, *(() if targets is None else (targets.tensor,)))
        return loss
    rows = product(wide.axes[:-1])
    flat = t.view(wide, (rows, wide.axes[-1]))
    targets = next_token_labels(t, wide) if shifted else None
    log_probabilities = t.op(
        "log_softmax",
        (flat,),
        flat.axes,
        flat.dtype,
        gradients=("like",),
        costs=(Move(2 * traffic(flat)),),
        backward_costs=(Move(3 * traffic(flat)),),
        role=Role.LOGITS,
    )
    if log_probabilities.requires_grad:
        op = t.ops[-1]
        op.saves = (log_probabilities.tensor,)
        _as_logits(op.gradients)
    loss = t.op(
        "nll_loss",
        (log_probabilities,),
        (1,),
        flat.dtype,
        saves=(log_probabilities, targets),
        gradients=("like",),
        costs=(Move(traffic(flat) // 64),),
        backward_costs=(Move(traffic(flat)),),
        role=Role.LOGITS,
    )
    if loss.requires_grad:
        _as_logits(t.ops[-1].gradients)
    t.touch(wide.tensor)  # the fp32 logits are a local of the loss function
    return loss


def cross_entropy_in_place(t: Tape, logits: Value) -> Value:
    """Loss and log-sum-exp of each row in one kernel, backward writes the gradient over the logits.

    Source: unsloth kernels/cross_entropy_loss.py Fast_CrossEntropyLoss, as carried by
    fms-acceleration.
    """
    rows = product(logits.axes[:-1])
    flat = t.view(logits, (rows, logits.axes[-1]))
    losses, sums = (
        t.tensor(n, (rows,), FP32, Role.LOGITS)
        for n in ("loss of each row", "log-sum-exp of each row")
    )
    out = Value(losses, (rows,), FP32, flat.requires_grad)
    moved = traffic(flat)
    t.append(
        "cross_entropy in place",
        (flat,),
        (out,),
        forward=((ALLOC, losses), (ALLOC, sums)),
        saves=(flat.tensor, sums),
        costs=(Move(moved),),
        gradients=(Gradient(flat, flat.tensor),) if flat.requires_grad else (),
        backward_costs=(Move(2 * moved),),
    )
    t.last_use[sums] = len(t.ops) - 1
    total = t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)
    return total


def next_token_labels(t: Tape, logits: Value) -> Value:
    """Labels padded by one and shifted: two small integer tensors (transformers 5.23
    loss/loss_utils.py ForCausalLMLoss)."""
    *batch, length, _ = logits.axes
    padded = constant(t, "padded labels", (*batch, length + 1), INT64, Role.LOGITS)
    shifted = constant(t, "shifted labels", (*batch, length), INT64, Role.LOGITS)
    t.touch(padded.tensor)
    return shifted


def _as_logits(gradients: tuple[Gradient, ...]) -> None:
    for gradient in gradients:
        if gradient.tensor is not None:
            gradient.tensor.role = Role.LOGITS


def linear_cross_entropy(
    t: Tape,
    x: Value,
    w: Value,
    *,
    chunk_rows: Size | None = None,
    chunk_copies: int = 2,
    chunk_dtype: DType = FP32,
    temporaries: Sequence[Tensor] = (),
) -> Value:
    """Head and loss in one operation that holds the logits of `chunk_rows` tokens at a time.

    The gradients of x and, if trained, of w are made in the forward and kept; backward scales them
    (Liger's FusedLinearCrossEntropy). `chunk_copies` logit-sized tensors of `chunk_dtype` live
    during a chunk, and the temporaries given.
    """
    rows, vocabulary, width = product(x.axes[:-1]), w.axes[0], w.axes[1]
    chunk = minimum(
        rows, chunk_rows if chunk_rows is not None else ceil_div(rows * width, vocabulary)
    )
    chunks = [
        *temporaries,
        *(
            t.tensor(
                f"logits of a chunk, copy {i + 1}", (chunk, vocabulary), chunk_dtype, Role.LOGITS
            )
            for i in range(chunk_copies)
        ),
    ]
    loss = t.tensor("loss", (1,), FP32, Role.LOGITS)
    out = Value(loss, (1,), FP32, x.requires_grad or w.requires_grad)
    made = [Gradient(v, t.gradient_of(v)) for v in (x, w) if v.requires_grad]
    kept = [g.tensor for g in made if g.tensor is not None]
    forward = (
        (ALLOC, loss),
        *((ALLOC, g) for g in kept),
        *((ALLOC, c) for c in chunks),
        *((FREE, c) for c in chunks),
    )
    costs = [Gemm(rows, vocabulary, width, x.dtype), Move(4 * rows * vocabulary * 2)]
    costs += [Gemm(rows, width, vocabulary, x.dtype)] * x.requires_grad + [
        Gemm(vocabulary, width, rows, x.dtype)
    ] * w.requires_grad
    for tensor in (loss, *kept):
        t.last_use[tensor] = len(t.ops)
    t.append(
        "linear_cross_entropy",
        (x, w),
        (out,),
        forward=forward,
        saves=kept,
        costs=costs,
        backward=(),
        gradients=made,
        backward_costs=tuple(Move(2 * traffic(g.of)) for g in made),
    )
    return out


def output_chunks_cross_entropy(t: Tape, logits: Value, head: Value, chunks: int) -> Value:
    """Cross-entropy over a list of 16-bit logit chunks, each upcast and differentiated by itself.

    Eagerly the fp32 log-probabilities of all chunks are kept; compiled, the 16-bit logits are,
    which their gradient overwrites. The head's weight gets a gradient from each chunk, added to the
    sum of those before. Source: torchtune modules/loss/ce_chunked_output_loss.py
    CEWithChunkedOutputLoss, modules/transformer.py chunked_output.
    """
    *batch, length, vocabulary = logits.axes
    chunk = (*batch, ceil_div(length, chunks), vocabulary)
    compiled = t.policy.config.compile
    kept = (
        logits.tensor
        if compiled
        else t.tensor("log-probabilities of all chunks", logits.axes, FP32, Role.LOGITS)
    )
    wide = t.tensor("logits of a chunk in fp32", chunk, FP32, Role.LOGITS)
    loss = t.tensor("loss", (1,), FP32, Role.LOGITS)
    out = Value(loss, (1,), FP32, logits.requires_grad)
    forward = ((ALLOC, loss), *(() if compiled else ((ALLOC, wide), (ALLOC, kept), (FREE, wide))))
    first, second = (
        t.tensor(n, chunk, FP32, Role.LOGITS)
        for n in ("gradient of log-probabilities", "gradient of a chunk in fp32")
    )
    grad = t.tensor("gradient of a chunk", chunk, logits.dtype, Role.LOGITS)
    both = (
        [
            t.tensor(n, head.axes, head.dtype, Role.GRADIENTS)
            for n in ("head's gradient so far", "head's gradient from a chunk")
        ]
        if head.requires_grad
        else []
    )
    steps = (
        []
        if compiled
        else [(ALLOC, first), (ALLOC, second), (FREE, first), (ALLOC, grad), (FREE, second)]
    )
    steps += [*((ALLOC, x) for x in both), *((FREE, x) for x in both)]
    moved = traffic(logits)
    t.append(
        "cross_entropy of output chunks",
        (logits,),
        (out,),
        forward=forward,
        saves=(kept,),
        costs=(Move(2 * moved),),
        backward=tuple(steps),
        gradients=(Gradient(logits, kept if compiled else grad),) if logits.requires_grad else (),
        backward_costs=(Move(2 * moved),),
    )
    return out
