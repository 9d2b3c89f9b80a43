"""Denoisers whose picture and text are two streams of tokens that attend to one another: Stable
Diffusion 3 and the first blocks of FLUX.

Source: diffusers 0.42 models/attention.py JointTransformerBlock, models/attention_processor.py
JointAttnProcessor2_0, models/normalization.py AdaLayerNormZero, AdaLayerNormContinuous,
models/transformers/transformer_flux.py and transformer_sd3.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import SECOND_STREAM
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.denoiser import TIME, Denoised, DenoiserPart
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import (
    add,
    add_broadcast,
    cast,
    copy,
    gelu,
    mul,
    neg,
    rsqrt,
    shift,
    silu,
)
from napkinmath.ops.index import chunk, concatenate, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm, mean_square, rms_norm_fused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.tape import Scope

PLACES = "places of all tokens"  # cos and sin tables


def modulations(t: Tape, shared: dict[str, Value], count: int, width: int) -> tuple[Value, ...]:
    """What the time makes of a block: shifts, scales and gates, one number of each feature."""
    vector = linear(t, silu(t, shared[TIME]), "linear", count * width, bias=True)
    parts = chunk(t, vector, (width,) * count)
    return tuple(t.view(part, (b, 1, width), "unsqueeze") for part in parts)


def modulated(t: Tape, x: Value, scales: Value, shifts: Value) -> Value:
    """x times one more than a scale, plus a shift."""
    return add_broadcast(t, mul(t, x, shift(t, scales)), shifts)


def plain_norm(t: Tape, x: Value, name: str = "norm") -> Value:
    """A LayerNorm without parameters."""
    return layer_norm(t, x, name=name, affine=False, bias=False)


def feed_forward(t: Tape, x: Value, name: str, width: int) -> Value:
    """FeedForward with GELU: four times as wide."""
    with t.scope(name):
        wide = gelu(t, linear(t, x, "net.0.proj", 4 * width, bias=True))
        return linear(t, wide, "net.2", width, bias=True)


def turned(t: Tape, x: Value, shared: dict[str, Value]) -> Value:
    """Pairs of features turned in fp32 by tables of all places (embeddings.apply_rotary_emb)."""
    half = (*x.axes[:-1], x.axes[-1] // 2)
    with t.scope() as frame:
        frame.local(x)
        first, second = chunk(t, x, (half[-1], half[-1]), "unbind")
        rotated = concatenate(t, (neg(t, second), first), x.axes, name="stack")
        frame.local(rotated)
        one = mul(t, cast(t, x, FP32), shared[f"{PLACES}, cos"])
        other = mul(t, cast(t, rotated, FP32), shared[f"{PLACES}, sin"])
        return cast(t, add(t, one, other), x.dtype)


def rms_norm(t: Tape, x: Value, name: str) -> Value:
    """diffusers' own RMSNorm: the factor in fp32, the product with x too, cast to the weight's type
    (models/normalization.py RMSNorm.forward)."""
    with t.scope(name) as frame:
        weight = t.weight("weight", (x.axes[-1],), kind="norm").value
        frame.local(x)
        variance = mean_square(t, cast(t, x, FP32))
        frame.local(variance)
        normed = mul(t, x, rsqrt(t, shift(t, variance)))
        return mul(t, cast(t, normed, weight.dtype), weight)


class JointHeads(Record):
    """Attention over both streams as one sequence; of one stream where there is no other."""

    heads: int
    size: int
    norm: str = ""
    """'fused' is torch's RMSNorm on queries and keys, 'eager' diffusers' own; '' is none."""
    rotary: bool = False
    text_first: bool = False
    """The text comes before the picture, and all is laid out token by token (FLUX)."""

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.size

    def record(
        self,
        t: Tape,
        x: Value,
        text: Value | None,
        shared: dict[str, Value],
        *,
        text_goes_on: bool = True,
        output: bool = True,
    ) -> tuple[Value, Value | None]:
        """What each stream gets."""
        with t.scope() as frame:
            frame.local(x)
            own = self._projected(t, x, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
            frame.local(*own)
            length = x.axes[1]
            if text is not None:
                frame.local(text)
                names = ("add_q_proj", "add_k_proj", "add_v_proj")
                other = self._projected(t, text, names, ("norm_added_q", "norm_added_k"))
                frame.local(*other)
                length = length + text.axes[1]
                axes = self._axes(length)
                own = tuple(
                    concatenate(t, (two, one) if self.text_first else (one, two), axes)
                    for one, two in zip(own, other, strict=True)
                )
                frame.local(*own)
            q, k, v = own
            if self.rotary:
                q = turned(t, q, shared)
                frame.local(q)
                k = turned(t, k, shared)
                frame.local(k)
            joined = text is not None and not self.text_first
            by_head = tuple(t.view(each, (b, self.heads, length, self.size)) for each in (q, k, v))
            out = sdpa(t, *by_head, groups=1, causal=False, contiguous=joined)
            out = cast(t, t.view(out, (b, length, self.width)), q.dtype)
            frame.local(out)
            return self._outputs(t, x, text, out, text_goes_on=text_goes_on, output=output)

    def _axes(self, length: Size) -> tuple[Size, ...]:
        if self.text_first:
            return (b, length, self.heads, self.size)
        return (b, self.heads, length, self.size)

    def _projected(
        self, t: Tape, x: Value, names: tuple[str, ...], norms: tuple[str, str]
    ) -> tuple[Value, ...]:
        axes = self._axes(x.axes[1])
        q, k, v = (
            t.view(linear(t, x, name, self.width, bias=True), (b, x.axes[1], self.width))
            for name in names
        )
        # the gradients that diffusers' norm leaves lie by heads
        copied = self.norm == "eager"
        q, k = (t.view(each, axes, copies_gradient=copied) for each in (q, k))
        v = t.view(v, axes)
        if self.norm == "fused":
            q, k = rms_norm_fused(t, q, name=norms[0]), rms_norm_fused(t, k, name=norms[1])
        elif self.norm:
            q, k = rms_norm(t, q, norms[0]), rms_norm(t, k, norms[1])
        return q, k, v

    def _outputs(
        self,
        t: Tape,
        x: Value,
        text: Value | None,
        out: Value,
        *,
        text_goes_on: bool,
        output: bool,
    ) -> tuple[Value, Value | None]:
        if text is None:
            return (linear(t, out, "to_out.0", self.width, bias=True) if output else out), None
        lengths = (b, x.axes[1], self.width), (b, text.axes[1], self.width)
        if self.text_first:
            told, seen = _split_tokens(t, out, lengths[1], lengths[0])
            # a slice of one sequence is contiguous already
            if t.at_least("b", 2):
                seen = copy(t, seen)
            seen = linear(t, seen, "to_out.0", self.width, bias=True)
            if t.at_least("b", 2):
                told = copy(t, told)
            return seen, linear(t, told, "to_add_out", self.width, bias=True)
        seen, told = slice_of(t, out, lengths[0]), slice_of(t, out, lengths[1])
        if text_goes_on:
            told = linear(t, told, "to_add_out", self.width, bias=True)
        return linear(t, seen, "to_out.0", self.width, bias=True), told


def _split_tokens(
    t: Tape, x: Value, first: tuple[Size, ...], second: tuple[Size, ...]
) -> tuple[Value, Value]:
    """Views of the first and the last tokens, whose gradients are concatenated."""
    from napkinmath.ir.costs import Move, traffic
    from napkinmath.ops.nodes import node, same_storage

    parts = same_storage(x, axes=first), same_storage(x, axes=second)
    if x.requires_grad:
        node(t, "split", (x,), parts, backward_costs=(Move(2 * traffic(x)),))
    return parts


class JointBlock(DenoiserPart):
    """One block of two streams, the picture and beside it the text (FluxTransformerBlock,
    JointTransformerBlock)."""

    heads: JointHeads
    last: bool = False
    """The text ends here: it is read and not handed on."""
    twice: bool = False
    """The picture attends to itself beside (SD 3.5 medium)."""
    keeps_outputs: bool = False
    """The block's forward holds what attention returned beside what it makes of it (FLUX)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        text, width = shared.pop(SECOND_STREAM), self.heads.width
        with t.scope() as frame:
            frame.local(x, text)
            with t.scope("norm1"):
                made = modulations(t, shared, 9 if self.twice else 6, width)
                normed = plain_norm(t, x)
                seen = modulated(t, normed, made[1], made[0])
                frame.local(seen, *made)
                again = modulated(t, normed, made[7], made[6]) if self.twice else None
                if again is not None:
                    frame.local(again)
            with t.scope("norm1_context"):
                told_by = modulations(t, shared, 2 if self.last else 6, width)
                scales, shifts = told_by[:2] if self.last else (told_by[1], told_by[0])
                told = modulated(t, plain_norm(t, text), scales, shifts)
                frame.local(told, *told_by)
            with t.scope("attn"):
                own, other = self.heads.record(t, seen, told, shared, text_goes_on=not self.last)
                if self.keeps_outputs:
                    frame.local(own)
                if other is not None:
                    frame.local(other)
            gated = mul(t, own, made[2])
            frame.local(gated)
            x = add(t, x, gated)
            frame.local(x)
            if again is not None:
                with t.scope("attn2"):
                    own, _ = self.heads.record(t, again, None, shared)
                gated = mul(t, own, made[8])
                frame.local(gated)
                seen_twice = add(t, x, gated)
                frame.release(x)
                x = seen_twice
                frame.local(x)
            frame.release(seen)
            out = self._fed(t, x, "norm2", "ff", made[3:6], frame)
            frame.release(x)
            frame.local(out)
            if not self.last and other is not None:
                text = add(t, text, mul(t, other, told_by[2]))
                frame.release(told)
                frame.local(text)
                parts = told_by[3:6]
                text = self._fed(t, text, "norm2_context", "ff_context", parts, frame)
                shared[SECOND_STREAM] = text
            return out

    def _fed(
        self, t: Tape, x: Value, norm: str, name: str, made: tuple[Value, ...], frame: Scope
    ) -> Value:
        """Norm, feed-forward, gate, residual; the block's own frame holds what it names."""
        fed = modulated(t, plain_norm(t, x, norm), made[1], made[0])
        frame.local(fed)
        gated = mul(t, feed_forward(t, fed, name, self.heads.width), made[2])
        frame.local(gated)
        return add(t, x, gated)


class ModulatedHead(Denoised):
    """A modulated norm, the projection to patches, the loss."""

    width: int
    channels: int
    """Of a patch."""
    joined: int = 0
    """Tokens of the text in front of the picture's, which are cut off; 0 is none."""
    rows: bool = False
    """Patches are laid out as a picture again."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if self.joined:
            x = slice_of(t, x, (b, x.axes[1] - self.joined, self.width))
        with t.scope("norm_out"):
            scales, shifts = modulations(t, shared, 2, self.width)
            normed = modulated(t, plain_norm(t, x), scales, shifts)
        out = linear(t, normed, "proj_out", self.channels, bias=True)
        return self.loss(t, copy(t, out) if self.rows else out)
