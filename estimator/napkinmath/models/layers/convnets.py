"""Classifiers of images by convolutions: ResNet, ConvNeXt and ConvNeXt V2.

Source: transformers 5.23 models/resnet/modeling_resnet.py, models/convnext/modeling_convnext.py,
models/convnextv2/modeling_convnextv2.py.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.vision import ImageEntrance
from napkinmath.ops.elementwise import add, add_, add_broadcast, mul, scale, shift
from napkinmath.ops.images import (
    batch_norm,
    convolution,
    global_norm,
    max_pool,
    mean_of_places,
)
from napkinmath.ops.index import constant
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm, row_mean, row_scale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.recording import RecordingPolicy


def normed_convolution(
    t: Tape, x: Value, name: str, channels: int, kernel: int, stride: int, activation: str
) -> Value:
    """A convolution without a bias, a batch norm, an activation where one is named
    (ResNetConvLayer)."""
    with t.scope(name) as frame:
        frame.local(x)
        out = convolution(t, x, "convolution", channels, kernel=kernel, stride=stride, bias=False)
        frame.local(out)
        normed = batch_norm(t, out, "normalization")
        frame.release(out)
        return activate(t, normed, activation) if activation else normed


class ConvEntrance(ImageEntrance):
    """An entrance before layers that the library cannot checkpoint."""

    @property
    def output_is_held_past_layers(self) -> bool:
        return True

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return False


class Stem(ConvEntrance):
    """A convolution of 7 x 7 places at half the size, and a pooling to half of that
    (ResNetEmbeddings)."""

    activation: str = "relu"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        pixels = self.labelled_pixels(t, shared, t.policy.loaded_dtype)
        out = normed_convolution(t, pixels, "embedder", self.width, 7, 2, self.activation)
        return max_pool(t, out)


class Bottleneck(Part):
    """Convolutions with a shortcut around them: 1 x 1, 3 x 3 and 1 x 1 places, or twice 3 x 3
    (ResNetBottleNeckLayer, ResNetBasicLayer)."""

    channels: int
    inner: int = 0
    """Channels between the convolutions of 1 x 1; 0 where there are none."""
    stride: int = 1
    early: bool = False
    """The first convolution of 1 x 1 takes the stride."""
    shortcut: bool = False
    """The shortcut has a convolution and a norm of its own."""
    activation: str = "relu"

    @property
    def steps(self) -> list[tuple[int, int, int, str]]:
        """(channels, kernel, stride, activation) of each convolution."""
        if not self.inner:
            return [
                (self.channels, 3, self.stride, self.activation),
                (self.channels, 3, 1, ""),
            ]
        first, second = (self.stride, 1) if self.early else (1, self.stride)
        return [
            (self.inner, 1, first, self.activation),
            (self.inner, 3, second, self.activation),
            (self.channels, 1, 1, ""),
        ]

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            out = x
            with t.scope("layer"):
                for number, step in enumerate(self.steps):
                    out = normed_convolution(t, out, str(number), *step)
            frame.local(out)
            if self.shortcut:
                x = normed_convolution(t, x, "shortcut", self.channels, 1, self.stride, "")
                frame.local(x)
            total = add_(t, out, x)
            return activate(t, total, self.activation)


class NormedPatches(ConvEntrance):
    """Patches by a convolution as large as its stride, and a norm of each place
    (ConvNextEmbeddings)."""

    patch: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        pixels = self.labelled_pixels(t, shared, t.policy.loaded_dtype)
        out = convolution(
            t,
            pixels,
            "patch_embeddings",
            self.width,
            kernel=self.patch,
            stride=self.patch,
            padded=False,
        )
        return norm_of_channels(t, out, "layernorm")


def places_last(t: Tape, x: Value) -> Value:
    """(rows, channels, height, width) as (rows, height, width, channels): a view."""
    rows, channels, height, width = x.axes
    return t.view(x, (rows, height, width, channels), "permute")


def channels_second(t: Tape, x: Value) -> Value:
    """The other way round."""
    rows, height, width, channels = x.axes
    return t.view(x, (rows, channels, height, width), "permute")


def norm_of_channels(t: Tape, x: Value, name: str) -> Value:
    """A layer norm over the channels of each place. What the convolutions before it hand on has its
    channels last, of which nothing is copied."""
    return channels_second(t, layer_norm(t, places_last(t, x), name=name))


class Halved(Part):
    """A norm, and a convolution of 2 x 2 places that halves the size
    (ConvNextStage.downsampling_layer)."""

    channels: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            normed = norm_of_channels(t, x, "0")
            return convolution(t, normed, "1", self.channels, kernel=2, stride=2, padded=False)


class ConvNextLayer(Part):
    """A convolution of 7 x 7 places a channel, a norm, a feed-forward, added to what came in."""

    channels: int
    activation: str = "gelu"
    scaled: bool = True
    """What the feed-forward gives is scaled by a number a channel."""
    normed: bool = False
    """Between its linears, channels are normed over all places of an image (ConvNextV2GRN)."""
    drops_samples: bool = False
    """For samples chosen at random, the layer is left out."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        width = self.channels
        with t.scope() as frame:
            frame.local(x)
            out = places_last(t, convolution(t, x, "dwconv", width, kernel=7, groups=width))
            out = layer_norm(t, out, name="layernorm")
            out = activate(t, linear(t, out, "pwconv1", 4 * width, bias=True), self.activation)
            if self.normed:
                out = self._normed(t, out)
            out = linear(t, out, "pwconv2", width, bias=True)
            if self.scaled:
                factor = t.weight("layer_scale_parameter", (width,)).value
                out = mul(t, factor, out)
            frame.local(out)
            return add(t, x, self._kept(t, channels_second(t, out)))

    def _kept(self, t: Tape, x: Value) -> Value:
        """Samples left out at random, the others scaled up (ConvNextDropPath)."""
        if not self.drops_samples or not t.policy.training:
            return x
        with t.scope() as frame:
            kept = constant(t, "samples kept", (x.axes[0], 1, 1, 1), x.dtype)
            frame.local(x, kept)
            return mul(t, scale(t, x), kept)

    def _normed(self, t: Tape, x: Value) -> Value:
        with t.scope("grn") as frame:
            axes = (1, 1, 1, x.axes[-1])
            weight, bias = (t.weight(each, axes).value for each in ("weight", "bias"))
            frame.local(x)
            size = global_norm(t, x)
            frame.local(size)
            share = row_scale(t, size, shift(t, row_mean(t, size, size.dtype)))
            frame.local(share)
            out = add_broadcast(t, mul(t, mul(t, x, share), weight), bias)
            return add(t, out, x)


class PooledHead(Part):
    """The mean over all places, a norm where there is one, a classifier."""

    labels: int
    norm: str = ""
    name: str = "classifier"

    @property
    def task(self) -> str:
        return "image-classification"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            pooled = mean_of_places(t, x)
            frame.local(pooled)
            if self.norm:
                pooled = layer_norm(t, pooled, name=self.norm)
                frame.local(pooled)
            logits = linear(t, pooled, self.name, self.labels, bias=True, role=Role.LOGITS)
            frame.local(logits)
            return cross_entropy(t, logits, upcast=False)
