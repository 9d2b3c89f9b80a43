"""A mixture's experts one after another over the tokens routed to each, as the patched forward runs
them.

Source: kernels/napkinmath_kernels/patching/forwards.py experts_forward. Tokens are taken to be
spread evenly.
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import ceil_div, product
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Value
from napkinmath.ir.symbols import b, e, s, topk
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.patched import patched_gate
from napkinmath.ops import routing
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import chunk, constant, slice_of
from napkinmath.ops.matmul import dense_linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.models.layers.moe import ExpertWeights


def experts_in_turn(
    t: Tape, x: Value, weights: Value, stacks: tuple[ExpertWeights, ExpertWeights]
) -> Value:
    """The weighted sum of each token's experts; x is (tokens, h), weights are (tokens, topk)."""
    share = ceil_div(b * s * topk, t.known(e))
    out = constant(t, "sum over experts", x.axes, x.dtype)
    with t.scope() as frame:
        matrices = [_whole(t, stack) for stack in stacks]
        frame.local(*matrices)
        for _ in range(t.known(e)):
            with t.scope() as turn:
                token, place = (
                    constant(t, name, (share,), INT64)
                    for name in ("tokens of an expert", "places of an expert")
                )
                turn.local(token, place)
                rows = routing.take_rows(t, x, token, "rows of an expert")
                both = dense_linear(t, rows, _one(t, matrices[0]), None)
                gate, up = chunk(t, both, (both.axes[-1] // 2, both.axes[-1] // 2))
                turn.local(gate, up)
                y = dense_linear(
                    t, patched_gate(t, gate, up, joint=True), _one(t, matrices[1]), None
                )
                turn.local(y)
                flat = t.view(weights, (product(weights.axes),))
                weighed = routing.weigh_rows(
                    t,
                    y,
                    t.view(routing.take_rows(t, flat, token, "weights of an expert"), (share, 1)),
                )
                out = add_rows(t, out, cast(t, weighed, x.dtype), token)
    return out


def _whole(t: Tape, stack: ExpertWeights) -> Value:
    if stack.factors is None:
        return stack.weight.value
    from napkinmath.lowering.expert_adapters import fold

    return fold(t, stack.weight, *stack.factors)


def _one(t: Tape, matrices: Value) -> Value:
    """One expert's matrix: a view, whose gradient is written into zeros as large as all of them."""
    return slice_of(t, matrices, matrices.axes[1:])


def add_rows(t: Tape, out: Value, rows: Value, token: Value) -> Value:
    """index_add_: in place; the gradient of the rows is gathered."""
    result = Value(out.tensor, out.axes, out.dtype, out.requires_grad or rows.requires_grad)
    gathered = t.gradient_of(rows) if rows.requires_grad else None
    gradients = [Gradient(out, None)] if out.requires_grad else []
    gradients += [Gradient(rows, gathered)] if gathered else []
    t.append(
        "index_add_",
        (out, rows, token),
        (result,),
        forward=(),
        saves=(token.tensor,) if gathered else (),
        costs=(Move(3 * traffic(rows)),),
        backward=((ALLOC, gathered),) if gathered else (),
        gradients=gradients,
        backward_costs=(Move(2 * traffic(rows)),) if gathered else (),
    )
    return result
