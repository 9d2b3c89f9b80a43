"""The divergence of a student from a teacher as patched operations run it: hidden states of both, and
the logits of neither."""

from __future__ import annotations

from napkinmath.base.expr import Size, product
from napkinmath.catalog.loss_kernels import linear_divergence
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import Tape
from napkinmath.lowering.held_outputs import TAUGHT_STATES
from napkinmath.models.layers.patched import adapter_of_head, head_products, loss_in_forward
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.index import constant, slice_of


def shifted_rows(t: Tape, hidden: Value) -> Value:
    """Rows (tokens, h) of all positions but the last of each sequence."""
    *batch, length, width = hidden.axes
    tokens = (*batch, length - 1)
    scored = slice_of(t, hidden, (*tokens, width))
    return copy(t, scored, (product(tokens), width), name="hidden states of scored labels")


def patched_distillation(
    t: Tape, hidden: Value, weight: Value, taught_width: Size, adapted: str = ""
) -> Value:
    """The loss of hidden states (sequences, s, h) and of a teacher's of another width, which are
    there by now. Padding has no label, so the rows that have one are copied together. `adapted`
    names the head where an adapter sits on it.

    Source: kernels/napkinmath_kernels/patching/trl_divergence.py, ops/divergence.py.
    """
    with t.scope() as frame:
        if t.policy.autocast is not None:
            hidden = cast(t, hidden, t.policy.autocast)
        thin = adapter_of_head(t, hidden, weight, adapted) if adapted else ()
        axes = (*hidden.axes[:-1], taught_width)
        taught = constant(t, TAUGHT_STATES, axes, hidden.dtype)
        frame.local(hidden, taught)
        rows = shifted_rows(t, hidden)
        taught_rows = shifted_rows(t, taught)
        frame.local(rows, taught_rows, *thin[:1])
        if thin:
            thin = (shifted_rows(t, thin[0]), thin[1])
            frame.local(thin[0])
        return _divergence(t, rows, weight, taught_rows, thin)


def _divergence(t: Tape, x: Value, w: Value, taught: Value, thin: tuple[Value, ...] = ()) -> Value:
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
        adapter_rank=thin[1].axes[-1] if thin else 0,
        adapter_dtype=thin[1].dtype if thin else None,
    )
    widths = ((width, w.requires_grad), *((x.axes[-1], True) for x in thin[:1]))
    products = [
        *head_products(rows=valid, vocabulary=vocabulary, dtype=dtype, widths=widths),
        Gemm(valid, vocabulary, taught_width, dtype),
    ]
    # student's and teacher's logits read three times, the student's written once
    passes = Move(7 * valid * vocabulary * (dtype.bits // 8))
    costs = [*products, passes]
    return loss_in_forward(t, "linear_divergence", (x, w, *thin), (taught,), cost, costs)
