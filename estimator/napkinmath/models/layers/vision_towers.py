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
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.encoder import add_broadcast
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.attention import sdpa
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, cast, copy, mul
from napkinmath.ops.index import (
    concatenate,
    constant,
    embedding,
    input_leaf,
    model_input,
    rotary,
    slice_of,
)
from napkinmath.ops.matmul import linear
from napkinmath.ops.whole_scores import eager_attention

TYPE_CHECKING = False


class Patches(Part):
    """Images cut into patches by a convolution, with a class token, learned positions and a norm
    where the tower has them."""

    length: int
    """Patches of an image."""
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
    convolution: str = "patch_embedding"
    scope: str = "embeddings"
    table: str = "position_embedding"
    norm: Norm | None = None
    norm_name: str = ""
    rotary_size: int = 0
    """Width of the tables of a rotary embedding, 0 where there is none."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images: Size = b * max(t.policy.config.batch.images, 1)
        dtype = t.policy.autocast or t.policy.compute_dtype
        pixels = shared["pixel values"] = model_input(
            t, "pixel values", (images, self.length, self._inputs()), dtype
        )
        rows = (images, self.length, self.width)
        with t.scope(self.scope):
            out = input_leaf(
                t,
                patch_projection(
                    t,
                    pixels,
                    self.convolution,
                    rows,
                    self.patch,
                    self.channels,
                    self.width,
                    bias=self.bias,
                ),
            )
            if self.token:
                token = t.weight(self.token, (self.width,)).value
                first = t.view(token, (images, 1, self.width), "expand", copies_gradient=True)
                out = concatenate(t, (first, out), (images, self.length + 1, self.width))
            if self.positions:
                places = constant(t, "position ids", (1, out.axes[1]), INT64)
                out = add_broadcast(
                    t, out, embedding(t, places, self.table, self.positions, self.width)
                )
        if self.rotary_size:
            for name in ("vision cos", "vision sin"):
                shared[name] = constant(t, name, (self.length, self.rotary_size), FP32)
        return self.norm.record(t, out, self.norm_name) if self.norm is not None else out

    def _inputs(self) -> int:
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

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (images, length, width), before the output projection."""
        rows, length, _ = x.axes
        inner = self.heads * self.size
        with t.scope() as frame:
            frame.local(x)
            whole = linear(t, x, "qkv", 3 * inner, bias=True)
            frame.local(whole)
            q, k, v = (slice_of(t, whole, (rows, length, self.heads, self.size)) for _ in range(3))
            q, k = (self._turned(t, y, shared) for y in (q, k))
            q, k, v = (t.view(y, (rows, self.heads, length, self.size)) for y in (q, k, v))
            frame.local(q, k, v)
            if t.policy.config.attention is Attention.EAGER:
                out = eager_attention(
                    t, q, k, v, groups=1, mask=None, fp32_softmax=self.fp32_softmax
                )
            else:
                out = sdpa(t, q, k, v, groups=1, causal=False)
            return t.view(out, (rows, length, inner))

    def _turned(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        return cast(
            t, rotary(t, cast(t, x, FP32), shared["vision cos"], shared["vision sin"]), x.dtype
        )


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


class MlpProjector(Part):
    """Image features into the text's width: optional norm, neighbouring patches merged into one
    row, two linears."""

    inputs: int
    outputs: int
    tokens: int
    """Rows of an image after merging."""
    inner: int = 0
    """Width between the two linears; 0 is the output's."""
    bias: bool = True
    activation: str = "gelu"
    drop_first: bool = False
    """The class token is left out."""
    norm: Norm | None = None
    norm_name: str = "norm"
    norm_merged: bool = False
    """The norm runs over merged rows (Qwen 3 VL's deep features)."""
    merged: int = 1
    """Patches in a row after merging."""
    merger: str = ""
    """A linear that brings merged rows back to the tower's width (Mistral 3)."""
    linears: tuple[str, str] = ("linear_1", "linear_2")

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images = x.axes[0]
        with t.scope() as frame:
            frame.local(x)
            if self.drop_first:
                x = slice_of(t, x, (images, self.tokens * self.merged, self.inputs))
            rows = (images, self.tokens, self.inputs * self.merged)
            if self.norm is not None and not self.norm_merged:
                x = self.norm.record(t, x, self.norm_name)
            if self.merged > 1:
                x = copy(t, x, rows) if self.merger else t.view(x, rows)
            if self.norm is not None and self.norm_merged:
                x = self.norm.record(t, x, self.norm_name)
            if self.merger:
                x = linear(t, x, self.merger, self.inputs)
            frame.local(x)
            wide = activate(
                t,
                linear(t, x, self.linears[0], self.inner or self.outputs, bias=self.bias),
                self.activation,
            )
            return linear(t, wide, self.linears[1], self.outputs, bias=self.bias)


class PooledProjector(Part):
    """Gemma 3: average pooling over squares of patches, a norm, a product with a parameter."""

    inputs: int
    outputs: int
    tokens: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images = x.axes[0]
        square = copy(t, x)
        pooled = t.op(
            "avg_pool2d",
            (square,),
            (images, self.tokens, self.inputs),
            x.dtype,
            saves=(square,),
            gradients=(LIKE,),
            costs=(Move(traffic(x)),),
            backward_costs=(Move(traffic(x)),),
        )
        normed = Norm(kind=NormKind.RMS_GEMMA).record(t, pooled, "mm_soft_emb_norm")
        weight = t.weight(
            "mm_input_projection_weight", (self.inputs, self.outputs), kind="projection"
        ).value
        cost = Gemm(images * self.tokens, self.outputs, self.inputs, x.dtype)
        return t.op(
            "matmul",
            (normed, weight),
            (images, self.tokens, self.outputs),
            x.dtype,
            saves=(normed, weight),
            gradients=(LIKE, LIKE),
            costs=(cost,),
            backward_costs=(cost, cost),
        )


class LinearProjector(Part):
    """One linear, named; optionally without a bias (PaliGemma, Llama 4, Llama 3.2 Vision)."""

    outputs: int
    name: str = "linear"
    bias: bool = True
    scaled: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return linear(t, x, self.name, self.outputs, bias=self.bias)


class WithImages(Part):
    """The text's entrance: token embeddings in which placeholders are replaced by image features
    (masked_scatter)."""

    text: Part

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        words = self.text.record(t, None, shared)
        assert words is not None
        features = shared.get("image features")
        if features is None:
            return words
        mask = constant(t, "places of image tokens", (b, s, 1), BOOL)
        widened = constant(t, "places in every column", words.axes, BOOL)
        return t.op(
            "masked_scatter",
            (words, features, widened),
            words.axes,
            words.dtype,
            saves=(widened, mask),
            gradients=(LIKE, LIKE, None),
            costs=(Move(2 * traffic(words)),),
            backward_costs=(Move(3 * traffic(words), 2),),
        )
