"""Losses over the vocabulary: transformers' fp32 cross-entropy, and the chunked and fused linear
forms that never hold all logits."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64, DType
from napkinmath.base.expr import Size, ceil_div, minimum, product
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import constant
from napkinmath.ops.nodes import freed, gradients_of, made, meanwhile, result, workspaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def cross_entropy(t: Tape, logits: Value, *, upcast: bool = True, shifted: bool = False) -> Value:
    """`logits.float()` then `F.cross_entropy`: log-probabilities are kept in fp32, and backward
    makes two more tensors of b·s·v.

    nll_loss's backward fills a zero tensor, log_softmax's backward makes the gradient, the upcast's
    backward casts it. Without the upcast log_softmax runs in the type of the logits, under autocast
    too: cross_entropy_loss names that type (aten/src/ATen/native/LossNLL.cpp). Autocast then casts
    the result for nll_loss (autocast_mode.h fp32_set_opt_dtype and fp32).
    """
    wide = cast(t, logits, FP32, role=Role.LOGITS) if upcast else logits
    split = t.policy.tensor
    if split is not None and split.splits_loss(logits):
        targets = next_token_labels(t, wide) if shifted else None
        loss = split.loss(t, wide)
        t.touch(wide.tensor, *(() if targets is None else (targets.tensor,)))
        return loss
    loss = _log_softmax_and_nll(t, wide, shifted)
    t.touch(wide.tensor)  # the fp32 logits are a local of the loss function
    return loss


def _log_softmax_and_nll(t: Tape, wide: Value, shifted: bool) -> Value:
    flat = t.view(wide, (product(wide.axes[:-1]), wide.axes[-1]))
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
        t.ops[-1].saves = (log_probabilities.tensor,)
        _as_logits(t.ops[-1].gradients)
    if t.policy.autocast is not None:
        log_probabilities = cast(t, log_probabilities, FP32, role=Role.LOGITS)
        if log_probabilities.requires_grad:
            _as_logits(t.ops[-1].gradients)
    return _nll(t, log_probabilities, targets)


def _nll(t: Tape, log_probabilities: Value, targets: Value | None) -> Value:
    moved = traffic(log_probabilities)
    loss = t.op(
        "nll_loss",
        (log_probabilities,),
        (1,),
        log_probabilities.dtype,
        saves=(log_probabilities, targets),
        gradients=("like",),
        costs=(Move(moved // 64),),
        backward_costs=(Move(moved),),
        role=Role.LOGITS,
    )
    if loss.requires_grad:
        _as_logits(t.ops[-1].gradients)
    return loss


def cross_entropy_in_place(t: Tape, logits: Value) -> Value:
    """Loss and log-sum-exp of each row in one kernel, backward writes the gradient over the logits.

    Source: unsloth kernels/cross_entropy_loss.py Fast_CrossEntropyLoss, as carried by
    fms-acceleration.
    """
    rows = product(logits.axes[:-1])
    flat = t.view(logits, (rows, logits.axes[-1]))
    out = result(t, "loss of each row", (rows,), FP32, (flat,), Role.LOGITS)
    sums = t.tensor("log-sum-exp of each row", (rows,), FP32, Role.LOGITS)
    t.append(
        "cross_entropy in place",
        (flat,),
        (out,),
        forward=made(out.tensor, sums),
        saves=(flat.tensor, sums),
        costs=(Move(traffic(flat)),),
        gradients=(Gradient(flat, flat.tensor),) if flat.requires_grad else (),
        backward_costs=(Move(2 * traffic(flat)),),
    )
    t.touch(sums)
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)


def cross_entropy_of_rows(t: Tape, logits: Value) -> Value:
    """The same kernel where backward makes a gradient of its own.

    Source: flash_attn 2.8 ops/triton/cross_entropy.py CrossEntropyLoss without inplace_backward.
    """
    return _number_of_rows(t, logits, "cross_entropy of rows", ("log-sum-exp",))


def compiled_entropy(t: Tape, logits: Value) -> Value:
    """The mean entropy of all rows as a compiler runs it: the softmax and its products stay in
    registers (verl workers/actor/dp_actor.py compute_entropy_from_logits)."""
    return _number_of_rows(t, logits, "compiled entropy", ("max", "sum", "mean"))


def _number_of_rows(t: Tape, logits: Value, name: str, kept: Sequence[str]) -> Value:
    """The mean of a number of each row, whose kernel keeps the logits and some fp32 numbers a
    row."""
    rows = product(logits.axes[:-1])
    out = result(t, f"{name}: a number each", (rows,), FP32, (logits,), Role.LOGITS)
    numbers = [t.tensor(f"{n} of each row", (rows,), FP32, Role.LOGITS) for n in kept]
    gradients = gradients_of(t, (logits,))
    _as_logits(gradients)
    t.append(
        name,
        (logits,),
        (out,),
        forward=made(out.tensor, *numbers),
        saves=(logits.tensor, *numbers),
        costs=(Move(traffic(logits)),),
        backward=made(*(g.tensor for g in gradients)),
        gradients=gradients,
        backward_costs=(Move(2 * traffic(logits)),),
    )
    t.touch(*numbers)
    return t.op("mean of losses", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)


def compiled_cross_entropy(t: Tape, logits: Value) -> Value:
    """The chain from 16-bit logits to the loss as a compiler runs it: the upcast, the shift and the
    softmax stay in registers. The logits and two fp32 numbers a row are kept, the gradient has the
    logits' type (torch 2.13 _inductor/decomposition.py, _decomp log_softmax and nll_loss; the
    graph's input is not a donated buffer, so the gradient is a tensor of its own).
    """
    rows = product(logits.axes[:-1])
    out = result(t, "loss", (1,), FP32, (logits,), Role.LOGITS)
    numbers = [t.tensor(f"{n} of each row", (rows,), FP32, Role.LOGITS) for n in ("max", "sum")]
    gradients = gradients_of(t, (logits,))
    _as_logits(gradients)
    cost = Move(2 * traffic(logits))
    t.append(
        "compiled cross_entropy",
        (logits,),
        (out,),
        forward=made(out.tensor, *numbers),
        saves=(logits.tensor, *numbers),
        costs=(cost,),
        backward=made(*(g.tensor for g in gradients if g.tensor is not None)),
        gradients=gradients,
        backward_costs=(cost,),
    )
    t.touch(*numbers)
    return out


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
    if chunk_rows is None:
        chunk_rows = ceil_div(rows * width, vocabulary)
    names = [f"logits of a chunk, copy {i + 1}" for i in range(chunk_copies)]
    axes = (minimum(rows, chunk_rows), vocabulary)
    chunks = workspaces(t, axes, chunk_dtype, names, Role.LOGITS)
    out, gradients = result(t, "loss", (1,), FP32, (x, w), Role.LOGITS), gradients_of(t, (x, w))
    kept = [g.tensor for g in gradients if g.tensor is not None]
    products = [Gemm(rows, width, vocabulary, x.dtype)] * x.requires_grad
    products += [Gemm(vocabulary, width, rows, x.dtype, of_weight=True)] * w.requires_grad
    forward_product = Gemm(rows, vocabulary, width, x.dtype)
    for tensor in (out.tensor, *kept):
        t.last_use[tensor] = len(t.ops)
    t.append(
        "linear_cross_entropy",
        (x, w),
        (out,),
        forward=(*made(out.tensor, *kept), *meanwhile(*temporaries, *chunks)),
        saves=kept,
        costs=(forward_product, Move(4 * rows * vocabulary * 2), *products),
        gradients=gradients,
        backward_costs=tuple(Move(2 * traffic(g.of)) for g in gradients),
    )
    return out


def output_chunks_cross_entropy(t: Tape, logits: Value, head: Value, chunks: int) -> Value:
    """Cross-entropy over a list of 16-bit logit chunks, each upcast and differentiated by itself.

    Eagerly the fp32 log-probabilities of all chunks are kept; compiled, the 16-bit logits are,
    which their gradient overwrites. The head's weight gets a gradient from each chunk, added to the
    sum of those before. Source: torchtune modules/loss/ce_chunked_output_loss.py
    CEWithChunkedOutputLoss, modules/transformer.py chunked_output.
    """
    loss = result(t, "loss", (1,), FP32, (logits,), Role.LOGITS)
    if t.policy.config.compile:
        kept = gradient = logits.tensor
        forward, backward = made(loss.tensor), ()
    else:
        kept, gradient, forward, backward = _eager_chunks(t, logits, chunks, loss)
    sums = ("head's gradient so far", "head's gradient from a chunk")
    names = sums if head.requires_grad else ()
    both = workspaces(t, head.axes, head.dtype, names, Role.GRADIENTS)
    cost = Move(2 * traffic(logits))
    t.append(
        "cross_entropy of output chunks",
        (logits,),
        (loss,),
        forward=forward,
        saves=(kept,),
        costs=(cost,),
        backward=(*backward, *meanwhile(*both)),
        gradients=(Gradient(logits, gradient),) if logits.requires_grad else (),
        backward_costs=(cost,),
    )
    t.touch(kept)
    return loss


def _eager_chunks(
    t: Tape, logits: Value, chunks: int, loss: Value
) -> tuple[Tensor, Tensor, Steps, Steps]:
    """(what is kept, the last chunk's gradient, forward, backward) without a compiler."""
    *batch, length, vocabulary = logits.axes
    chunk = (*batch, ceil_div(length, chunks), vocabulary)
    kept = t.tensor("log-probabilities of all chunks", logits.axes, FP32, Role.LOGITS)
    names = (
        "logits of a chunk in fp32",
        "gradient of log-probabilities",
        "gradient of a chunk in fp32",
    )
    wide, first, second = workspaces(t, chunk, FP32, names, Role.LOGITS)
    gradient = t.tensor("gradient of a chunk", chunk, logits.dtype, Role.LOGITS)
    forward = (*made(loss.tensor, wide, kept), *freed(wide))
    backward = (*made(first, second), *freed(first), *made(gradient), *freed(second))
    return kept, gradient, forward, backward
