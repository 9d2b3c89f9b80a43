"""Wan 2.1 and 2.2: blocks over the tokens of a video, each with attention to itself, attention to the
text (and to a first picture), and a feed-forward, all modulated by the time in fp32.

Source: diffusers 0.42 models/transformers/transformer_wan.py, models/normalization.py
FP32LayerNorm; the backward of an assignment to a slice: torch csrc/autograd/functions/tensor.cpp
CopySlices.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.record import Record
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import FREE, Steps, Value
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.denoiser import (
    TIME,
    Denoised,
    DenoiserEntrance,
    DenoiserPart,
    embedded,
    sinusoids,
)
from napkinmath.models.layers.mmdit import PLACES, modulated, plain_norm
from napkinmath.ops.attention import sdpa
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, cast, copy, gelu, mul, silu
from napkinmath.ops.index import chunk, concatenate, constant, model_input, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.nodes import freed, gradients_of, made, node, result, workspaces
from napkinmath.ops.norm import layer_norm, rms_norm_fused

MODULATION, TOLD, SHOWN = "modulation by the time", "text of the blocks", "first picture"
PLACES_OF_AN_AXIS = 1024  # rope_max_seq_len
SINUSOIDS = 256  # freq_dim of every published config


class WanEntrance(DenoiserEntrance):
    """Patches of the latents, the time's embedding and modulation, the text's embedding, and that of
    a first picture."""

    width: int
    kernel: tuple[int, int, int]
    """Latent frames, rows and columns of a token."""
    turned: int
    """Elements of each head that places turn."""
    shown_width: int = 0
    """Of the first picture's features; 0 is a model that reads none."""
    shown_tokens: int = 0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        frames, dtype = self.canvas.latent_frames(t.policy.config.batch), t.policy.loaded_dtype
        rows, columns = self.size(t)
        deep, high, wide = self.kernel
        axes = (b, (frames // deep) * (rows // high) * (columns // wide), self.width)
        latents = model_input(t, "latents", (b, self.channels, frames, rows, columns), dtype)
        shared["latents"] = latents
        text = self.read_text(t, shared)
        with t.scope() as frame:
            for name in ("cos", "sin"):
                axes_of_all = (PLACES_OF_AN_AXIS, self.turned)
                t.weight(f"rope.freqs_{name}", axes_of_all, buffer=True, dtype=FP32)
                table = constant(t, f"{PLACES}, {name}", (1, axes[1], 1, self.turned), FP32)
                shared[f"{PLACES}, {name}"] = table
            patches = patch_projection(
                t, latents, "patch_embedding", axes, self.kernel, self.channels, self.width
            )
            if t.policy.autocast is not None:
                patches = cast(t, patches, t.policy.autocast)
            out = copy(t, patches)
            frame.local(out)
            with t.scope("condition_embedder"):
                time = embedded(t, sinusoids(t, "time", SINUSOIDS), "time_embedder", self.width)
                shared[TIME] = time
                made_of = linear(t, silu(t, time), "time_proj", 6 * self.width, bias=True)
                shared[MODULATION] = t.view(made_of, (b, 6, self.width), "unflatten")
                with t.scope("text_embedder"):
                    hidden = gelu(t, linear(t, text, "linear_1", self.width, bias=True))
                    shared[TOLD] = linear(t, hidden, "linear_2", self.width, bias=True)
                if self.shown_width:
                    self._show(t, shared)
            return out

    def _show(self, t: Tape, shared: dict[str, Value]) -> None:
        """Features of the first picture in front of the text (WanImageEmbedding)."""
        dtype = t.policy.loaded_dtype
        seen = model_input(t, SHOWN, (b, self.shown_tokens, self.shown_width), dtype)
        with t.scope("image_embedder"):
            normed = wide_norm(t, seen, "norm1", affine=True)
            hidden = gelu(t, linear(t, normed, "ff.net.0.proj", self.shown_width, bias=True))
            out = linear(t, hidden, "ff.net.2", self.width, bias=True)
            out = wide_norm(t, out, "norm2", affine=True)
        told = shared[TOLD]
        axes = (b, self.shown_tokens + self.canvas.text, self.width)
        shared[TOLD] = concatenate(t, (out, told), axes)


def wide_norm(t: Tape, x: Value, name: str, *, affine: bool) -> Value:
    """FP32LayerNorm: in fp32, then cast back."""
    wide = cast(t, x, FP32)
    return cast(t, layer_norm(t, wide, name=name, affine=affine, bias=affine), x.dtype)


class WanAttention(Record):
    """Attention of a block, from its tokens to themselves or to the text."""

    heads: int
    size: int
    shown: int = 0
    """Tokens of a first picture in front of the text."""

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.size

    def record(self, t: Tape, x: Value, told: Value | None, shared: dict[str, Value]) -> Value:
        """What the block adds, before its gate."""
        with t.scope() as frame:
            frame.local(x)
            source, picture = x if told is None else told, None
            if told is not None and self.shown:
                picture = slice_of(t, told, (b, self.shown, self.width))
                source = slice_of(t, told, (b, told.axes[1] - self.shown, self.width))
            found: list[Value] = []
            for name, read in (("to_q", x), ("to_k", source), ("to_v", source)):
                rows = read if read is x else self._rows(t, read)
                found.append(linear(t, rows, name, self.width, bias=True))
                frame.local(found[-1])
            q, k, v = found
            for at, name in enumerate(("norm_q", "norm_k")):
                normed = rms_norm_fused(t, found[at], name=name)
                frame.release(found[at])
                frame.local(normed)
                found[at] = normed
            q, k = found[:2]
            if told is None:
                turned = turned_in_place(t, self._split(t, q), shared)
                frame.release(q)
                frame.local(turned)
                q = turned
                turned = turned_in_place(t, self._split(t, k), shared)
                frame.release(k)
                frame.local(turned)
                k = turned
            seen = None if picture is None else self._of_picture(t, q, picture)
            if seen is not None:
                frame.local(seen)
            out = self._attended(t, q, k, v)
            frame.local(out)
            if seen is not None:
                both = add(t, out, seen)
                frame.release(out)
                frame.local(both)
                out = both
            return linear(t, out, "to_out.0", self.width, bias=True)

    def _rows(self, t: Tape, x: Value) -> Value:
        """Rows as a product reads them: a slice of several sequences is copied each time."""
        return copy(t, x) if self.shown and t.at_least("b", 2) else x

    def _split(self, t: Tape, x: Value) -> Value:
        return t.view(x, (b, x.axes[1], self.heads, self.size), "unflatten")

    def _by_head(self, t: Tape, x: Value) -> Value:
        length = x.axes[1]
        return t.view(x, (b, self.heads, length, self.size))

    def _attended(self, t: Tape, q: Value, k: Value, v: Value) -> Value:
        """SDPA in the type of the queries again."""
        by_head = tuple(self._by_head(t, each) for each in (q, k, v))
        out = sdpa(t, *by_head, groups=1, causal=False)
        return cast(t, t.view(out, (b, q.axes[1], self.width), "flatten"), q.dtype)

    def _of_picture(self, t: Tape, q: Value, picture: Value) -> Value:
        """What the tokens read of the first picture."""
        k = linear(t, self._rows(t, picture), "add_k_proj", self.width, bias=True)
        v = linear(t, self._rows(t, picture), "add_v_proj", self.width, bias=True)
        return self._attended(t, q, rms_norm_fused(t, k, name="norm_added_k"), v)


def turned_in_place(t: Tape, x: Value, shared: dict[str, Value]) -> Value:
    """Pairs of features turned by tables of all places, each half written into an empty tensor:
    keeps the tables alone.

    Backward, each half's gradient is cut out of a copy of the whole.
    """
    cos, sin = (shared[f"{PLACES}, {name}"] for name in ("cos", "sin"))
    half = (*x.axes[:-1], x.axes[-1] // 2)
    out = result(t, "turned", x.axes, x.dtype, (x,))
    forward: list[tuple[str, object]] = list(made(out.tensor))
    for name in ("even features", "odd features"):
        parts = workspaces(t, half, FP32, (f"{name} x cos", f"{name} x sin", name))
        forward += [*made(*parts), *freed(*parts)]
    backward: list[tuple[str, object]] = []
    held = workspaces(t, half, FP32, ("gradient of even", "gradient of odd"))
    for again in (False, True):
        (whole,) = workspaces(t, x.axes, x.dtype, ("copy of the gradient",))
        (cut,) = workspaces(t, half, x.dtype, ("cut of the gradient",))
        others = workspaces(t, half, FP32, ("product", "other product")) if again else held
        backward += [*made(whole, cut), (FREE, whole), *made(*others)]
        backward += [*freed(*others), *freed(cut)] if again else freed(cut)
    gradients = gradients_of(t, (x,))
    backward += [*made(*(g.tensor for g in gradients)), *freed(*held)]
    steps: Steps = tuple(backward)  # type: ignore[assignment]
    t.append(
        "turned",
        (x, cos, sin),
        (out,),
        forward=tuple(forward),  # type: ignore[arg-type]
        saves=(cos.tensor, sin.tensor),
        costs=(Move(6 * traffic(x), 8),),
        backward=steps if gradients else (),
        gradients=gradients,
        backward_costs=(Move(9 * traffic(x), 12),),
    )
    return out


def _by_time(t: Tape, time: Value, count: int, width: int) -> tuple[Value, ...]:
    """Shifts, scales and gates: a table of the block's own plus what the time made."""
    table = t.weight("scale_shift_table", (1, count, width)).value
    both = result(t, "modulation", (b, count, width), time.dtype, (time, table))
    node(t, "add", (time, table), (both,), new=(both.tensor,), costs=(Move(3 * traffic(time)),))
    parts = chunk(t, t.view(both, (b, count * width)), (width,) * count)
    return tuple(t.view(part, (b, 1, width)) for part in parts)


class WanBlock(DenoiserPart):
    """WanTransformerBlock."""

    attention: WanAttention
    inner: int
    """Width of the feed-forward."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        dtype = x.dtype
        with t.scope() as frame:
            frame.local(x)
            width = self.attention.width
            gates = _by_time(t, cast(t, shared[MODULATION], FP32), 6, width)
            frame.local(*gates)
            seen = self._modulated(t, x, "norm1", gates[1], gates[0])
            frame.local(seen)
            with t.scope("attn1"):
                own = self.attention.replace(shown=0).record(t, seen, None, shared)
            frame.local(own)
            wide = cast(t, x, FP32)
            after = cast(t, add(t, wide, mul(t, own, gates[2])), dtype)
            frame.local(after)
            again = wide_norm(t, after, "norm2", affine=True)
            frame.release(seen)
            frame.local(again)
            with t.scope("attn2"):
                other = self.attention.record(t, again, shared[TOLD], shared)
            frame.release(own)
            frame.local(other)
            read = add(t, after, other)
            frame.release(after)
            frame.local(read)
            fed = self._modulated(t, read, "norm3", gates[4], gates[3])
            frame.release(again)
            frame.local(fed)
            with t.scope("ffn"):
                inner = gelu(t, linear(t, fed, "net.0.proj", self.inner, bias=True))
                out = linear(t, inner, "net.2", width, bias=True)
            frame.local(out)
            wide = cast(t, read, FP32)
            return cast(t, add(t, wide, mul(t, cast(t, out, FP32), gates[5])), dtype)

    def _modulated(self, t: Tape, x: Value, name: str, scales: Value, shifts: Value) -> Value:
        normed = plain_norm(t, cast(t, x, FP32), name)
        return cast(t, modulated(t, normed, scales, shifts), x.dtype)


class WanHead(Denoised):
    """A modulated norm, the projection to patches, the video laid out again, the loss."""

    width: int
    channels: int
    """Of a token."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        time = t.view(shared[TIME], (b, 1, self.width), "unsqueeze")
        table = t.weight("scale_shift_table", (1, 2, self.width)).value
        both = add_broadcast(
            t, Value(table.tensor, (b, 2, self.width), time.dtype, table.requires_grad), time
        )
        shifts, scales = (
            t.view(part, (b, 1, self.width))
            for part in chunk(t, t.view(both, (b, 2 * self.width)), (self.width,) * 2)
        )
        normed = plain_norm(t, cast(t, x, FP32), "norm_out")
        seen = cast(t, modulated(t, normed, scales, shifts), x.dtype)
        out = linear(t, seen, "proj_out", self.channels, bias=True)
        return self.loss(t, copy(t, out))
