"""Gated delta networks (Qwen 3 Next, Qwen 3.5): the chunked rule as transformers runs it in torch.

The torch form is what is priced; fla's fused kernel (`chunk_gated_delta_rule`), which transformers
takes where it is installed, keeps less. Sources: transformers 5.23
models/qwen3_next/modeling_qwen3_next.py Qwen3NextGatedDeltaNet, torch_chunk_gated_delta_rule;
models/qwen3_5/modeling_qwen3_5.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32
from napkinmath.base.expr import Size, ceil_div
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, Grows, convolution_state
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, h, s
from napkinmath.ir.tape import LIKE, REDUCE, Scope, Tape
from napkinmath.models.layers.chunked_scan import pad
from napkinmath.models.layers.delta_walk import CHUNK, walk
from napkinmath.models.layers.mamba import outer
from napkinmath.ops.convolution import causal_convolution
from napkinmath.ops.elementwise import (
    cast,
    copy,
    mul,
    neg,
    rsqrt,
    scale,
    shift,
    sigmoid,
    silu,
    unary,
)
from napkinmath.ops.index import chunk, concatenate, constant
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.norm import mean_square
from napkinmath.ops.routing import row_sum, weigh_rows


class GatedDeltaNet(Record):
    """Linear attention with a decaying state updated by the delta rule, over grouped key and value
    heads."""

    key_heads: Size
    value_heads: Size
    key_size: int
    value_size: int
    kernel: int = 4
    joint: bool = True
    """Two projections, interleaved by key head (Qwen 3 Next); four separate ones otherwise (Qwen
    3.5)."""

    @property
    def keys(self) -> Size:
        """Width of queries and of keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> Size:
        """Width of values."""
        return self.value_heads * self.value_size

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The last inputs of its convolution, and the rule's state in fp32."""
        return (
            convolution_state(2 * self.keys + self.values, self.kernel),
            Cached(
                name="scan state",
                axes=(self.value_heads, self.key_size, self.value_size),
                grows=Grows.NOT,
                dtype=FP32,
            ),
        )

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Mixes x of axes (b, s, h)."""
        with t.scope("linear_attn") as frame:
            frame.local(x)
            mixed, gate, learn, rate = self._projected(t, x)
            frame.local(mixed, gate, learn, rate)
            channels = 2 * self.keys + self.values
            mixed = causal_convolution(
                t, t.view(mixed, (b, channels, s)), "conv1d", channels, self.kernel, bias=False
            )
            q, k, v = chunk(
                t, t.view(mixed, (b, s, channels)), (self.keys, self.keys, self.values), "split"
            )
            beta = sigmoid(t, learn)
            decay = self._decay(t, rate)
            frame.local(mixed, beta, decay)
            out = self._rule(t, q, k, v, decay, beta)
            return self._gated(t, frame, out, gate, ("norm", "out_proj"))

    def _gated(
        self, t: Tape, frame: Scope, out: Value, gate: Value, names: tuple[str, str]
    ) -> Value:
        rows = (b * s * self.value_heads, self.value_size)
        out = self._gated_norm(t, t.view(out, rows), t.view(gate, rows), names[0])
        frame.local(out)
        return linear(t, t.view(out, (b, s, self.values)), names[1], h)

    def _projected(self, t: Tape, x: Value) -> tuple[Value, Value, Value, Value]:
        if not self.joint:
            mixed = linear(t, x, "in_proj_qkv", 2 * self.keys + self.values)
            return (
                mixed,
                linear(t, x, "in_proj_z", self.values),
                linear(t, x, "in_proj_b", self.value_heads),
                linear(t, x, "in_proj_a", self.value_heads),
            )
        both, small = (
            linear(t, x, "in_proj_qkvz", 2 * self.keys + 2 * self.values),
            linear(t, x, "in_proj_ba", 2 * self.value_heads),
        )
        with t.scope() as frame:
            frame.local(both, small)
            q, k, v, gate = chunk(
                t, both, (self.keys, self.keys, self.values, self.values), "split"
            )
            learn, rate = chunk(t, small, (self.value_heads, self.value_heads), "split")
            v, gate, learn, rate = (
                copy(t, part, name="reshape") for part in (v, gate, learn, rate)
            )
            q, k = (copy(t, part, name="reshape") for part in (q, k))
            frame.local(q, k, v)
            return concatenate(t, (q, k, v), (b, s, 2 * self.keys + self.values)), gate, learn, rate

    def _decay(self, t: Tape, rate: Value) -> Value:
        bias = t.weight("dt_bias", (self.value_heads,)).value
        speed = neg(
            t,
            unary(
                t,
                "exp",
                cast(t, t.weight("A_log", (self.value_heads,)).value, FP32),
                saves="output",
            ),
        )
        wide = cast(t, rate, FP32)
        step = unary(
            t,
            "softplus",
            t.op(
                "add bias",
                (wide, bias),
                wide.axes,
                FP32,
                gradients=("pass", REDUCE),
                costs=(Move(2 * traffic(wide)),),
            ),
        )
        return outer(t, "A dt", (speed, step), step.axes)

    def _rule(self, t: Tape, q: Value, k: Value, v: Value, decay: Value, beta: Value) -> Value:
        """The rule over chunks, in fp32; returns (b, s, value heads, value size) in the model's
        type."""
        heads, chunks = self.value_heads, ceil_div(s, CHUNK)
        long = chunks * CHUNK
        key_rows, value_rows = (b, heads, long, self.key_size), (b, heads, long, self.value_size)
        square: tuple[Size, ...] = (b, heads, chunks, CHUNK, CHUNK)
        batch = b * heads * chunks
        # Inputs in fp32 already are not copied heads first, `.to(fp32, memory_format=contiguous)`
        # being nothing to do; products over chunks do it instead, unless padding has.
        strided = q.dtype is FP32 and t.divides(CHUNK, s)
        with t.scope() as frame:
            q, k = (self._heads(t, y, self.key_heads, self.key_size) for y in (q, k))
            v = cast(t, t.view(v, (b, heads, s, self.value_size)), FP32)
            beta, decay = cast(t, t.view(beta, (b, heads, s)), FP32), copy(t, decay, (b, heads, s))
            q, k = scale(t, l2(t, q)), l2(t, k)
            q, k, v = pad(t, q, key_rows), pad(t, k, key_rows), pad(t, v, value_rows)
            beta, decay = pad(t, beta, (b, heads, long)), pad(t, decay, (b, heads, long))
            v_beta, k_beta = weighed(t, v, beta), weighed(t, k, beta)
            frame.local(v, beta, decay, v_beta, k_beta)  # q and k are names of their products below
            upper = constant(t, "upper triangle", (CHUNK, CHUNK), BOOL)
            running = unary(t, "cumsum", decay, saves="nothing")
            between = _decay_between(t, running, upper, square)
            frame.local(upper, running, between)
            system = mul(
                t,
                bmm(
                    t,
                    *_operands(t, k_beta, k, strided=strided),
                    batch,
                    CHUNK,
                    CHUNK,
                    self.key_size,
                    square,
                    name="k_beta k^T",
                ),
                between,
            )
            inside = mul(
                t,
                bmm(
                    t,
                    *_operands(t, q, k, strided=strided),
                    batch,
                    CHUNK,
                    CHUNK,
                    self.key_size,
                    square,
                    name="q k^T",
                ),
                between,
            )
            decayed = weighed(t, k_beta, unary(t, "exp", running, saves="output"))
            frame.local(system, inside, decayed)
            new_values, old_keys = (
                solve(t, system, v_beta, value_rows),
                solve(t, system, decayed, key_rows),
            )
            q = weighed(t, q, unary(t, "exp", running, saves="output"))
            k = weighed(t, k, unary(t, "exp", neg(t, running), saves="output"))
            frame.local(new_values, old_keys)
            state = (b, heads, self.key_size, self.value_size)
            out = walk(t, new_values, old_keys, q, k, inside, chunks, state)
            frame.local(q, k, out)
            return cast(t, copy(t, out), t.policy.autocast or t.policy.parameter_dtype("norm"))

    def _heads(self, t: Tape, x: Value, heads: Size, size: int) -> Value:
        """Query or key heads repeated for the value heads they serve, in fp32, heads first."""
        if t.known(heads) != t.known(self.value_heads):
            x = t.op(
                "repeat_interleave",
                (x,),
                (b, s, self.value_heads, size),
                x.dtype,
                gradients=(LIKE,),
                costs=(Move(2 * traffic(x)),),
            )
        return cast(t, t.view(x, (b, self.value_heads, s, size)), FP32)

    def _gated_norm(self, t: Tape, x: Value, gate: Value, name: str) -> Value:
        with t.scope(name) as frame:
            weight = t.weight("weight", (self.value_size,), kind="norm").value
            wide = cast(t, x, FP32)
            frame.local(wide)
            normed = mul(
                t,
                weight,
                cast(t, weigh_rows(t, wide, rsqrt(t, shift(t, mean_square(t, wide)))), x.dtype),
            )
            frame.local(normed)
            return cast(t, mul(t, normed, silu(t, cast(t, gate, FP32))), x.dtype)


def _operands(t: Tape, x: Value, y: Value, *, strided: bool) -> tuple[Value, Value]:
    """Both factors of a product over rows, heads and chunks, which matmul folds into one batch
    axis: a copy of each where chunks lie inside heads."""
    if not strided:
        return x, y
    return copy(t, x, name="operand of matmul"), copy(t, y, name="operand of matmul")


def l2(t: Tape, x: Value) -> Value:
    """x / sqrt(sum of squares), in fp32 (l2norm)."""
    return weigh_rows(t, x, rsqrt(t, shift(t, row_sum(t, mul(t, x, x)))))


def weighed(t: Tape, x: Value, rows: Value) -> Value:
    """x times one fp32 number a row, of any layout."""
    return weigh_rows(t, x, t.view(rows, (*x.axes[:-1], 1)))


def solve(t: Tape, system: Value, right: Value, axes: tuple[Size, ...]) -> Value:
    """`torch.linalg.solve_triangular`: keeps the system and its result; backward solves again and
    makes the system's gradient."""
    out = t.op(
        "solve_triangular",
        (system, right),
        axes,
        FP32,
        saves=(system,),
        gradients=(LIKE, LIKE),
        costs=(Move(traffic(system) + 2 * traffic(right)),),
        backward_costs=(Move(3 * traffic(system) + 3 * traffic(right), 4),),
    )
    if out.requires_grad:
        t.ops[-1].saves = (*t.ops[-1].saves, out.tensor)
    return out


def _decay_between(t: Tape, running: Value, upper: Value, square: tuple[Size, ...]) -> Value:
    """exp of the differences of running sums, for the pairs of a chunk that are in order."""
    pairs = t.op(
        "sub pairs",
        (running,),
        square,
        FP32,
        gradients=(REDUCE,),
        costs=(Move(2 * traffic(running)),),
    )
    masked = t.op(
        "masked_fill",
        (pairs, upper),
        square,
        FP32,
        saves=(upper,),
        gradients=(LIKE, None),
        costs=(Move(2 * traffic(pairs)),),
    )
    return unary(t, "exp", masked, saves="output")
