"""Llama 3.2 Vision: a tower over the tiles of an image, and text layers that attend to its features
across.

Source: transformers 5.23 models/mllama/modeling_mllama.py. A stage of them runs only where the
batch has images.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, Grows
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.pictures import Pictures
from napkinmath.ir.symbols import a, b, dh, h, k, s
from napkinmath.ir.tape import LIKE, REDUCE, Tape
from napkinmath.models.layers.attend import runs_eager
from napkinmath.models.layers.attention import GroupedQueryAttention, split_heads
from napkinmath.models.layers.decoder import AttentionLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import TowerLayer
from napkinmath.ops.attention import sdpa
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, cast, copy, tanh
from napkinmath.ops.index import concatenate, constant, embedding, input_leaf, model_input, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.whole_scores import eager_attention

LAYER = Norm(kind=NormKind.LAYER)


def images(t: Tape) -> Size:
    """Images of the batch."""
    return b * max(t.policy.config.batch.images, 1)


def gated(t: Tape, x: Value, gate: str) -> Value:
    """tanh of a parameter of one element, times x."""
    weight = t.weight(gate, (1,)).value
    factor = tanh(t, weight)
    saves = (x if factor.requires_grad else None, factor if x.requires_grad else None)
    return t.op(
        "mul gate",
        (x, factor),
        x.axes,
        x.dtype,
        saves=saves,
        gradients=(LIKE, REDUCE),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(4 * traffic(x), 2),),
    )


class Tiles(Part):
    """Tiles through a convolution, embeddings of their place, a class token, learned positions, a
    norm, padding to eights."""

    pictures: Pictures
    tiles: int
    patches: int
    """Of a tile, with the class token."""
    width: int
    patch: int
    channels: int
    ratios: int
    """Rows of the tables by aspect ratio."""

    @property
    def reads(self) -> Pictures:
        return self.pictures

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        count, width, tiles = images(t), self.width, self.tiles
        given = shared["pixel values"] = model_input(
            t,
            "pixel values",
            (count, tiles, self.patches - 1, self.channels * self.patch**2),
            FP32,
        )
        pixels = cast(t, given, t.policy.compute_dtype)
        ratios = shared["aspect ratios"] = model_input(t, "aspect ratio ids", (count, 1), INT64)
        plain = (count, tiles, self.patches - 1, width)
        out = input_leaf(
            t,
            patch_projection(
                t,
                pixels,
                "patch_embedding",
                plain,
                (self.patch,) * 2,
                self.channels,
                width,
                bias=False,
            ),
        )
        out = placed(t, out, ratios, "pre_tile_positional_embedding", self.ratios, tiles)
        token = t.view(
            t.weight("class_embedding", (width,)).value,
            (count, tiles, 1, width),
            "expand",
            copies_gradient=True,
        )
        out = concatenate(t, (token, out), (count, tiles, self.patches, width))
        with t.scope("gated_positional_embedding"):
            table = t.weight("embedding", (self.patches, width)).value
            out = add_broadcast(
                t, out, t.view(gated(t, table, "gate"), (1, 1, self.patches, width))
            )
            places = embedding(
                t, ratios, "tile_embedding", self.ratios, tiles * self.patches * width
            )
            out = add(t, out, gated(t, t.view(places, out.axes), "gate"))
        out = LAYER.record(t, out, "layernorm_pre")
        length = (self.patches + 7) // 8 * 8
        padded = t.op(
            "pad",
            (out,),
            (count, tiles, length, width),
            out.dtype,
            gradients=(LIKE,),
            costs=(Move(2 * traffic(out)),),
        )
        square = (count, 1, tiles * length, tiles * length)
        product = constant(t, "padded patches by padded patches", square, out.dtype)
        shared["tile mask"] = constant(t, "mask of padded patches", square, out.dtype)
        t.touch(product.tensor)
        return t.view(padded, (count, tiles * length, width))


def placed(t: Tape, x: Value, ratios: Value, name: str, rows: int, tiles: int) -> Value:
    """x plus a gated embedding of each tile's place in the image."""
    with t.scope(name):
        width = x.axes[-1]
        table = embedding(t, ratios, "embedding", rows, tiles * width)
        return add_broadcast(t, x, gated(t, t.view(table, (x.axes[0], tiles, 1, width)), "gate"))


class TileAttention(Record):
    """Every patch of an image to every other, tiles together, without biases and under the mask of
    the padding."""

    heads: int
    size: int

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (images, tiles · patches, width), before the output
        projection."""
        rows, length, _ = x.axes
        with t.scope() as frame:
            frame.local(x)
            q, key, value = (
                t.view(
                    linear(t, x, f"{name}_proj", self.heads * self.size),
                    (rows, self.heads, length, self.size),
                )
                for name in "qkv"
            )
            frame.local(q, key, value)
            mask = shared["tile mask"]
            attend = eager_attention if runs_eager(t, False) else sdpa
            return t.view(
                attend(t, q, key, value, groups=1, mask=mask),
                (rows, length, self.heads * self.size),
            )


class GatedTowerLayer(Part):
    """A layer whose sublayers are scaled by the tanh of a parameter each (the global encoder)."""

    layer: TowerLayer

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        layer = self.layer
        with t.scope() as frame:
            frame.local(x)
            normed = layer.norm.record(t, x, layer.names[0])
            with t.scope(layer.scope):
                attended = linear(
                    t,
                    layer.attention.record(t, normed, shared),
                    layer.output,
                    layer.width,
                    bias=layer.output_bias,
                )
            middle = add(t, x, gated(t, attended, "gate_attn"))
            frame.local(middle)
            with t.scope(layer.mlp_scope):
                fed = layer.feed_forward(t, layer.norm.record(t, middle, layer.names[1]))
            return add(t, middle, gated(t, fed, "gate_ffn"))


class BetweenEncoders(Part):
    """The norm after the local encoder, and each tile's place again."""

    tiles: int
    ratios: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        rows, length, width = x.axes
        out = t.view(
            LAYER.record(t, x, "layernorm_post"), (rows, self.tiles, length // self.tiles, width)
        )
        return t.view(
            placed(
                t,
                out,
                shared["aspect ratios"],
                "post_tile_positional_embedding",
                self.ratios,
                self.tiles,
            ),
            x.axes,
        )


class TileFeatures(Part):
    """The last states and those of some inner layers side by side, without the padding; then one
    linear into the text's width.

    The inner layers' states are priced as copies of the last.
    """

    tiles: int
    patches: int
    inner: int
    """Inner layers whose states are taken."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        rows, length, width = x.axes
        last = slice_of(t, x, (rows, self.tiles, self.patches, width))
        stacked = concatenate(t, (x,) * self.inner, (rows, length, width, self.inner), name="stack")
        kept = copy(t, slice_of(t, stacked, (rows, self.tiles, self.patches, width * self.inner)))
        both = concatenate(
            t, (last, kept), (rows, self.tiles, self.patches, width * (1 + self.inner))
        )
        with t.scope("multi_modal_projector"):
            projected = linear(t, both, "", h, bias=True)
        per_sequence = max(t.policy.config.batch.images, 1) * self.tiles * self.patches
        return t.view(projected, (b, per_sequence, h))


class WithCrossMask(Part):
    """The text's entrance, before which the mask of text against tiles is made."""

    text: TokenEmbedding
    tiles: int
    patches: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        if "image features" in shared:
            tiles = t.policy.config.batch.images * self.tiles
            keys = tiles * self.patches
            dtype = t.policy.loaded_dtype
            given = model_input(t, "mask of text against tiles", (b, s, tiles), INT64)
            with t.scope() as frame:
                repeated = constant(t, "mask repeated for patches", (b, 1, s, keys), INT64)
                wide = constant(t, "inverted mask", (b, 1, s, keys), FP32)
                narrow = constant(t, "inverted mask in the model's type", (b, 1, s, keys), dtype)
                frame.local(repeated, narrow)
                t.touch(given.tensor, wide.tensor)
                shared["cross mask"] = constant(t, "cross mask", (b, 1, s, keys), dtype)
                shared["rows with an image"] = constant(t, "rows with an image", (b, s, 1), dtype)
        return self.text.record(t, x, shared)


class CrossAttentionLayer(AttentionLayer):
    """residual + gate · attention from text to image features, residual + gate · feed-forward."""

    attention: GroupedQueryAttention
    mlp: GatedMlp
    patches: int
    """Of an image, tiles together."""
    norm: Norm = Norm()

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of an image's patches, made once."""
        return tuple(
            item.replace(axes=(item.axes[0], self.patches, item.axes[1]), grows=Grows.NOT)
            for item in self.attention.cached
        )

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            attended = self._attended(t, self.norm.record(t, x, "input_layernorm"), shared)
            middle = add(t, x, gated(t, attended, "cross_attn_attn_gate"))
            frame.local(middle)
            fed = self.mlp.record(
                t, self.norm.record(t, middle, "post_attention_layernorm"), shared
            )
            seen = shared.get("rows with an image")
            if seen is not None:
                fed = t.op(
                    "mul",
                    (fed, seen),
                    fed.axes,
                    fed.dtype,
                    saves=(seen,),
                    gradients=(LIKE, None),
                    costs=(Move(2 * traffic(fed)),),
                    backward_costs=(Move(2 * traffic(fed)),),
                )
            return add(t, middle, gated(t, fed, "cross_attn_mlp_gate"))

    def _attended(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        keys = max(t.policy.config.batch.images, 1) * self.patches
        kv: Size = k if self.attention.grouped else a
        with t.scope("cross_attn") as frame:
            frame.local(x)
            features = shared.get("image features") or constant(
                t, "no image features", (b, keys, h), x.dtype
            )
            frame.local(features)
            q = self.norm.record(
                t, split_heads(t, linear(t, x, "q_proj", a * dh), a, copies=True), "q_norm"
            )
            key, value = (
                t.view(linear(t, features, name, kv * dh), (b, kv, keys, dh), copies_gradient=True)
                for name in ("k_proj", "v_proj")
            )
            key = self.norm.record(t, key, "k_norm")
            frame.local(q, key, value)
            groups: Size = a // k if self.attention.grouped else 1
            mask = shared.get("cross mask")
            attend = eager_attention if runs_eager(t, False) else sdpa
            out = attend(t, q, key, value, groups=groups, mask=mask)
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "o_proj", h)
