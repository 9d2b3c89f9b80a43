"""FLUX.1: blocks of two streams, then blocks over one, in which attention and feed-forward run side
by side.

Source: diffusers 0.42 models/transformers/transformer_flux.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import SECOND_STREAM
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.models.layers.denoiser import (
    TIME,
    DenoiserEntrance,
    DenoiserPart,
    embedded,
    sinusoids,
)
from napkinmath.models.layers.mmdit import (
    PLACES,
    JointHeads,
    modulated,
    modulations,
    plain_norm,
)
from napkinmath.ops.elementwise import add, gelu, mul, promote
from napkinmath.ops.images import cat_with_shared
from napkinmath.ops.index import concatenate, constant, model_input, slice_of
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size


class FluxEntrance(DenoiserEntrance):
    """Packed latents and the text's embeddings through a linear each, the time's with guidance and
    the pooled text, tables of places."""

    width: int
    pooled: int
    guided: bool
    turned: int
    """Elements of each head that places turn."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        height, columns = self.size(t)
        tokens = (height // 2) * (columns // 2)
        latents = model_input(t, "latents", (b, tokens, self.channels), t.policy.loaded_dtype)
        shared["latents"] = latents
        text = self.read_text(t, shared)
        with t.scope() as frame:
            out = linear(t, latents, "x_embedder", self.width, bias=True)
            frame.local(out)
            with t.scope("time_text_embed"):
                names = ("timestep_embedder", *(("guidance_embedder",) if self.guided else ()))
                time = None
                for name in names:
                    found = embedded(t, sinusoids(t, name, 256), name, self.width)
                    time = found if time is None else add(t, time, found)
                pooled = sinusoids(t, "pooled text", self.pooled)
                assert time is not None
                time = add(t, time, embedded(t, pooled, "text_embedder", self.width))
            shared[TIME] = time
            shared[SECOND_STREAM] = linear(t, text, "context_embedder", self.width, bias=True)
            for name in ("cos", "sin"):
                table = constant(
                    t, f"{PLACES}, {name}", (1, self.canvas.text + tokens, 1, self.turned), FP32
                )
                shared[f"{PLACES}, {name}"] = table
            return out


class Together(DenoiserPart):
    """Both streams as one sequence, the text first, and the block over it
    (FluxSingleTransformerBlock)."""

    heads: JointHeads
    first: bool = False
    """It joins what the blocks of two streams handed on."""
    text: int
    """Tokens of the text."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        width = self.heads.width
        with t.scope() as frame:
            if self.first:
                told = shared.pop(SECOND_STREAM)
                seen = x
            else:
                told = slice_of(t, x, (b, self.text, width))
                seen = slice_of(t, x, (b, x.axes[1] - self.text, width))
            frame.local(told, seen)
            axes = (b, told.axes[1] + seen.axes[1], width)
            if self.first:
                whole = cat_with_shared(t, seen, told, axes, first=True)
            else:
                whole = concatenate(t, (told, seen), axes)
            frame.local(whole)
            with t.scope("norm"):
                made = modulations(t, shared, 3, width)
                normed = modulated(t, plain_norm(t, whole), made[1], made[0])
            frame.local(normed, *made)
            fed = gelu(t, linear(t, normed, "proj_mlp", 4 * width, bias=True))
            frame.local(fed)
            with t.scope("attn"):
                attended, _ = self.heads.record(t, normed, None, shared, output=False)
            frame.local(attended)
            joined = _side_by_side(t, attended, fed, (*axes[:2], 5 * width))
            frame.local(joined)
            out = linear(t, joined, "proj_out", width, bias=True)
            frame.release(joined)
            gated = mul(t, out, made[2])
            frame.local(gated)
            return add(t, whole, gated)


def _side_by_side(t: Tape, x: Value, y: Value, axes: tuple[Size, ...]) -> Value:
    """`torch.cat` of two types: written in the wider one, the gradient of the narrower cast back."""
    dtype = promote(x.dtype, y.dtype)
    moved = traffic(x, y) + traffic(Value(x.tensor, axes, dtype))
    return t.op(
        "cat",
        (x, y),
        axes,
        dtype,
        gradients=tuple(PASS if each.dtype is dtype else LIKE for each in (x, y)),
        costs=(Move(moved),),
    )
