"""The UNet of Stable Diffusion: blocks of convolutions and of transformer layers, whose results the
way up reads again.

Source: diffusers 0.42 models/resnet.py ResnetBlock2D, models/unets/unet_2d_blocks.py,
models/transformers/transformer_2d.py, models/attention.py BasicTransformerBlock,
models/unets/unet_2d_condition.py.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.denoiser import (
    TEXT,
    TIME,
    Denoised,
    DenoiserEntrance,
    DenoiserPart,
    Heads,
    embedded,
    gated_gelu,
    sinusoids,
)
from napkinmath.ops.elementwise import add, add_broadcast, copy, scale, silu
from napkinmath.ops.images import cat_with_shared, convolution, enlarged, group_norm
from napkinmath.ops.index import model_input
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


class UNetEntrance(DenoiserEntrance):
    """The time's embedding, of SDXL with the pooled text and the sizes beside it, and the first
    convolution."""

    width: int
    """Channels of the first block."""
    added: int = 0
    """Width of what is embedded beside the time; 0 is nothing."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        height, columns = self.size(t)
        latents = model_input(
            t, "latents", (b, self.channels, height, columns), t.policy.loaded_dtype
        )
        shared["latents"] = latents
        self.read_text(t, shared)
        with t.scope() as frame:
            time = embedded(t, sinusoids(t, "time", self.width), "time_embedding", 4 * self.width)
            if self.added:
                frame.local(time)
                beside = embedded(
                    t, sinusoids(t, "sizes", self.added), "add_embedding", 4 * self.width
                )
                time = add(t, time, beside)
            shared[TIME] = time
            return convolution(t, latents, "conv_in", self.width)


class Resnet(DenoiserPart):
    """Norm, SiLU, convolution, the time's embedding added, and once more, beside a shortcut
    (ResnetBlock2D)."""

    channels: int
    groups: int
    origin: str = ""
    """The shared value that it reads; '' is what comes down the chain."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        given = shared[self.origin] if self.origin else x
        assert given is not None
        time = shared[TIME]
        with t.scope() as frame:
            frame.local(given)
            out = silu(t, group_norm(t, given, "norm1", self.groups))
            out = convolution(t, out, "conv1", self.channels)
            frame.local(out)
            shift = linear(t, silu(t, time), "time_emb_proj", self.channels, bias=True)
            frame.local(shift)
            moved = add_broadcast(t, out, shift)
            frame.release(out)
            out = convolution(
                t, silu(t, group_norm(t, moved, "norm2", self.groups)), "conv2", self.channels
            )
            frame.local(out)
            if given.axes[1] != self.channels:
                given = convolution(t, given, "conv_shortcut", self.channels, kernel=1)
                frame.local(given)
            return scale(t, add(t, given, out))


class Joined(DenoiserPart):
    """What comes up and a result of the way down, side by side (torch.cat over channels)."""

    origin: str
    skip: str

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        below = shared[self.origin] if self.origin else x
        beside = shared[self.skip]
        assert below is not None
        rows, channels, *places = below.axes
        axes = (rows, channels + beside.axes[1], *places)
        return cat_with_shared(t, below, beside, axes)


class Resized(DenoiserPart):
    """Half the height and width by a convolution, or twice by the nearest neighbour and one."""

    channels: int
    origin: str = ""
    up: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        given = shared[self.origin] if self.origin else x
        assert given is not None
        if not self.up:
            return convolution(t, given, "conv", self.channels, stride=2)
        return convolution(t, enlarged(t, given), "conv", self.channels)


class TokensIn(DenoiserPart):
    """Norm and projection before transformer layers, whose tokens are the picture's places
    (Transformer2DModel)."""

    origin: str
    groups: int
    by_linear: bool

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        given = shared[self.origin]
        rows, channels, height, width = given.axes
        tokens = (rows, height * width, channels)
        normed = group_norm(t, given, "norm", self.groups)
        if self.by_linear:
            return linear(t, copy(t, normed, tokens), "proj_in", channels, bias=True)  # type: ignore[arg-type]
        return t.view(convolution(t, normed, "proj_in", channels, kernel=1), tokens)  # type: ignore[arg-type]


class TokensOut(DenoiserPart):
    """Projection after them, and the residual."""

    origin: str
    by_linear: bool

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        residual = shared[self.origin]
        channels: int = residual.axes[1]  # type: ignore[assignment]
        if self.by_linear:
            out = copy(t, linear(t, x, "proj_out", channels, bias=True), residual.axes)
        else:
            out = convolution(t, copy(t, x, residual.axes), "proj_out", channels, kernel=1)
        return add(t, out, residual)


class UNetLayer(DenoiserPart):
    """Attention within the picture, attention to the text, a gated feed-forward, each after a norm
    (BasicTransformerBlock)."""

    heads: Heads

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        width = self.heads.width
        with t.scope() as outer:
            outer.local(x)
            held: list[Value] = []  # until the names are given anew
            for name, text in (("1", None), ("2", shared[TEXT])):
                normed = layer_norm(t, x, name=f"norm{name}")
                outer.local(normed)
                outer.release(*held[:1])
                with t.scope(f"attn{name}"):
                    attended = self.heads.record(t, normed, text, width)
                outer.local(attended)
                outer.release(*held[1:])
                held = [normed, attended]
                x = add(t, attended, x)
            normed = layer_norm(t, x, name="norm3")
            outer.local(normed)
            outer.release(held[0])
            return add(t, gated_gelu(t, normed, width), x)


class UNetHead(Denoised):
    """Norm, SiLU, the last convolution, the loss."""

    groups: int
    channels: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        out = silu(t, group_norm(t, x, "conv_norm_out", self.groups))
        return self.loss(t, convolution(t, out, "conv_out", self.channels))
