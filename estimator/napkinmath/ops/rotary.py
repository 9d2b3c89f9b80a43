"""Rotary embeddings other than transformers' rotate_half: on halves, on interleaved pairs, and as
complex numbers."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import LIKE, PASS, REDUCE, Tape
from napkinmath.ops.elementwise import add, cast, mul, neg, promote
from napkinmath.ops.index import chunk, concatenate, constant, rotary, slice_of
from napkinmath.ops.nodes import passed, same_storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.tape import Scope


def subtract(t: Tape, x: Value, y: Value) -> Value:
    """x - y of one shape: the gradient passes to x and is negated for y."""
    dtype = promote(x.dtype, y.dtype)
    return t.op(
        "sub",
        (x, y),
        x.axes,
        dtype,
        gradients=(PASS if x.dtype is dtype else LIKE, LIKE if y.dtype is dtype else REDUCE),
        costs=(Move(traffic(x, y) + traffic(Value(x.tensor, x.axes, dtype))),),
        backward_costs=(Move(2 * traffic(x)),),
    )


def turn(
    t: Tape, first: Value, second: Value, cos: Value, sin: Value, axes: tuple[object, ...]
) -> Value:
    """(first * cos - second * sin, second * cos + first * sin), concatenated."""
    with t.scope() as frame:
        frame.local(first, second)
        real = subtract(t, mul(t, first, cos), mul(t, second, sin))
        frame.local(real)
        imaginary = add(t, mul(t, second, cos), mul(t, first, sin))
        frame.local(imaginary)
        return concatenate(t, (real, imaginary), axes)  # type: ignore[arg-type]


def rotary_halves(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """GPT-OSS: the two halves of each head turned by tables of half the head size (models/gpt_oss
    _apply_rotary_emb)."""
    half = x.axes[-1] // 2
    first, second = chunk(t, x, (half, half))
    return turn(t, first, second, cos, sin, x.axes)


def rotary_pairs(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """DeepSeek V3: even and odd elements turned (models/deepseek_v3
    apply_rotary_pos_emb_interleave); strided slices."""
    half = (*x.axes[:-1], x.axes[-1] // 2)
    return turn(t, slice_of(t, x, half), slice_of(t, x, half), cos, sin, x.axes)


def rotary_complex(t: Tape, q: Value, key: Value, table: Value) -> tuple[Value, Value]:
    """DeepSeek V2 and Llama 4: pairs as complex fp32 numbers times a complex table, back to the
    input's type.

    A complex product is as large as its fp32 operand. Source: models/deepseek_v2 apply_rotary_emb.
    """
    with t.scope() as frame:
        wide_q, wide_key = cast(t, q, FP32), cast(t, key, FP32)
        frame.local(wide_q, wide_key)
        turned_q = cast(t, _complex_product(t, wide_q, table), q.dtype)
        frame.local(turned_q)
        turned_key = cast(t, _complex_product(t, wide_key, table), key.dtype)
        frame.local(turned_key)
        return turned_q, turned_key


def _complex_product(t: Tape, x: Value, table: Value) -> Value:
    return t.op(
        "mul complex",
        (x, table),
        x.axes,
        FP32,
        saves=(table,),
        gradients=(LIKE, None),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(2 * traffic(x), 2),),
    )


def rotary_interleaved(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """x * cos + rotated pairs * sin: every other element negated, stacked with its neighbour
    (models/cohere, glm, helium rotate_half)."""
    return add(t, mul(t, x, cos), mul(t, rotate_pairs(t, x), sin))


def interleaved_table(t: Tape, table: Value) -> Value:
    """Half of a rotary table with every entry twice, made anew in each layer (models/glm, helium
    apply_rotary_pos_emb)."""
    out = constant(t, "interleaved table", table.axes, table.dtype)
    t.touch(table.tensor)
    return out


def rotate_pairs(t: Tape, x: Value) -> Value:
    """stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)."""
    half = (*x.axes[:-1], x.axes[-1] // 2)
    with t.scope() as frame:
        first, second = slice_of(t, x, half), slice_of(t, x, half)
        frame.local(first, second)
        return concatenate(t, (neg(t, second), first), x.axes, name="stack")


def rotary_interleaved_fp32(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """The same in fp32, cast back at the end (models/cohere apply_rotary_pos_emb)."""
    return cast(t, rotary_interleaved(t, cast(t, x, FP32), cos, sin), x.dtype)


def rotary_interleaved_wide(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """Pairs turned in the input's type, products with fp32 tables, cast back at the end
    (models/ernie4_5 apply_rotary_pos_emb)."""
    plain = mul(t, cast(t, x, FP32), cos)
    return cast(t, add(t, plain, mul(t, cast(t, rotate_pairs(t, x), FP32), sin)), x.dtype)


def rotary_fp32_tables(t: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """rotate_half with fp32 tables: products and sum in fp32, cast back at the end (models/olmo
    apply_rotary_pos_emb)."""
    return cast(t, rotary(t, x, cos, sin), x.dtype)


def rotary_partial(
    t: Tape,
    q: Value,
    key: Value,
    cos: Value,
    sin: Value,
    size: Size,
    turn: Callable[[Tape, Value, Value, Value], Value],
    held_by: Scope | None = None,
) -> tuple[Value, Value]:
    """The first `size` elements of each head turned, the rest put back behind them (models/phi,
    stablelm, nemotron, glm).

    `held_by`: the calling function whose locals the pieces are, where the rotation is not a
    function of its own.
    """
    with t.scope() as own:
        frame = held_by or own
        frame.local(q, key)
        parts = [
            (
                slice_of(t, x, (*x.axes[:-1], size)),
                slice_of(t, x, (*x.axes[:-1], x.axes[-1] - size)),
            )
            for x in (q, key)
        ]
        turned = [turn(t, first, cos, sin) for first, _ in parts]
        frame.local(*turned)
        joined = [
            concatenate(t, (first, rest), x.axes)
            for first, (_, rest), x in zip(turned, parts, (q, key), strict=True)
        ]
        return joined[0], joined[1]


def rotary_in_place(t: Tape, x: Value) -> Value:
    """unsloth's kernel: turns the heads where they lie, forward and backward; keeps nothing but the
    tables (kernels/rope_embedding.py)."""
    out, cost = same_storage(x), Move(2 * traffic(x))
    t.append(
        "rotary in place",
        (x,),
        (out,),
        forward=(),
        costs=(cost,),
        gradients=passed(x),
        backward_costs=(cost,),
    )
    return out
