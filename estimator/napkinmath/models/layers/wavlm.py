"""WavLM's attention: a table of relative positions that the first layer looks up, weighed in each
layer by gates of the hidden states, and torch's own function of several heads.

Source: transformers 5.23 models/wavlm/modeling_wavlm.py WavLMAttention; torch 2.13
nn/functional.py multi_head_attention_forward with `need_weights`.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64, DType
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, dh, h, s
from napkinmath.ir.tape import LIKE, PASS, Scope, Tape
from napkinmath.ops.elementwise import cast, copy, dropout, mul, scale, shift, sigmoid, softmax
from napkinmath.ops.index import chunk, constant, embedding
from napkinmath.ops.matmul import bmm, dense_linear, linear
from napkinmath.ops.nodes import gradients_of, made, passed, read_by_gradients, result
from napkinmath.ops.whole_scores import dense_operand

PLACES = "places of pairs"
GATES = 8
"""Outputs of the linear behind the gates: two of four numbers, which are summed."""


class GatedPlaceAttention(Record):
    """Self-attention with gated relative positions."""

    dropout: float = 0.1
    buckets: int = 0
    """Rows of the table, in the first layer; 0 in the others."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value], layer: Scope) -> Value:
        """Attention of x, of axes (b, s, h); `layer` holds the mean of the weights until it
        returns."""
        _refuse_unreached(t)
        with t.scope("attention") as frame:
            frame.local(x)
            if self.buckets:
                shared[PLACES] = self._places(t)
            places = self._gated(t, frame, x, shared[PLACES])
            frame.local(places)
            out, weights = self._attended(t, x, places)
            layer.local(weights)
            return out

    def _places(self, t: Tape) -> Value:
        """compute_bias: one number a head for each pair of positions, repeated for each row."""
        with t.scope() as frame:
            pairs = constant(t, "relative positions", (s, s), INT64)
            frame.local(pairs)
            found = embedding(t, _buckets(t), "rel_attn_embed", self.buckets, a)
            found = t.view(found, (1, a, s, s))
            return t.op(
                "repeat",
                (found,),
                (b, a, s, s),
                found.dtype,
                gradients=(LIKE if t.at_least("b", 2) else PASS,),
                costs=(Move(2 * traffic(found)),),
                backward_costs=(Move(2 * traffic(found)),),
            )

    def _gated(self, t: Tape, frame: Scope, x: Value, places: Value) -> Value:
        """Positions times what the hidden states of each head say of them."""
        heads = copy(t, t.view(_cast(t, x), (b, a, s, dh)), name="operand of matmul")
        said = linear(t, heads, "gru_rel_pos_linear", GATES, bias=True)
        said = t.view(said, (b, a, s, 2, GATES // 2), copies_gradient=True)
        said = t.op(
            "sum",
            (said,),
            (b, a, s, 2),
            said.dtype if t.policy.autocast is None else FP32,
            gradients=(PASS,),
            costs=(Move(traffic(said)),),
        )
        frame.local(said)
        one, other = chunk(t, sigmoid(t, said), (1, 1))
        frame.local(one)
        constants = t.weight("gru_rel_pos_const", (1, a, 1, 1), kind="other").value
        gate = shift(t, mul(t, one, shift(t, mul(t, other, constants))))
        frame.local(gate)
        return mul(t, places, gate)

    def _attended(self, t: Tape, x: Value, places: Value) -> tuple[Value, Value]:
        with t.scope() as frame:
            q, k, v = (
                t.view(_projected(t, x, name), (b, a, s, dh))
                for name in ("q_proj", "k_proj", "v_proj")
            )
            frame.local(q, k, v)
            scaled = scale(t, q)
            frame.local(scaled)
            scores = _added_product(t, places, scaled, k)
            frame.release(scaled)
            frame.release(k)
            frame.local(scores)
            found = softmax(t, scores)
            frame.release(scores)
            weights = dropout(t, found, self.dropout)
            frame.local(weights)
            out = bmm(t, weights, v, b * a, s, dh, s, (b, a, s, dh), name="scores v")
            frame.release(v)
            out = _weighed(t, copy(t, out, (b, s, h)), "out_proj")
            frame.local(out)
            mean = t.op(
                "mean",
                (weights,),
                (b, s, s),
                weights.dtype,
                gradients=(LIKE,),
                costs=(Move(traffic(weights)),),
            )
            return out, mean


def _projected(t: Tape, x: Value, name: str) -> Value:
    """A projection of the hidden states with their axes turned, which a matrix product copies."""
    return _weighed(t, dense_operand(t, _cast(t, x), dense=False), name)


def _cast(t: Tape, x: Value) -> Value:
    """Autocast's copy for a product, made before its axes are turned."""
    return x if t.policy.autocast is None else cast(t, x, t.policy.autocast)


def _weighed(t: Tape, x: Value, name: str) -> Value:
    """A linear whose weight is read past its module."""
    with t.scope(name):
        weight = t.weight("weight", (h, h), kind="linear").value
        return dense_linear(t, x, weight, t.weight("bias", (h,), kind="bias").value)


def _added_product(t: Tape, addend: Value, x: Value, y: Value) -> Value:
    """baddbmm: addend + x y^T; the gradient of the addend is that of the sum."""
    if t.policy.autocast is not None:
        addend, x, y = (cast(t, one, t.policy.autocast) for one in (addend, x, y))
    out = result(t, "places + q k^T", (b, a, s, s), x.dtype, (addend, x, y))
    gradients = gradients_of(t, (x, y))
    cost = Gemm(s, s, dh, x.dtype, b * a)
    t.append(
        "places + q k^T",
        (addend, x, y),
        (out,),
        forward=made(out.tensor),
        saves=read_by_gradients(x, y),
        costs=(cost,),
        backward=made(*(one.tensor for one in gradients)),
        gradients=(*passed(addend), *gradients),
        backward_costs=(cost, cost),
    )
    return out


def _buckets(t: Tape) -> Value:
    """_relative_positions_bucket: each table dies where the next has taken its name."""

    def table(name: str, dtype: DType = INT64, *spent: Value) -> Value:
        found = constant(t, name, (s, s), dtype)
        t.touch(*(value.tensor for value in spent))
        return found

    with t.scope() as frame:
        later = table("which comes later", BOOL)
        halves = table("half of each", INT64, later)
        first = table("buckets", INT64, halves)
        distance = table("distances")
        frame.local(first, distance)
        small = table("which is near", BOOL)
        frame.local(small)
        wide = table("distances in fp32", FP32)
        for name in ("parts of the nearest", "logarithm", "scaled", "times the buckets"):
            wide = table(name, FP32, wide)
        wide = table("far buckets in fp32", FP32, wide)
        far = table("far buckets", INT64, wide)
        last = table("last bucket")
        far = table("far buckets within the table", INT64, far, last)
        frame.local(far)
        table("chosen buckets")
        return first


def _refuse_unreached(t: Tape) -> None:
    """Raises InputError for what sits on linears whose weights are read past their modules."""
    config = t.policy.config
    asked = {"adapters": config.adapter, "quantized weights": config.quantization}
    for what, found in asked.items():
        if found is not None:
            raise InputError(
                f"{what} of WavLM are not priced: its attention multiplies weights past their"
                " modules; leave them out, or use `estimate trace`"
            )
