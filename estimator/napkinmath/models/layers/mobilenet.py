"""MobileNet V5, the tower of images of Gemma 3n: convolutions over the channels of a place and over
the places of a channel, norms over channels, attention with one head of keys.

Pictures have axes (images, channels, height, width). Source: timm 1.0.31 models/mobilenetv5.py,
models/_efficientnet_blocks.py, layers/attention2d.py and layers/fast_norm.py rms_norm2d;
transformers 5.23 models/gemma3n/modeling_gemma3n.py Gemma3nModel.get_image_features.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.pictures import Pictures
from napkinmath.ir.symbols import b, h
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.gemma4 import NORM, PLAIN
from napkinmath.models.layers.shared_weights import tie
from napkinmath.models.layers.vision_towers import PIXELS
from napkinmath.ops.elementwise import add, cast, copy, mul, rsqrt, scale, shift, square
from napkinmath.ops.images import convolution
from napkinmath.ops.index import concatenate, model_input
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import row_mean, row_scale
from napkinmath.ops.whole_scores import math_attention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.recording import RecordingPolicy


def strided(
    t: Tape,
    x: Value,
    name: str,
    channels: int,
    kernel: int = 1,
    stride: int = 1,
    *,
    groups: int = 1,
    bias: bool = False,
) -> Value:
    """A convolution; where it strides, of a copy padded on the far sides as TensorFlow does
    (Conv2dSame)."""
    if stride == 1:
        return convolution(t, x, name, channels, kernel=kernel, groups=groups, bias=bias)
    rows, inputs, height, width = x.axes
    known = (t.known(side) for side in (height, width))
    sides = [-(-side // stride) * stride - stride + kernel for side in known]
    with t.scope() as frame:
        frame.local(x)
        padded = t.op(
            "pad",
            (x,),
            (rows, inputs, *sides),
            x.dtype,
            gradients=(LIKE,),
            costs=(Move(2 * traffic(x)),),
            backward_costs=(Move(2 * traffic(x)),),
        )
        frame.local(padded)
        return convolution(
            t,
            padded,
            name,
            channels,
            kernel=kernel,
            stride=stride,
            groups=groups,
            bias=bias,
            padded=False,
        )


def norm_of_channels(t: Tape, x: Value, name: str, activation: str = "") -> Value:
    """x over the root of its mean square over the channels of a place, times a weight a channel, in
    the type that x has; the activation that follows."""
    rows, channels, height, width = x.axes
    with t.scope(name) as frame:
        frame.local(x)
        places = t.view(x, (rows, height, width, channels))
        with t.scope() as inner:
            mean = row_mean(t, square(t, places), x.dtype)
            inner.local(mean)
            normed = row_scale(t, places, rsqrt(t, shift(t, mean)))
            inner.local(normed)
            weight = t.weight("weight", (channels,), kind="norm").value
            out = mul(t, normed, weight)
        out = activate(t, out, activation) if activation else out
        return t.view(out, x.axes)


def _normed(
    t: Tape,
    x: Value,
    name: str,
    channels: int,
    kernel: int = 1,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: str = "",
) -> Value:
    """A convolution and its norm, whose caller holds what goes in (ConvNormAct)."""
    with t.scope(name) as frame:
        frame.local(x)
        out = strided(t, x, "conv", channels, kernel, stride, groups=groups)
        return norm_of_channels(t, out, "bn", activation)


def scaled(t: Tape, x: Value, name: str) -> Value:
    """x times a number a channel."""
    rows, channels, height, width = x.axes
    gamma = t.weight(name, (channels,)).value
    return t.view(mul(t, t.view(x, (rows, height, width, channels)), gamma), x.axes)


class PixelStem(Part):
    """The pixels, a convolution that halves the sides, a norm."""

    pictures: Pictures
    width: int = 64

    @property
    def reads(self) -> Pictures:
        return self.pictures

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        side = self.pictures.side
        images = b * max(t.policy.config.batch.images, 1)
        given = shared["pixel values"] = model_input(
            t, "pixel values", (images, 3, side, side), FP32
        )
        shared[PIXELS] = pixels = cast(t, given, t.policy.compute_dtype)
        with t.scope("conv_stem") as frame:
            out = strided(t, pixels, "conv", self.width, 3, 2, bias=True)
            frame.local(out)
            return norm_of_channels(t, out, "bn", "gelu")


class EdgeResidual(Part):
    """A convolution over places and channels, and one that brings the channels back."""

    middle: int
    outputs: int
    stride: int = 1

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            wide = strided(t, x, "conv_exp", self.middle, 3, self.stride)
            wide = norm_of_channels(t, wide, "bn1", "gelu")
            out = norm_of_channels(t, strided(t, wide, "conv_pwl", self.outputs), "bn2")
            return out if self.stride > 1 else add(t, out, x)


class InvertedBottleneck(Part):
    """Channels widened and brought back, with convolutions over the places of each channel before
    and between where they have a kernel (UniversalInvertedResidual)."""

    middle: int
    outputs: int
    start: int = 0
    depth: int = 0
    stride: int = 1
    name: str = ""
    skips: bool = True
    """What came in is added, where nothing strides, times a number a channel before."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope(self.name) as frame:
            frame.local(x)
            out = x
            width = t.known(x.axes[1])
            if self.start:
                stride = 1 if self.depth else self.stride
                out = _normed(t, out, "dw_start", width, self.start, stride, groups=width)
            out = _normed(t, out, "pw_exp", self.middle, activation="gelu")
            if self.depth:
                out = _normed(
                    t,
                    out,
                    "dw_mid",
                    self.middle,
                    self.depth,
                    self.stride,
                    groups=self.middle,
                    activation="gelu",
                )
            out = _normed(t, out, "pw_proj", self.outputs)
            if not self.skips:
                return out
            out = scaled(t, out, "layer_scale.gamma")
            return out if self.stride > 1 else add(t, out, x)


class PlaceAttention(Part):
    """Attention over places with one head of keys and values, which a convolution may thin out, and
    the bottleneck behind it (MobileAttention, MultiQueryAttention2d)."""

    heads: int
    size: int
    stride: int = 1
    """Of the convolutions before keys and values."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        rows, width, tall, wide = x.axes
        with t.scope() as frame:
            frame.local(x)
            normed = norm_of_channels(t, x, "norm")
            with t.scope("attn") as inner:
                inner.local(normed)
                q = strided(t, normed, "query.proj", self.heads * self.size)
                q = copy(t, q, (rows, self.heads, tall * wide, self.size))
                key, value = (self._thinned(t, normed, name) for name in ("key", "value"))
                inner.local(q, key, value)
                out = math_attention(t, q, key, value, groups=1, mask=None, causal=False)
                out = copy(t, out, (rows, self.heads * self.size, tall, wide))
                inner.local(out)
                out = strided(t, out, "output.proj", t.known(width))
            return add(t, scaled(t, out, "layer_scale.gamma"), x)

    def _thinned(self, t: Tape, x: Value, name: str) -> Value:
        rows, width = x.axes[0], t.known(x.axes[1])
        with t.scope(name):
            if self.stride > 1:
                x = strided(t, x, "down_conv", width, 3, self.stride, groups=width)
                x = norm_of_channels(t, x, "norm")
            x = strided(t, x, "proj", self.size)
            return copy(t, x, (rows, 1, x.axes[2] * x.axes[3], self.size))


class LastStage(Part):
    """The last stage, and its features beside those that came in: at the size of the earlier,
    widened and brought to the tower's channels, averaged to a square of tokens
    (MobileNetV5MultiScaleFusionAdapter)."""

    blocks: tuple[Part, ...]
    outputs: int = 2048
    side: int = 16

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            out: Value | None = x
            for number, block in enumerate(self.blocks):
                with t.scope(f"blocks.3.{number}"):
                    out = block.record(t, out, shared)
            assert out is not None
            with t.scope("msfa"):
                return self._fused(t, x, out, shared)

    def _fused(self, t: Tape, earlier: Value, x: Value, shared: dict[str, Value]) -> Value:
        rows, channels, tall, wide = earlier.axes
        with t.scope() as frame:
            frame.local(x)
            axes = (rows, x.axes[1], tall, wide)
            larger = self._moved(t, "upsample_nearest", x, axes)
            frame.local(larger)
            # whose gradient is a slice of the whole until the last stage's is added to it
            first = t.view(earlier, earlier.axes, "expand", copies_gradient=True)
            both = concatenate(t, (first, larger), (rows, channels + x.axes[1], tall, wide))
            frame.local(both)
            ffn = InvertedBottleneck(
                middle=2 * t.known(both.axes[1]), outputs=self.outputs, name="ffn", skips=False
            )
            out = ffn.record(t, both, shared)
            assert out is not None
            out = self._moved(t, "avg_pool2d", out, (rows, self.outputs, self.side, self.side))
            return norm_of_channels(t, out, "norm")

    def _moved(self, t: Tape, name: str, x: Value, axes: tuple[object, ...]) -> Value:
        saves = (x,) if name == "avg_pool2d" else ()
        return t.op(
            name,
            (x,),
            axes,  # type: ignore[arg-type]
            x.dtype,
            saves=saves,
            gradients=(LIKE,),
            costs=(Move(2 * traffic(x)),),
            backward_costs=(Move(2 * traffic(x)),),
        )


class SoftEmbedder(Part):
    """Features scaled in place, normed, projected to the text's width and normed
    (Gemma3nMultimodalEmbedder). The table beside it is the embedding's part."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        rows, channels, tall, wide = x.axes
        with t.scope() as frame:
            x = t.view(x, (rows, tall * wide, channels))
            frame.local(x)
            normed = NORM.record(t, scale(t, x), "soft_embedding_norm")
            frame.local(normed)
            projected = linear(t, normed, "embedding_projection", h)
            frame.local(projected)
            out = PLAIN.record(t, projected, "embedding_post_projection_norm")
        for weight in t.weights:  # which the embedding of ids has declared
            tie(weight, t.module, t.module)
        return out
