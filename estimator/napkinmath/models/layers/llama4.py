"""Llama 4: chunked attention with rotation as complex numbers, layers without rotation, and experts
that all see every token.

Source: transformers 5.23 models/llama4/modeling_llama4.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, dh, e, fe, h, k, s, topk
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.lowering.packed_parameters import whole_parameter
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.masks import mask_name
from napkinmath.models.layers.mlp import ACTIVATIONS, GatedMlp, activate
from napkinmath.models.layers.router import TOKENS
from napkinmath.models.layers.vision_towers import Patches
from napkinmath.ops import routing
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add_, cast, copy, mul, rsqrt, shift, sigmoid
from napkinmath.ops.index import chunk, constant, input_leaf, model_input
from napkinmath.ops.matmul import autocast_weight, linear
from napkinmath.ops.norm import mean_square
from napkinmath.ops.rotary import rotary_complex
from napkinmath.ops.whole_scores import eager_attention


class Llama4Attention(Record):
    """Grouped-query attention; `rotated` layers turn q and k (and norm them), others may scale q by
    position."""

    rotated: bool = True
    normed: bool = True
    tempered: bool = True
    bias: bool = False
    window: int = 0
    """Chunk of a chunked layer: its mask is one of its own once the sequence is longer."""
    dropout: float = 0.0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values; a chunked layer keeps a chunk of them."""
        return keys_and_values(k, window=self.window)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            q, key = (
                t.view(linear(t, x, name, heads * dh, bias=self.bias), (b, s, heads, dh))
                for name, heads in (("q_proj", a), ("k_proj", k))
            )
            value = t.view(linear(t, x, "v_proj", k * dh, bias=self.bias), (b, k, s, dh))
            if self.rotated:
                q, key = rotary_complex(t, q, key, shared["rotary"])
                if self.normed:
                    q, key = l2_norm(t, q), l2_norm(t, key)
            elif self.tempered:
                factors = constant(t, "scales by position", (1, s, 1, 1), FP32)
                q = cast(
                    t,
                    t.op(
                        "mul by position",
                        (q, factors),
                        q.axes,
                        FP32,
                        saves=(factors,),
                        gradients=(LIKE, None),
                        costs=(Move(3 * traffic(q)),),
                    ),
                    q.dtype,
                )
                frame.local(factors)
            q, key = t.view(q, (b, a, s, dh)), t.view(key, (b, k, s, dh))
            frame.local(q, key, value)
            out = self._attend(t, q, key, value, shared.get(mask_name(self.window)))
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "o_proj", h, bias=self.bias)

    def _attend(self, t: Tape, q: Value, key: Value, value: Value, mask: Value | None) -> Value:
        if t.policy.config.attention is Attention.EAGER:
            return eager_attention(
                t,
                q,
                key,
                value,
                groups=a // k,
                mask=mask,
                dropout_p=self.dropout,
                fp32_softmax=False,
            )
        return sdpa(t, q, key, value, groups=a // k, mask=mask, dropout_p=self.dropout)


def l2_norm(t: Tape, x: Value) -> Value:
    """x / root of its mean square in fp32, without weights (Llama4TextL2Norm)."""
    with t.scope("qk_norm") as frame:
        frame.local(x)
        wide = cast(t, x, FP32)
        frame.local(wide)
        inverse = rsqrt(t, shift(t, mean_square(t, wide)))
        return cast(t, routing.weigh_rows(t, wide, inverse), x.dtype)


class AllExperts(Record):
    """Every expert runs on every token, weighed by a score that is zero for those not chosen: e
    copies of the hidden states.

    transformers has no grouped form of it. The router is a subclass of nn.Linear that returns a
    tuple: PEFT's all-linear picks it and fails, so it is priced without an adapter.
    """

    shared: GatedMlp
    activation: str = "silu"

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x of axes (b, s, h)."""
        with t.scope("feed_forward") as frame:
            frame.local(x)
            flat = t.view(x, (TOKENS, h))
            scores = self._scores(t, flat)
            rows: Size = e * TOKENS
            repeated = t.op(
                "repeat",
                (flat,),
                (rows, h),
                x.dtype,
                gradients=(LIKE,),
                costs=(Move(2 * rows * h * 2),),
                backward_costs=(Move(2 * rows * h * 2),),
            )
            by_expert = copy(t, scores, (rows, 1), name="scores by expert")
            routed = routing.weigh_rows(t, repeated, by_expert)
            frame.local(scores, routed)
            out = self._experts(t, routed)
            frame.local(out)
            common = self.shared.record(t, flat, shared)
            summed = t.op(
                "sum over experts",
                (out,),
                (TOKENS, h),
                FP32 if t.policy.autocast is not None else out.dtype,
                gradients=(LIKE,),
                costs=(Move(traffic(out)),),
            )
            return t.view(add_(t, common, summed), x.axes)

    def _scores(self, t: Tape, x: Value) -> Value:
        with t.scope("router") as frame:
            logits = linear(t, x, "", e, kind="router")
            t.keep(logits)  # the layer's forward has a name for them
            values, indices = routing.top_k(t, logits, topk)
            frame.local(logits, values, indices)
            spread = t.op(
                "scatter_",
                (values, indices),
                logits.axes,
                logits.dtype,
                saves=(indices,),
                gradients=(LIKE, None),
                costs=(Move(2 * traffic(logits)),),
            )
            frame.local(spread)
            return cast(t, sigmoid(t, cast(t, spread, FP32)), logits.dtype)

    def _experts(self, t: Tape, x: Value) -> Value:
        with t.scope("experts") as frame:
            stacks = [
                t.weight(name, axes, kind="experts")
                for name, axes in (("gate_up_proj", (e, h, 2 * fe)), ("down_proj", (e, fe, h)))
            ]
            up = whole_parameter(t, frame, stacks[0])
            both = batched(t, t.view(x, (e, TOKENS, h)), up, (e, TOKENS, 2 * fe))
            gate, other = chunk(t, both, (fe, fe))
            frame.local(x, both)
            middle = mul(t, other, ACTIVATIONS[self.activation](t, gate))
            down = whole_parameter(t, frame, stacks[1])
            return batched(t, middle, down, (e, TOKENS, h))


def batched(t: Tape, x: Value, w: Value, axes: tuple[Size, ...]) -> Value:
    """One product an expert: keeps x for the weight's gradient and the weight for x's."""
    if t.policy.autocast is not None:
        x, w = cast(t, x, t.policy.autocast), autocast_weight(t, w)
    batch, rows, inner = x.axes
    saves = (w if x.requires_grad else None, x if w.requires_grad else None)
    costs = (Gemm(rows, axes[2], inner, x.dtype, batch),)
    return t.op(
        "bmm",
        (w, x),
        axes,
        x.dtype,
        saves=saves,
        gradients=(LIKE, LIKE),
        costs=costs,
        backward_costs=costs * (int(x.requires_grad) + int(w.requires_grad)),
    )


class Llama4Patches(Patches):
    """Patches by unfolding and one linear, the class token last, positions as a parameter, a
    norm."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        from napkinmath.ops.index import concatenate

        images, length = self.tower_axes(t)
        dtype, inputs = BF16, self.inputs  # Llama4ImageProcessor.rescale_and_normalize
        pixels = shared["pixel values"] = model_input(
            t, "pixel values", (images, length, inputs), dtype
        )
        with t.scope("patch_embedding"):
            unfolded = constant(t, "unfolded patches", (images, length, inputs), dtype)
            t.touch(pixels.tensor)
            out = input_leaf(t, linear(t, unfolded, "linear", self.width))
        token = t.weight("class_embedding", (self.width,)).value
        out = concatenate(
            t,
            (out, t.view(token, (images, 1, self.width), "expand", copies_gradient=True)),
            (images, length + 1, self.width),
        )
        places = t.weight("positional_embedding_vlm", (length + 1, self.width)).value
        out = t.op(
            "add positions",
            (out, places),
            out.axes,
            out.dtype,
            gradients=(PASS, LIKE),
            costs=(Move(2 * traffic(out)),),
        )
        shared["vision rotary"] = constant(t, "rotary table", (length + 1, self.rotary_size), FP32)
        from napkinmath.models.layers.norm import Norm, NormKind

        return Norm(kind=NormKind.LAYER).record(t, out, "layernorm_pre")


class ComplexBidirectionalAttention(BidirectionalAttention):
    """A tower's attention with rotation as complex numbers."""

    def turn(self, t: Tape, q: Value, k: Value, shared: dict[str, Value]) -> tuple[Value, Value]:
        """Queries and keys turned by the tower's table."""
        return rotary_complex(t, q, k, shared["vision rotary"])


class PixelShuffle(Part):
    """The class token dropped, squares of patches folded into one row, two linears each with an
    activation (Llama4VisionPixelShuffleMLP)."""

    inputs: int
    merged: int
    inner: int
    outputs: int
    dropout: float = 0.0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        from napkinmath.ops.elementwise import dropout
        from napkinmath.ops.index import slice_of

        assert x is not None
        images, length = x.axes[0], x.axes[1] - 1
        with t.scope() as frame:
            frame.local(x)
            x = slice_of(t, x, (images, length, self.inputs))
            rows = (images, length // self.merged, self.inputs * self.merged)
            # each view's gradient comes permuted, so that a copy of it is made
            first = copy(t, t.view(x, x.axes, copies_gradient=True))
            folded = copy(t, t.view(first, x.axes, copies_gradient=True), rows)
            wide = dropout(
                t, activate(t, linear(t, folded, "mlp.fc1", self.inner), "gelu"), self.dropout
            )
            return activate(t, linear(t, wide, "mlp.fc2", self.outputs), "gelu")
