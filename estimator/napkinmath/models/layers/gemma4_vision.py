"""Gemma 4's vision tower: patches that are padded to one number, linears that may clip what goes in
and comes out, rotation in two dimensions, pooling by a product in fp32.

Source: transformers 5.23 models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.pictures import Budget
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.models.layers.gemma4 import NORM, PLAIN
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import BLOCKS, Patches
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, cast, clamp, mul, scale, shift
from napkinmath.ops.index import (
    chunk,
    concatenate,
    constant,
    look_up,
    model_input,
    rotary,
    slice_of,
    split_rows,
)
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.whole_scores import eager_attention

LAYER = Norm(kind=NormKind.LAYER)
PADDING = "which patches are padding"
RANGES = ("input_min", "input_max", "output_min", "output_max")


def clippable(t: Tape, x: Value, name: str, outputs: int, *, clips: bool) -> Value:
    """Gemma4ClippableLinear: a linear, whose input and output are clamped to ranges in buffers where
    the config says so."""
    with t.scope(name) as frame:
        ranges = [t.weight(one, (1,), buffer=True).value for one in RANGES if clips]
        if clips:
            x = clamp(t, x, *ranges[:2])
            frame.local(x)
        out = linear(t, x, "linear", outputs)
        return clamp(t, out, *ranges[2:]) if clips else out


class Gemma4Patches(Patches):
    """Patches through a linear, each with a row of a table for its column and one for its row
    (Gemma4VisionPatchEmbedder)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, length = self.tower_axes(t)
        places = (images, length)
        given = shared["pixel values"] = model_input(
            t, "pixel values", (*places, self.inputs), FP32
        )
        name = "positions of patches"
        shared[name] = model_input(t, name, (*places, 2), INT64)
        shared[PADDING] = padding = constant(t, "padding", places, BOOL)
        with t.scope("patch_embedder") as frame:
            pixels = cast(t, scale(t, shift(t, given)), t.policy.compute_dtype)
            frame.local(pixels)
            out = linear(t, pixels, "input_proj", self.width)
            frame.local(out)
            out = add(t, out, self._positions(t, padding, places))
        size = self.rotary_size
        for name in ("vision cos", "vision sin"):
            shared[name] = constant(t, name, (*places, 1, size), out.dtype)
        picture = self.pictures.of(t.policy.config.batch)
        if picture.rows * picture.columns < length:
            eager = t.policy.config.attention is Attention.EAGER
            dtype = out.dtype if eager else BOOL
            shared[BLOCKS] = constant(t, "mask of padding", (images, 1, length, length), dtype)
        return out

    def _positions(self, t: Tape, padding: Value, places: tuple[Size, int]) -> Value:
        with t.scope() as frame:
            table = t.weight("position_embedding_table", (2, self.positions, self.width)).value
            clamped = constant(t, "clamped positions", (*places, 2), INT64)
            both: list[Value] = []
            for _ in ("column", "row"):
                ids = Value(clamped.tensor, places, INT64)
                part = slice_of(t, table, (self.positions, self.width))
                both.append(look_up(t, ids, part, self.width))
            frame.local(clamped, *both)
            total = add(t, both[0], both[1])
            return _filled(t, total, padding, "where")


def _filled(t: Tape, x: Value, mask: Value, name: str) -> Value:
    """x with zeros where the mask says so: keeps the mask."""
    return t.op(
        name,
        (x, mask),
        x.axes,
        x.dtype,
        saves=(mask,),
        gradients=(LIKE, None),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(2 * traffic(x)),),
    )


class Gemma4VisionAttention(Record):
    """Queries and keys normed and turned by columns and by rows, values normed, no scale
    (Gemma4VisionAttention)."""

    heads: int
    kv_heads: int
    size: int
    clips: bool = False
    dropout: float = 0.0

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (images, patches, width), with the output projection."""
        images, length, width = x.axes
        with t.scope("self_attn") as frame:
            frame.local(x)
            q = self._turned(t, self._projected(t, x, "q", self.heads), "q_norm", shared)
            k = self._turned(t, self._projected(t, x, "k", self.kv_heads), "k_norm", shared)
            v = PLAIN.record(t, self._projected(t, x, "v", self.kv_heads), "v_norm")
            q, k, v = (t.view(y, (images, y.axes[2], length, self.size)) for y in (q, k, v))
            frame.local(q, k, v)
            groups, mask = self.heads // self.kv_heads, shared.get(BLOCKS)
            if t.policy.config.attention is Attention.EAGER:
                out = eager_attention(
                    t,
                    q,
                    k,
                    v,
                    groups=groups,
                    mask=mask,
                    dropout_p=self.dropout,
                    fp32_softmax=True,
                )
            else:
                out = sdpa(
                    t, q, k, v, groups=groups, mask=mask, causal=False, dropout_p=self.dropout
                )
            frame.local(out)
            rows = t.view(out, (images, length, self.heads * self.size))
            return clippable(t, rows, "o_proj", t.known(width), clips=self.clips)

    def _projected(self, t: Tape, x: Value, name: str, heads: int) -> Value:
        out = clippable(t, x, f"{name}_proj", heads * self.size, clips=self.clips)
        return t.view(out, (*x.axes[:2], heads, self.size))

    def _turned(self, t: Tape, x: Value, norm: str, shared: dict[str, Value]) -> Value:
        """Each half of a head turned by the places of one dimension (apply_multidimensional_rope)."""
        half, normed = self.size // 2, NORM.record(t, x, norm)
        cos, sin = (
            Value(y.tensor, (*y.axes[:-1], half), y.dtype)
            for y in (shared["vision cos"], shared["vision sin"])
        )
        with t.scope() as frame:
            parts = chunk(t, normed, (half, half), "split")
            frame.local(normed, *parts)
            turned = tuple(rotary(t, part, cos, sin) for part in parts)
            frame.local(*turned)
            return concatenate(t, turned, x.axes)


class Gemma4VisionLayer(Part):
    """Attention and a gated feed-forward, each between two norms (Gemma4VisionEncoderLayer)."""

    attention: Gemma4VisionAttention
    width: int
    inner: int
    activation: str = "gelu_pytorch_tanh"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            normed = NORM.record(t, x, "input_layernorm")
            out = self.attention.record(t, normed, shared)
            middle = add(t, x, NORM.record(t, out, "post_attention_layernorm"))
            frame.release(x)
            frame.local(middle)
            out = self._fed(t, NORM.record(t, middle, "pre_feedforward_layernorm"))
            return add(t, middle, NORM.record(t, out, "post_feedforward_layernorm"))

    def _fed(self, t: Tape, x: Value) -> Value:
        clips = self.attention.clips
        with t.scope("mlp") as frame:
            frame.local(x)
            gate = clippable(t, x, "gate_proj", self.inner, clips=clips)
            gate = activate(t, gate, self.activation)
            wide = mul(t, gate, clippable(t, x, "up_proj", self.inner, clips=clips))
            return clippable(t, wide, "down_proj", self.width, clips=clips)


class Gemma4Pooler(Part):
    """Squares of patches averaged by a product with their shares, scaled in fp32, padding taken out,
    standardized where the config says so (Gemma4VisionPooler, Gemma4VisionModel.forward)."""

    pictures: Budget
    standardized: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = _filled(t, x, shared[PADDING], "masked_fill")
            if self.pictures.pooled > 1:
                hidden = self._average(t, hidden)
            hidden = scale(t, cast(t, hidden, FP32))
            real = real_rows(t, hidden, self.pictures.of(t.policy.config.batch).tokens)
            if self.standardized:
                real = self._standardize(t, real)
            return cast(t, real, x.dtype)

    def _average(self, t: Tape, x: Value) -> Value:
        images, patches, width = x.axes
        shares = (images, patches, self.pictures.most)
        with t.scope("pooler") as frame:
            frame.local(x)
            one_hot = constant(t, "one-hot places", shares, INT64)
            wide = constant(t, "one-hot places in fp32", shares, FP32)
            t.touch(one_hot.tensor)
            weights = constant(t, "shares of patches", shares, FP32)
            t.touch(wide.tensor)
            frame.local(weights)
            hidden, tokens = cast(t, x, FP32), self.pictures.most
            axes = (images, tokens, width)
            pooled = bmm(t, weights, hidden, images, tokens, width, patches, axes)
            frame.local(pooled)
            return cast(t, pooled, x.dtype)

    def _standardize(self, t: Tape, x: Value) -> Value:
        bias, factor = (
            cast(t, t.weight(name, (x.axes[-1],), buffer=True).value, FP32)
            for name in ("std_bias", "std_scale")
        )
        t.touch(bias.tensor)
        return mul(t, shift(t, x), factor)


class Gemma4Squares(Patches):
    """Squares of pixels normed and through a linear, with rows of a table for their column and row;
    no tower follows (Gemma4UnifiedVisionEmbedder)."""

    outputs: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        places = images, _ = self.tower_axes(t)
        given = shared["pixel values"] = model_input(
            t, "pixel values", (*places, self.inputs), FP32
        )
        name = "positions of patches"
        shared[name] = model_input(t, name, (*places, 2), INT64)
        with t.scope() as frame:
            pixels = cast(t, given, t.policy.compute_dtype)
            out = linear(
                t, LAYER.record(t, pixels, "patch_ln1"), "patch_dense", self.width, bias=True
            )
            out = LAYER.record(t, out, "patch_ln2")
            frame.local(pixels, out)
            out = add(t, out, self._placed(t, places))
            frame.local(out)
            out = LAYER.record(t, out, "pos_norm")
            frame.local(out)
            with t.scope("multimodal_embedder"):
                out = PLAIN.record(t, out, "embedding_pre_projection_norm")
                out = linear(t, out, "embedding_projection", self.outputs)
        real = real_rows(t, out, self.pictures.of(t.policy.config.batch).tokens)
        return concatenate(t, split_rows(t, real, (images,)), real.axes)

    def _placed(self, t: Tape, places: tuple[Size, int]) -> Value:
        """The sum of two rows of the table, zero for padding."""
        both = (*places, 2, self.width)
        table = t.weight("pos_embedding", (self.positions, 2, self.width)).value
        with t.scope() as frame:
            clamped = constant(t, "clamped positions", (*places, 2), INT64)
            valid = constant(t, "positions that count", (*places, 2, 1), table.dtype)
            moved = 2 * traffic(Value(table.tensor, both, table.dtype))
            rows = t.op(
                "index",
                (table, clamped),
                both,
                table.dtype,
                saves=(clamped,),
                gradients=(LIKE, None),
                costs=(Move(moved),),
                backward_costs=(Move(moved, 2),),
            )
            frame.local(clamped, valid, rows)
            kept = mul(t, rows, valid)
            frame.local(kept)
            out = (*places, self.width)
            return t.op(
                "sum", (kept,), out, kept.dtype, gradients=(PASS,), costs=(Move(traffic(kept)),)
            )


def real_rows(t: Tape, x: Value, tokens: int) -> Value:
    """The rows of x (images, patches, width) that are no padding, found by a mask."""
    images, _, width = x.axes
    places = constant(t, "places of tokens", (2, images * tokens), INT64)
    out = (images, tokens, width)
    moved = 2 * traffic(Value(x.tensor, out, x.dtype))
    return t.op(
        "index",
        (x, places),
        out,
        x.dtype,
        saves=(places,),
        gradients=(LIKE, None),
        costs=(Move(moved),),
        backward_costs=(Move(2 * traffic(x), 2),),
    )


class Gemma4Embedder(Part):
    """The tower's features normed and brought to the text's width, then joined image by image
    (Gemma4MultimodalEmbedder, Gemma4Model.get_image_features)."""

    outputs: int
    kind: str = "linear"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        normed = PLAIN.record(t, x, "embedding_pre_projection_norm")
        out = linear(t, normed, "embedding_projection", self.outputs, kind=self.kind)
        return concatenate(t, split_rows(t, out, (out.axes[0],)), out.axes)
