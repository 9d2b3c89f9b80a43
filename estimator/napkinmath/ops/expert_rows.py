"""Rows of experts as fused kernels move them: copied to their expert, weighed with the gate, and
summed on their way back.

Sources: Transformer Engine common/triton/permutation.py (make_row_id_map, permute, unpermute,
sort_chunks_by_map) and pytorch/permutation.py _moe_permute_mask_map, whose map of int32 has for each
token where its rows are and their experts; Megatron-LM core/fusions/fused_bias_swiglu.py
WeightedSwiGLUFunction.
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT32
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.nodes import node, result


def permute_rows(t: Tape, x: Value, rows: Size, experts: Size) -> tuple[Value, Value]:
    """(rows sorted by expert, the map of where they went) for x of axes (tokens, h); backward sums
    the rows of a token. The map is kept."""
    places = result(t, "row map", (x.axes[0], 2 * experts + 1), INT32, ())
    out = result(t, "rows by expert", (rows, *x.axes[1:]), x.dtype, (x,))
    costs = (Move(traffic(x, out, places)),)
    node(
        t,
        "permute",
        (x,),
        (out,),
        new=(places.tensor, out.tensor),
        saves=(places.tensor,),
        costs=costs,
        backward_costs=costs,
    )
    return out, places


def sort_chunks(t: Tape, x: Value) -> Value:
    """Rows that came from several ranks sorted by the experts held here, or back; by one kernel."""
    costs = (Move(2 * traffic(x)),)
    return t.op(
        "sort chunks", (x,), x.axes, x.dtype, gradients=(LIKE,), costs=costs, backward_costs=costs
    )


def rows_of_weights(t: Tape, weights: Value, rows: Size) -> Value:
    """The routing weight of each row, which travels with it."""
    costs = (Move(2 * traffic(weights)),)
    return t.op(
        "weights of rows",
        (weights,),
        (rows, 1),
        weights.dtype,
        gradients=(LIKE,),
        costs=costs,
        backward_costs=costs,
    )


def weighted_activation(t: Tape, x: Value, weights: Value, width: Size) -> Value:
    """act(gate) * up * weight of a row in one kernel; keeps both inputs."""
    out = result(t, "weighted activation", (*x.axes[:-1], width), x.dtype, (x, weights))
    node(
        t,
        "weighted activation",
        (x, weights),
        (out,),
        new=(out.tensor,),
        saves=(x.tensor, weights.tensor),
        costs=(Move(traffic(x, out, weights)),),
        backward_costs=(Move(traffic(x, x, out, weights)),),
    )
    return out


def unpermute_rows(t: Tape, x: Value, places: Value, tokens: Size) -> Value:
    """Rows back in the order of their tokens and summed over their choices, by one kernel; its
    backward copies them."""
    out = result(t, "sum over choices", (tokens, *x.axes[1:]), x.dtype, (x,))
    costs = (Move(traffic(x, out, places)),)
    node(
        t,
        "unpermute",
        (x, places),
        (out,),
        new=(out.tensor,),
        saves=(places.tensor,),
        costs=costs,
        backward_costs=costs,
    )
    return out
