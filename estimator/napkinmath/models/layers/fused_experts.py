"""Experts as Megatron-Core runs them, here or on several ranks: permute, grouped product, weighted
gate, grouped product, unpermute.

Sources: Megatron-LM core/transformer/moe/experts.py TEGroupedMLP.forward; token_dispatcher.py
MoEAlltoAllTokenDispatcher and MoEFlexTokenDispatcher (permuted where the tokens arrived), which NeMo
AutoModel copies (components/moe/experts.py GroupedExpertsDeepEP.forward).
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.expr import Size
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import e, topk
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.expert_host import routed
from napkinmath.ops.elementwise import cast
from napkinmath.ops.expert_rows import (
    permute_rows,
    rows_of_weights,
    sort_chunks,
    unpermute_rows,
    weighted_activation,
)
from napkinmath.ops.index import constant
from napkinmath.ops.routing import group_offsets, weigh_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.models.layers.moe import Experts


def run_fused(
    experts: Experts, t: Tape, x: Value, weights: Value, limit: tuple[int, int] | None
) -> Value:
    """The weighted sum of each token's experts; x is (tokens, h), weights are (tokens, topk)."""
    tokens, split = x.axes[0], t.policy.experts
    rows = tokens * topk
    with t.scope(experts.name) as frame:
        frame.local(x, weights)
        if split is None:
            permuted, places = permute_rows(t, x, rows, e)
            routed(t, split, e)
            out = _products(experts, t, frame, permuted, weights, e)
            return unpermute_rows(t, out, places, tokens)
        held = split.experts(e)
        if split.once:
            reached = split.tokens(t, tokens, limit)
            permuted, places = permute_rows(
                t, split.sent_once(t, x, reached, tokens, limit), split.arrived(rows), held
            )
            routed(t, split, held)
            out = _products(experts, t, frame, permuted, weights, held)
            back = unpermute_rows(t, out, places, reached)
            return split.sent_once(t, back, tokens, tokens, limit)
        permuted, places = permute_rows(t, x, rows, e)
        routed(t, split, e)
        received = split.gathered(t, split.exchanged(t, permuted, split.rows(rows)))
        several = t.known(held) > 1  # else the rows of the one expert lie as they came
        out = _products(
            experts, t, frame, sort_chunks(t, received) if several else received, weights, held
        )
        summed = split.scattered(t, sort_chunks(t, out) if several else out)
        return unpermute_rows(t, split.exchanged(t, summed, rows), places, tokens)


def _products(
    experts: Experts, t: Tape, frame: Scope, x: Value, weights: Value, count: Size
) -> Value:
    """The experts held here over rows sorted by expert."""
    rows = x.axes[0]
    stacks = experts.stacks(t, frame, x.axes[-1], count)
    numbers = constant(t, "expert of each row", (rows,), INT64)
    _, _, offsets = group_offsets(t, numbers, count)
    of_rows = rows_of_weights(t, weights, rows)
    first, second = (experts.bias_of_rows(t, stack, numbers) for stack in stacks)
    up = experts.product(t, frame, x, stacks[0], offsets, first, count)
    if experts.gated:
        middle = weighted_activation(t, up, of_rows, experts.width)
    else:  # bias_act_func fuses weights with SwiGLU and quick GEGLU alone
        with t.scope() as inner:
            inner.local(up)
            acted = activate(t, up, experts.activation)
            inner.local(acted)
            middle = cast(t, weigh_rows(t, acted, of_rows), up.dtype)
    return experts.product(t, frame, middle, stacks[1], offsets, second, count)
