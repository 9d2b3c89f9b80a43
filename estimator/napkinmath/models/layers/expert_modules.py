"""A mixture's experts as transformers 4 held them: a list of modules with `nn.Linear`s, run one
after another over their tokens.

So quantizers packed every expert and PEFT's all-linear adapted it, where transformers 5 holds one
3-D parameter that neither touches. Tokens are taken to be spread evenly. Source: transformers 4.45
models/mixtral/modeling_mixtral.py MixtralSparseMoeBlock.forward,
models/qwen2_moe/modeling_qwen2_moe.py Qwen2MoeSparseMoeBlock.forward.
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size, ceil_div, product
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, Gradient, Value
from napkinmath.ir.symbols import b, e, s, topk
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.activations import activate
from napkinmath.ops import routing
from napkinmath.ops.elementwise import cast, mul
from napkinmath.ops.index import constant
from napkinmath.ops.matmul import linear

TOKENS = b * s
FIRST_FUSED = (5, 0)


def runs_experts_as_modules(t: Tape) -> bool:
    """Whether the stack's transformers is one that held each expert as a module."""
    return (
        t.policy.stack.model.is_transformers_before(FIRST_FUSED)
        and t.policy.patch is None
        and t.policy.experts is None
    )


def experts_by_module(
    t: Tape, x: Value, weights: Value, names: tuple[str, str, str], width: Size, activation: str
) -> Value:
    """The weighted sum of each token's experts; x is (tokens, h), weights are (tokens, topk); names
    are gate, up and down."""
    share = ceil_div(TOKENS * topk, t.known(e))
    flat = t.view(weights, (product(weights.axes),))
    with t.scope("experts") as frame:
        mask = constant(t, "expert mask", (t.known(e), topk, TOKENS), INT64)
        frame.local(mask)
        out = constant(t, "sum over experts", x.axes, x.dtype)
        for number in range(t.known(e)):
            with t.scope(str(number)) as turn:
                token, place = (
                    constant(t, name, (share,), INT64)
                    for name in ("tokens of an expert", "places of an expert")
                )
                rows = routing.take_rows(t, x, token, "rows of an expert")
                turn.local(token, place, rows)
                gate = activate(t, linear(t, rows, names[0], width), activation)
                y = linear(t, mul(t, gate, linear(t, rows, names[1], width)), names[2], x.axes[-1])
                weighed = routing.weigh_rows(
                    t,
                    y,
                    t.view(routing.take_rows(t, flat, token, "weights of an expert"), (share, 1)),
                )
                turn.local(y, weighed)
                out = add_rows(t, out, cast(t, weighed, x.dtype), token)
    return out


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
