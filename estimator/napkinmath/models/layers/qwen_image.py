"""Qwen-Image: blocks of two streams that attend to one another, the picture's and the text's, each
modulated by the time.

Source: diffusers 0.42 models/transformers/transformer_qwenimage.py QwenImageTransformerBlock,
QwenDoubleStreamAttnProcessor2_0, apply_rotary_emb_qwen.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.record import Record
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import SECOND_STREAM
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.denoiser import (
    TIME,
    DenoiserEntrance,
    DenoiserPart,
    embedded,
    sinusoids,
)
from napkinmath.models.layers.mmdit import (
    PLACES,
    feed_forward,
    modulated,
    plain_norm,
    rms_norm,
)
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, cast, copy, mul, silu
from napkinmath.ops.index import chunk, concatenate, constant, model_input, slice_of
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.base.expr import Size
    from napkinmath.ir.tape import Scope

SINUSOIDS = 256
PLACES_OF_AN_AXIS = 4096  # QwenEmbedRope pos_index


class QwenImageEntrance(DenoiserEntrance):
    """Packed latents through a linear, the text's embeddings normed and through one, the time's."""

    width: int
    turned: int
    """Elements of each head that places turn."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        height, columns = self.size(t)
        tokens = (height // 2) * (columns // 2)
        latents = model_input(t, "latents", (b, tokens, self.channels), t.policy.loaded_dtype)
        shared["latents"] = latents
        text = self.read_text(t, shared)
        with t.scope() as frame:
            out = linear(t, latents, "img_in", self.width, bias=True)
            frame.local(out)
            normed = rms_norm(t, text, "txt_norm")
            shared[SECOND_STREAM] = linear(t, normed, "txt_in", self.width, bias=True)
            with t.scope("time_text_embed"):
                time = sinusoids(t, "time", SINUSOIDS)
                shared[TIME] = embedded(t, time, "timestep_embedder", self.width)
            self._turn(t, tokens, shared)
            return out

    def _turn(self, t: Tape, tokens: int, shared: dict[str, Value]) -> None:
        """Complex numbers of all places: the picture's are made once for its size and joined anew in
        every forward."""
        with t.scope("pos_embed"):
            for name, length in (
                ("pos_freqs", PLACES_OF_AN_AXIS),
                ("neg_freqs", PLACES_OF_AN_AXIS),
                ("freqs of the size", tokens),
            ):
                t.weight(name, (length, self.turned), buffer=True, dtype=FP32)
        for name, length in (("picture", tokens), ("text", self.canvas.text)):
            table = constant(t, f"{PLACES}, {name}", (length, self.turned), FP32)
            shared[f"{PLACES}, {name}"] = table


def turned(t: Tape, x: Value, table: Value) -> Value:
    """Pairs of features as complex numbers in fp32 times a table: keeps the table alone."""
    wide = cast(t, x, FP32)
    out = t.op(
        "mul complex",
        (wide, table),
        wide.axes,
        FP32,
        saves=(table,),
        gradients=(LIKE, None),
        costs=(Move(2 * traffic(wide)),),
        backward_costs=(Move(2 * traffic(wide)),),
    )
    return cast(t, out, x.dtype)


class TwoStreams(Record):
    """Attention over both streams as one sequence, the text first."""

    heads: int
    size: int

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.size

    def record(
        self, t: Tape, x: Value, text: Value, shared: dict[str, Value], *, ends: bool
    ) -> tuple[Value, Value]:
        """What each stream gets."""
        with t.scope() as frame:
            frame.local(x, text)
            streams = (
                ("picture", x, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")),
                (
                    "text",
                    text,
                    ("add_q_proj", "add_k_proj", "add_v_proj"),
                    ("norm_added_q", "norm_added_k"),
                ),
            )
            read: dict[str, list[Value]] = {}
            for stream, seen, names, _ in streams:
                axes = (b, seen.axes[1], self.heads, self.size)
                read[stream] = [
                    t.view(linear(t, seen, name, self.width, bias=True), axes) for name in names
                ]
                frame.local(*read[stream])
            for stream, _, _, norms in streams:
                for at, name in enumerate(norms):
                    self._replace(t, frame, read[stream], at, rms_norm(t, read[stream][at], name))
            for stream, *_ in streams:
                table = shared[f"{PLACES}, {stream}"]
                for at in range(2):
                    self._replace(t, frame, read[stream], at, turned(t, read[stream][at], table))
            length = text.axes[1] + x.axes[1]
            joint: list[Value] = []
            for one, two in zip(read["text"], read["picture"], strict=True):
                axes = (b, length, self.heads, self.size)
                joint.append(concatenate(t, (one, two), axes))
                frame.local(joint[-1])
            by_head = tuple(t.view(each, (b, self.heads, length, self.size)) for each in joint)
            out = sdpa(t, *by_head, groups=1, causal=False)
            out = cast(t, t.view(out, (b, length, self.width)), joint[0].dtype)
            frame.local(out)
            return self._outputs(t, out, x.axes[1], text.axes[1], ends=ends)

    def _replace(self, t: Tape, frame: Scope, values: list[Value], at: int, new: Value) -> None:
        frame.release(values[at])
        frame.local(new)
        values[at] = new

    def _outputs(
        self, t: Tape, out: Value, seen: Size, told: Size, *, ends: bool
    ) -> tuple[Value, Value]:
        whole = t.without_graph(out)[0] if ends else out
        t.records_no_graph = False
        text = slice_of(t, whole, (b, told, self.width))
        picture = slice_of(t, out, (b, seen, self.width))
        if t.at_least("b", 2):
            picture = copy(t, picture)
        own = linear(t, picture, "to_out.0", self.width, bias=True)
        if t.at_least("b", 2):
            text = copy(t, text)
        t.records_no_graph = ends
        other = linear(t, text, "to_add_out", self.width, bias=True)
        t.records_no_graph = False
        return own, other


def _by_time(t: Tape, shared: dict[str, Value], name: str, width: int) -> tuple[Value, ...]:
    """Shift, scale and gate before the attention, and again before the feed-forward."""
    vector = linear(t, silu(t, shared[TIME]), name, 6 * width, bias=True)
    halves = chunk(t, vector, (3 * width,) * 2)
    parts = [part for half in halves for part in chunk(t, half, (width,) * 3)]
    return tuple(t.view(part, (b, 1, width), "unsqueeze") for part in parts)


class QwenImageBlock(DenoiserPart):
    """QwenImageTransformerBlock: the picture and beside it the text."""

    streams: TwoStreams
    last: bool = False
    """What becomes of the text here is computed and read by nobody: it gets no gradient."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        text, width = shared.pop(SECOND_STREAM), self.streams.width
        with t.scope() as frame:
            frame.local(x, text)
            seen_by = _by_time(t, shared, "img_mod.1", width)
            told_by = _by_time(t, shared, "txt_mod.1", width)
            frame.local(*seen_by, *told_by)
            seen = self._modulated(t, x, "img_norm1", seen_by, frame)
            told = self._modulated(t, text, "txt_norm1", told_by, frame)
            with t.scope("attn"):
                own, other = self.streams.record(t, seen, told, shared, ends=self.last)
            frame.local(own, other)
            after = add(t, x, mul(t, own, seen_by[2]))
            frame.local(after)
            if self.last:
                text, other, *told_by = t.without_graph(text, other, *told_by)
                t.records_no_graph = False
            said = add(t, text, mul(t, other, told_by[2]))
            frame.local(said)
            out = self._fed(t, after, ("img_norm2", "img_mlp"), seen_by[3:], frame)
            frame.release(after)
            frame.local(out)
            t.records_no_graph = self.last
            told = self._fed(t, said, ("txt_norm2", "txt_mlp"), told_by[3:], frame)
            t.records_no_graph = False
            if not self.last:
                shared[SECOND_STREAM] = told
            return out

    def _modulated(
        self, t: Tape, x: Value, name: str, made: Sequence[Value], frame: Scope
    ) -> Value:
        normed = plain_norm(t, x, name)
        seen = modulated(t, normed, made[1], made[0])
        frame.local(normed, seen)
        return seen

    def _fed(
        self, t: Tape, x: Value, names: tuple[str, str], made: Sequence[Value], frame: Scope
    ) -> Value:
        seen = self._modulated(t, x, names[0], made, frame)
        fed = feed_forward(t, seen, names[1], self.streams.width)
        frame.local(fed)
        return add(t, x, mul(t, fed, made[2]))
