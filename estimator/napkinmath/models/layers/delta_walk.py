"""The sequential part of the gated delta rule: each chunk reads the state that the chunks before it
left, and updates it (transformers 5.23 models/qwen3_next torch_chunk_gated_delta_rule)."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Gemm
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.tape import Tape

CHUNK = 64  # torch_chunk_gated_delta_rule's default


def walk(
    t: Tape,
    values: Value,
    keys: Value,
    q: Value,
    k: Value,
    inside: Value,
    chunks: Size,
    state: tuple[Size, ...],
) -> Value:
    """The loop over chunks; returns a value of the axes of `values`, in fp32.

    values: (b, heads, s, value size); keys, q, k: (b, heads, s, key size); inside: (b, heads,
    chunks, CHUNK, CHUNK); state: (b, heads, key size, value size), as it is for one chunk.
    Backward of a chunk's slices makes zeros as large as the whole tensor that is sliced.
    """
    rows, key_size, value_size = state[0] * state[1], state[2], state[3]
    inputs = (values, keys, q, k, inside)
    needs = any(v.requires_grad for v in inputs)
    out = Value(t.tensor("output", values.axes, FP32), values.axes, FP32, needs)
    computed = t.policy.autocast or FP32
    one_chunk = (*state[:2], CHUNK, value_size)
    work = [
        t.tensor(name, one_chunk, computed, Role.WORKSPACE)
        for name in ("read of the state", "read inside", "their sum")
    ]
    made = _kept_products(t, inputs, chunks, state, computed)
    each = rows * chunks
    costs = (
        Gemm(CHUNK, value_size, key_size, computed, 2 * each),
        Gemm(CHUNK, value_size, CHUNK, computed, each),
        Gemm(key_size, value_size, CHUNK, computed, each),
    )
    forward = [
        *((ALLOC, one) for one in (out.tensor, *made, *work)),
        *((FREE, one) for one in work),
    ]
    if not needs:
        forward += [(FREE, one) for one in made]
        t.append("delta rule", inputs, (out,), forward=tuple(forward), costs=costs)
        return out
    gradients = [Gradient(v, t.gradient_of(v)) for v in inputs if v.requires_grad]
    zeros = [
        t.tensor("zeros of one chunk's slice", inside.axes, FP32, Role.WORKSPACE),
        t.tensor("gradient before the copy", values.axes, FP32, Role.WORKSPACE),
    ]
    backward = (
        *((ALLOC, g.tensor) for g in gradients if g.tensor),
        *((ALLOC, z) for z in zeros),
        *((FREE, z) for z in zeros),
    )
    t.append(
        "delta rule",
        inputs,
        (out,),
        forward=tuple(forward),
        saves=(*made, *(() if computed is not FP32 else (v.tensor for v in inputs[1:]))),
        costs=costs,
        backward=backward,
        gradients=gradients,
        backward_costs=(*costs, *costs),
    )
    t.touch(*made)
    return out


def _kept_products(
    t: Tape, inputs: tuple[Value, ...], chunks: Size, state: tuple[Size, ...], computed: DType
) -> tuple[Tensor, ...]:
    """What the loop makes and its backward reads: the states and the corrected values.

    Autocast casts each chunk's factors for their products, the state and the corrected values once
    for either of two. The first state needs no gradient, so that its chunk's keys and queries are
    not kept; the last chunk's update is dropped.
    """
    values, keys, q, k, inside = inputs
    if computed is FP32:
        return (
            t.tensor("state before each chunk", (chunks, *state), FP32),
            t.tensor("corrected values", values.axes, FP32),
        )

    def narrow(name: str, axes: tuple[Size, ...]) -> Tensor:
        return t.tensor(f"{name} in {computed}", axes, computed)

    behind = chunks - 1
    outer = state[:2]
    return (
        t.tensor("state before each chunk", (behind, *state), FP32),
        narrow("state of each read", (2 * chunks, *state)),
        narrow("corrected values of each product", (*outer, chunks + behind, CHUNK, state[3])),
        narrow("products inside", inside.axes),
        *(narrow(one.tensor.name, (*outer, behind, CHUNK, state[2])) for one in (keys, q, k)),
    )
