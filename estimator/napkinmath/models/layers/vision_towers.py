"""Vision towers of vision-language models: patches, layers, projectors, and the place where image
features enter the text.

Every image has the same size here; `rows` of a tower are the images of the batch. Sources:
transformers 5.23 models/clip, models/siglip, models/pixtral, models/qwen2_vl, models/qwen2_5_vl,
models/qwen3_vl, models/llava, models/gemma3, models/mistral3.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.pictures import Pictures
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import PASS, Tape
from napkinmath.models.layers.embedding import FEATURES
from napkinmath.models.layers.masks import mask_name, needs_eager_masks
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.attention import sdpa
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, cast, mul
from napkinmath.ops.index import (
    concatenate,
    constant,
    embedding,
    input_leaf,
    masked_scatter,
    model_input,
    rotary,
    rows_of,
    slice_of,
    split_rows,
)
from napkinmath.ops.matmul import linear
from napkinmath.ops.whole_scores import eager_attention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.recording import RecordingPolicy

WORDS = "word embeddings"
MOST_PIECES = 16
BLOCKS = "mask of which patches are of one image"
PIXELS, BETWEEN = "pixels in the model's type", "positions between rows of the table"
DEEP = "deep features"
ENTERED = "states before the layers"
REAL_TILES = "mask of the pixels of real tiles"


class Patches(Part):
    """Images cut into patches by a convolution, with a class token, learned positions and a norm
    where the tower has them."""

    pictures: Pictures
    width: int
    patch: tuple[int, ...]
    """Extents of a patch: height and width, with a number of frames before them in Qwen's
    towers."""
    channels: int = 3
    bias: bool = False
    token: str = ""
    """Name of the class token's parameter, none where empty."""
    positions: int = 0
    """Rows of the table of learned positions; 0 is none."""
    interpolated: bool = False
    """Each patch has the weighted mean of four of those rows (Qwen 3 VL)."""
    convolution: str = "patch_embedding"
    scope: str = "embeddings"
    table: str = "position_embedding"
    norm: Norm | None = None
    norm_name: str = ""
    rotary_size: int = 0
    """Width of the tables of a rotary embedding, 0 where there is none."""
    leaf: bool = True
    """transformers finds the patch embedding (`_input_embed_layer`), whose output it makes need a
    gradient where checkpoints want one."""
    windowed: bool = False
    """Patches change places so that those of a window are neighbours (Qwen 2.5 VL)."""
    block_mask: bool = False
    """All images are one row of attention under a mask, and the rotary tables have the model's type
    (Pixtral)."""
    stacked: bool = False
    """The processor gives the tiles of an image as an axis of their own, which the model joins in a
    copy (LLaVA-NeXT)."""
    held: bool = False
    """The tower's forward holds what it gives while the layers run."""
    packed: bool = False
    """All images are one sequence, whose every patch has its own row of the rotary tables."""

    @property
    def reads(self) -> Pictures:
        return self.pictures

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return self.leaf and policy.inputs_require_grad

    def tower_axes(self, t: Tape) -> tuple[Size, int]:
        """(tiles of the batch, patches of a tile)."""
        picture = self.pictures.of(t.policy.config.batch)
        return b * max(t.policy.config.batch.images, 1) * picture.tiles, picture.patches

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, length = self.tower_axes(t)
        given = shared["pixel values"] = model_input(
            t, "pixel values", (images, length, self.inputs), FP32
        )
        if self.stacked:
            shared[PIXELS] = given = constant(t, "tiles of all images", given.axes, FP32)
        pixels = cast(t, given, t.policy.compute_dtype)
        if (
            self.packed and not self.block_mask
        ):  # the caller of the tower casts them, and holds them while it runs
            shared[PIXELS] = pixels
        rows = (images, length, self.width)
        with t.scope(self.scope):
            out = patch_projection(
                t,
                pixels,
                self.convolution,
                rows,
                self.patch,
                self.channels,
                self.width,
                bias=self.bias,
            )
            out = input_leaf(t, out) if self.leaf else out
            if self.token:
                token = t.weight(self.token, (self.width,)).value
                first = t.view(token, (images, 1, self.width), "expand", copies_gradient=True)
                out = concatenate(t, (first, out), (images, length + 1, self.width))
            if self.windowed:
                out = rows_of(t, out, "window index")
            if self.interpolated:
                out = add(t, out, self._between_positions(t, shared, images * length, out.axes))
            elif self.positions:
                places = constant(t, "position ids", (1, out.axes[1]), INT64)
                out = add_broadcast(
                    t, out, embedding(t, places, self.table, self.positions, self.width)
                )
        if self.rotary_size:
            places = images * length if self.packed else length
            dtype = out.dtype if self.block_mask else FP32
            for name in ("vision cos", "vision sin"):
                shared[name] = constant(t, name, (places, self.rotary_size), dtype)
        if self.norm is not None:
            out = self.norm.record(t, out, self.norm_name)
        self.hold(t, out, shared)
        return self._under_block_mask(t, out, shared) if self.block_mask else out

    def hold(self, t: Tape, x: Value, shared: dict[str, Value]) -> None:
        """What the layers begin with, where their caller holds it."""
        if self.held and not x.requires_grad:  # else the first layer's backward keeps it
            shared[ENTERED] = constant(t, ENTERED, x.axes, x.dtype)

    def _under_block_mask(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """All images as one row, under a mask of which patches are of one image
        (generate_block_attention_mask)."""
        images, length, width = x.axes
        row = images * length
        shared[BLOCKS] = constant(t, "mask of images", (1, 1, row, row), x.dtype)
        return t.view(x, (1, row, width))

    def _between_positions(
        self, t: Tape, shared: dict[str, Value], patches: Size, axes: tuple[Size, ...]
    ) -> Value:
        """Four rows of the table for each patch, weighted in fp32 and summed
        (get_vision_interpolation_indices_and_weights)."""
        with t.scope() as frame:
            places = constant(t, "nearest positions", (patches, 4), INT64)
            weights = constant(t, "weights of positions", (patches, 4), FP32)
            rows = embedding(t, places, self.table, self.positions, self.width)
            weighted = mul(t, rows, weights)
            frame.local(rows, weighted)
            shared[BETWEEN] = whole = t.op(
                "sum",
                (weighted,),
                axes,
                weighted.dtype,
                gradients=(PASS,),
                costs=(Move(traffic(weighted)),),
            )
            return cast(t, whole, rows.dtype)

    @property
    def inputs(self) -> int:
        """Values of a patch."""
        count = self.channels
        for extent in self.patch:
            count *= extent
        return count


class VisionAttention(Record):
    """q, k and v from one projection, a rotary embedding in fp32, attention within each image
    (Qwen's towers)."""

    heads: int
    size: int
    fp32_softmax: bool = True
    window: int = 0
    """Patches of a window, to which attention is limited; 0 is the whole image. Windows at the edge
    are smaller: all are priced at the mean of them."""
    names: tuple[str, ...] = ()
    """Of a linear each for q, k and v (Qwen 2.5 Omni, PaddleOCR-VL); one makes all where empty."""
    bias: bool = True
    kv_heads: int = 0
    """Heads of keys and values; 0 is as many as of queries (EXAONE 4.5 has fewer)."""
    normed: bool = False
    """RMS norms of each head of queries and keys, before they are turned (GLM-OCR)."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (images, length, width), before the output projection."""
        rows, length, _ = x.axes
        inner, kv_heads = self.heads * self.size, self.kv_heads or self.heads
        with t.scope() as frame:
            frame.local(x)
            heads = (rows, length, self.heads, self.size)
            if self.names:
                made = (linear(t, x, one, inner, bias=self.bias) for one in self.names)
                q, k, v = (t.view(one, heads) for one in made)
            else:
                whole = linear(t, x, "qkv", inner + 2 * kv_heads * self.size, bias=self.bias)
                frame.local(whole)
                each = (heads, *((rows, length, kv_heads, self.size),) * 2)
                q, k, v = (slice_of(t, whole, axes) for axes in each)
            if self.normed:
                frame.local(v)
                q, k = Norm().record(t, q, "q_norm"), Norm().record(t, k, "k_norm")
            q, k = self._turned(t, q, k, shared)
            parts = self._windows(t.known(length))
            q, k, v = (
                t.view(y, (rows * parts, y.axes[2], length // parts, self.size)) for y in (q, k, v)
            )
            frame.local(q, k, v)
            if t.policy.config.attention is Attention.EAGER:
                given = self._image_by_image(t, q, k, v)
            else:
                given = (sdpa(t, q, k, v, groups=self.heads // kv_heads, causal=False),)
            return concatenate(t, given, (rows, length, inner))

    def _image_by_image(self, t: Tape, q: Value, k: Value, v: Value) -> tuple[Value, ...]:
        """Attention of one image after the other: the scores of all are kept for the backward,
        what the softmax needs beside them is there for one at a time. Where there are more images
        than MOST_PIECES, several make a piece."""
        batch = next((n for n in range(MOST_PIECES, 1, -1) if t.at_least("b", n)), 1)
        count = min(batch * max(t.policy.config.batch.images, 1), MOST_PIECES)
        whole = q.axes[0]
        rows = [whole // count] * (count - 1)
        sizes = (*rows, whole - sum(rows))
        pieces = zip(*(split_rows(t, y, sizes) for y in (q, k, v)), strict=True)
        return tuple(
            eager_attention(
                t,
                *piece,
                groups=self.heads // (self.kv_heads or self.heads),
                mask=None,
                fp32_softmax=self.fp32_softmax,
            )
            for piece in pieces
        )

    def _windows(self, length: int | None) -> int:
        """Windows of an image: the nearest number that divides its patches."""
        if not self.window or length is None:
            return 1
        most = max(1, -(-length // self.window))
        return next(count for count in range(most, 0, -1) if length % count == 0)

    def _turned(self, t: Tape, q: Value, k: Value, shared: dict[str, Value]) -> tuple[Value, Value]:
        """Queries and keys turned in fp32, both there until both are done
        (apply_rotary_pos_emb_vision)."""
        with t.scope() as frame:
            wide = [cast(t, y, FP32) for y in (q, k)]
            frame.local(*wide)
            tables = shared["vision cos"], shared["vision sin"]
            first, second = (rotary(t, y, *tables) for y in wide)
            frame.local(first, second)
            turned = cast(t, first, q.dtype)
            frame.release(first)
            return turned, cast(t, second, k.dtype)


if TYPE_CHECKING:
    from typing import Protocol

    class TowerAttention(Protocol):
        """Attention of a tower: hidden states of axes (images, patches, width), before the output
        projection."""

        def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value: ...


class TowerLayer(Part):
    """Residual + attention(norm), residual + feed-forward(norm)."""

    attention: TowerAttention
    width: int
    inner: int
    norm: Norm = Norm(kind=NormKind.LAYER)
    activation: str = "gelu"
    gated: bool = False
    mlp_bias: bool = True
    output_bias: bool = True
    names: tuple[str, str] = ("layer_norm1", "layer_norm2")
    scope: str = "self_attn"
    output: str = "out_proj"
    mlp: tuple[str, ...] = ("fc1", "fc2")
    mlp_scope: str = "mlp"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            normed = self.norm.record(t, x, self.names[0])
            frame.local(normed)
            with t.scope(self.scope):
                attended = self.attention.record(t, normed, shared)
                attended = linear(t, attended, self.output, self.width, bias=self.output_bias)
            frame.release(normed)
            middle = add(t, x, attended)
            frame.release(x)
            frame.local(middle)
            with t.scope(self.mlp_scope):
                fed = self.feed_forward(t, self.norm.record(t, middle, self.names[1]))
            return add(t, middle, fed)

    def feed_forward(self, t: Tape, x: Value) -> Value:
        """The feed-forward of what has been normed."""
        with t.scope() as frame:
            frame.local(x)
            wide = activate(
                t, linear(t, x, self.mlp[0], self.inner, bias=self.mlp_bias), self.activation
            )
            if self.gated:
                wide = mul(t, wide, linear(t, x, self.mlp[1], self.inner, bias=self.mlp_bias))
            return linear(t, wide, self.mlp[-1], self.width, bias=self.mlp_bias)


class TowerNorm(Part):
    """The norm at the end of a tower."""

    norm: Norm
    name: str

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return self.norm.record(t, x, self.name)


class WithImages(Part):
    """Token embeddings in which placeholders are replaced by image features (masked_scatter)."""

    seen_whole: tuple[int, ...] = ()
    """Windows of the text's layers (0 is none) whose masks let the tokens of an image see each
    other, so that SDPA cannot do without one (Gemma 3, PaliGemma)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        words, features = shared.get(WORDS), shared.get(FEATURES)
        if words is None or features is None:  # a batch of text
            return x
        with t.scope() as frame:
            frame.local(words)
            for name in map(mask_name, self._masked(t)):
                if name not in shared:
                    shared[name] = constant(t, "mask that sees images whole", (b, 1, s, s), BOOL)
            mask = constant(t, "places of image tokens", (b, s, 1), BOOL)
            for name in [name for name in shared if name.startswith(DEEP)]:
                deep = shared[name]
                shared[f"all {name}"] = concatenate(t, (deep,), deep.axes)
            return masked_scatter(t, words, features, mask)

    def _masked(self, t: Tape) -> tuple[int, ...]:
        return () if needs_eager_masks(t) else self.seen_whole
