"""Towers that get an image as tiles of one size: Idefics 3 and SmolVLM, InternVL, LLaVA-NeXT.

Source: transformers 5.23 models/idefics3, models/smolvlm, models/internvl, models/llava_next.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.pictures import Pictures
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import PIXELS, REAL_TILES, Patches, TowerLayer
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, cast, copy, dropout, mul, scale
from napkinmath.ops.images import interpolated
from napkinmath.ops.index import (
    concatenate,
    constant,
    embedding,
    input_leaf,
    model_input,
    slice_of,
    split_rows,
)
from napkinmath.ops.matmul import linear

PACKED = "features of each image"
LAST = "last states of the tower"


class RealTiles(Patches):
    """Tiles of which those of padding are taken out, and a position of its own for each patch of
    each tile (Idefics3Model.get_image_features, Idefics3VisionEmbeddings)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, length = self.tower_axes(t)
        side = self.pictures.side
        shape, rows = (images, self.channels, side, side), (images, length, self.width)
        given = shared["pixel values"] = model_input(t, "pixel values", shape, FP32)
        name = "mask of pixels"
        shared[name] = model_input(t, name, (images, side, side), INT64)
        pixels = cast(t, given, t.policy.compute_dtype)
        zeros = constant(t, "pixels that are zero", shape, BOOL)
        shared[PIXELS] = real = constant(t, "pixels of real tiles", shape, pixels.dtype)
        t.touch(pixels.tensor, zeros.tensor)
        shared[REAL_TILES] = constant(t, REAL_TILES, (images, side, side), INT64)
        with t.scope("embeddings") as frame:
            out = patch_projection(
                t,
                real,
                "patch_embedding",
                rows,
                self.patch,
                self.channels,
                self.width,
            )
            places = constant(t, "position ids", (images, length), INT64)
            looked = embedding(t, places, "position_embedding", self.positions, self.width)
            frame.local(out, places, looked)
            return input_leaf(t, add(t, out, looked))


class Folded(Part):
    """Squares of patches folded into rows, after the class token where there is one is dropped: two
    copies (pixel_shuffle of Idefics3Connector and InternVLModel)."""

    merged: int
    norm: str = ""
    """The norm at the end of the tower, whose output the model hands out; none where empty."""
    drop_first: bool = False
    projection: str = ""
    """A linear without a bias that follows; none where empty."""
    outputs: int = 0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images, length, width = x.axes
        with t.scope() as frame:
            frame.local(x)
            if self.norm:
                shared[LAST] = x = Norm(kind=NormKind.LAYER).record(t, x, self.norm)
            if self.drop_first:
                length = length - 1
                x = slice_of(t, x, (images, length, width))
            rows = (images, length // self.merged, width * self.merged)
            folded = copy(t, copy(t, x), rows)
            if not self.projection:
                return folded
            shared[PACKED] = out = linear(t, folded, self.projection, self.outputs)
            return concatenate(t, split_rows(t, out, (images,)), out.axes)


class ClassTokenPatches(Patches):
    """Patches behind a class token, positions as one parameter that all images share
    (InternVLVisionEmbeddings)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, length = self.tower_axes(t)
        side = self.pictures.side
        shape = (images, self.channels, side, side)
        given = shared["pixel values"] = model_input(t, "pixel values", shape, FP32)
        shared[PIXELS] = pixels = cast(t, given, t.policy.compute_dtype)
        with t.scope("embeddings") as frame:
            token = t.weight("cls_token", (1, 1, self.width)).value
            rows = (images, length, self.width)
            patches = input_leaf(
                t,
                patch_projection(
                    t,
                    pixels,
                    "patch_embeddings.projection",
                    rows,
                    self.patch,
                    self.channels,
                    self.width,
                ),
            )
            first = t.view(token, (images, 1, self.width), "expand", copies_gradient=True)
            out = concatenate(t, (first, patches), (images, length + 1, self.width))
            frame.local(out)
            if not self.positions:
                return out
            places = t.weight("position_embeddings", (1, self.positions, self.width)).value
            return add_broadcast(t, out, places)


class WholeNormAttention(BidirectionalAttention):
    """Queries and keys normed over all heads at once, where the model has such norms
    (InternVLVisionAttention)."""

    normed: bool = False

    def _heads(self, t: Tape, x: Value, name: str, bias: bool) -> Value:
        rows, length, _ = x.axes
        projected = linear(t, x, name, self.heads * self.size, bias=bias)
        if self.normed and name != self.names[2]:
            projected = Norm(kind=NormKind.RMS).record(t, projected, name.replace("proj", "norm"))
        return t.view(projected, (rows, self.heads, length, self.size))


class ScaledTowerLayer(TowerLayer):
    """What attention and feed-forward give is scaled by a number a channel before it is added
    (InternVLVisionLayer)."""

    dropout: float = 0.0
    holds_scaled: bool = True
    """The forward has a name for what attention gave until it returns."""
    drops_samples: bool = False
    """Of some images nothing is added, of the others more (QianfanOCRDropPath)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        first, second = (t.weight(f"lambda_{i}", (self.width,)).value for i in (1, 2))
        with t.scope() as frame:
            frame.local(x)
            normed = self.norm.record(t, x, self.names[0])
            with t.scope(self.scope):
                attended = self.attention.record(t, normed, shared)
                attended = linear(t, attended, self.output, self.width, bias=self.output_bias)
            scaled = self._kept(t, mul(t, first, attended))
            frame.local(*[scaled] * self.holds_scaled)
            middle = add(t, scaled, x)
            frame.release(x)
            frame.local(middle)
            with t.scope(self.mlp_scope):
                fed = self.feed_forward(t, self.norm.record(t, middle, self.names[1]))
            return add(t, self._kept(t, mul(t, second, dropout(t, fed, self.dropout))), middle)

    def _kept(self, t: Tape, x: Value) -> Value:
        if not self.drops_samples or not t.policy.training:
            return x
        with t.scope() as frame:
            kept = constant(t, "images kept", (x.axes[0], 1, 1), x.dtype)
            frame.local(x, kept)
            return mul(t, scale(t, x), kept)


class PackedTiles(Part):
    """The features of an image's tiles as one row: those of the whole, then the canvas without its
    padding, a learned token after each of its rows (LlavaNextModel.pack_image_features)."""

    pictures: Pictures

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        tiles, length, width = x.axes
        picture = self.pictures.of(t.policy.config.batch)
        images = tiles // picture.tiles
        if picture.tiles == 1:
            return self._single(t, x, shared)
        with t.scope() as frame:
            (split,) = split_rows(t, x, (tiles,))
            frame.local(x, split)
            whole = slice_of(t, split, (images, length, width))
            parts = slice_of(t, split, (images * (picture.tiles - 1), length, width))
            canvas = copy(t, parts, (images, length * (picture.tiles - 1), width))
            kept = picture.tokens - t.known(length)
            rows = (images, kept - picture.breaks, width)
            cut = slice_of(t, canvas, (images, picture.shrunk, width) if picture.shrunk else rows)
            if picture.shrunk:
                cut = interpolated(t, cut, rows)
            token = t.weight("image_newline", (width,)).value
            breaks = t.view(token, (images, picture.breaks, width), "expand", copies_gradient=True)
            canvas = concatenate(t, (cut, breaks), (images, kept, width))
            axes = (images, picture.tokens, width)
            shared[PACKED] = packed = concatenate(t, (whole, canvas), axes)
            return concatenate(t, (packed,), axes)

    def _single(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """One tile of each image, and the learned token behind it."""
        images, length, width = x.axes
        axes = (images, length + 1, width)
        with t.scope() as frame:
            (split,) = split_rows(t, x, (images,))
            frame.local(x, split)
            token = t.weight("image_newline", (width,)).value
            mark = t.view(token, (images, 1, width), "expand", copies_gradient=True)
            shared[PACKED] = packed = concatenate(t, (split, mark), axes)
            return concatenate(t, (packed,), axes)
