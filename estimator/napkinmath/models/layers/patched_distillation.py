"""The divergence of a student from a teacher as patched operations run it: hidden states of both, and
the logits of neither."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size, product
from napkinmath.catalog.loss_kernels import linear_divergence
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import ALLOC, Gradient, Role, Steps, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.lowering.held_outputs import TAUGHT_STATES
from napkinmath.models.layers.patched import gradient_role, logits_scratch
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.index import constant, slice_of


def shifted_rows(t: Tape, hidden: Value) -> Value:
    """Rows (tokens, h) of all positions but the last of each sequence."""
    *batch, length, width = hidden.axes
    tokens = (*batch, length - 1)
    scored = slice_of(t, hidden, (*tokens, width))
    return copy(t, scored, (product(tokens), width), name="hidden states of scored labels")


def patched_distillation(t: Tape, hidden: Value, weight: Value, taught_width: Size) -> Value:
    """The loss of hidden states (sequences, s, h) and of a teacher's of another width, which are
    there by now. Padding has no label, so the rows that have one are copied together.

    Source: kernels/napkinmath_kernels/patching/trl_divergence.py, ops/divergence.py.
    """
    with t.scope() as frame:
        if t.policy.autocast is not None:
            hidden = cast(t, hidden, t.policy.autocast)
        axes = (*hidden.axes[:-1], taught_width)
        taught = constant(t, TAUGHT_STATES, axes, hidden.dtype)
        frame.local(hidden, taught)
        rows = shifted_rows(t, hidden)
        taught_rows = shifted_rows(t, taught)
        frame.local(rows, taught_rows)
        return _divergence(t, rows, weight, taught_rows)


def _divergence(t: Tape, x: Value, w: Value, taught: Value) -> Value:
    rows, width = x.axes
    valid, taught_width = rows - 1, taught.axes[-1]
    vocabulary, dtype = t.known(w.axes[0]), x.dtype
    cost = linear_divergence(
        rows,
        width,
        taught_width,
        vocabulary,
        dtype,
        valid=valid,
        trains_head=w.requires_grad,
        head_dtype=w.dtype,
    )
    loss = t.tensor("loss", (1,), FP32, Role.LOGITS)
    out = Value(loss, (1,), FP32, x.requires_grad or w.requires_grad)
    sources = [one for one in (x, w) if one.requires_grad]
    kept = [
        Tensor(
            f"gradient of {one.tensor.name}, kept",
            one.axes,
            one.dtype,
            gradient_role(one),
            t.module,
        )
        for one in sources
    ]
    made, gone = logits_scratch(t, cost.forward_temporary)
    forward: Steps = (*((ALLOC, k) for k in kept), *made, (ALLOC, loss), *gone)
    gradients = [Gradient(one, t.gradient_of(one)) for one in sources]
    products = [
        Gemm(valid, vocabulary, width, dtype),
        Gemm(valid, vocabulary, taught_width, dtype),
        Gemm(valid, width, vocabulary, dtype),
    ]
    products += [Gemm(vocabulary, width, valid, dtype, of_weight=True)] * w.requires_grad
    # student's and teacher's logits read three times, the student's written once
    passes = Move(7 * valid * vocabulary * (dtype.bits // 8))
    t.append(
        "linear_divergence",
        (x, w, taught),
        (out,),
        forward=forward,
        saves=kept,
        costs=[*products, passes],
        backward=tuple((ALLOC, g.tensor) for g in gradients if g.tensor),
        gradients=gradients,
        backward_costs=(Move(cost.backward_moved),),
    )
    for tensor in (loss, *kept):
        t.last_use[tensor] = len(t.ops) - 1
    return out
