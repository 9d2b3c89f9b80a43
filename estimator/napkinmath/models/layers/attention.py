"""Self-attention with grouped key/value heads and rotary embeddings, as transformers'
LlamaAttention and its kin."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import DECODER_TOKENS
from napkinmath.ir.symbols import a, b, dh, h, k, s
from napkinmath.ir.tape import LIKE, Scope, Tape
from napkinmath.models.layers.attend import attend, dense_gradients, repeats_keys
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import cast, clamp_, dropout, scale
from napkinmath.ops.index import chunk, concatenate, constant, repeat_heads, rotary
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

    from napkinmath.ir.cache import Cached


class Rotation(str, Enum):
    """Which elements of a head are turned together."""

    HALVES = "halves"
    PAIRS = "pairs"
    PAIRS_READY = "pairs with tables that hold every entry twice"
    PAIRS_FP32 = "pairs in fp32"
    PAIRS_WIDE = "pairs with fp32 tables"
    HALVES_FP32 = "halves with fp32 tables"


class GroupedQueryAttention(Record):
    """q, k, v projections, rotary embedding, attention, output projection."""

    grouped: bool = False
    """Fewer key/value heads than query heads."""
    bias: bool = False
    output_bias: bool = False
    rotary: bool = True
    rotation: Rotation = Rotation.HALVES
    rotary_size: int = 0
    """Rotated part of each head, split off and put back; 0 rotates heads whole."""
    holds_pieces: bool = False
    """The split happens in the attention's own forward, whose locals the pieces stay (Phi,
    StableLM)."""
    tables: str = ""
    """Which of several rotary tables is read (Gemma 3: local)."""
    window: int = 0
    """Tokens a query sees; 0 is all."""
    head_norm: Norm | None = None
    """Norm of each query and key head (Qwen3, Gemma 3)."""
    norm_transposed: bool = False
    """The head norm sees heads before positions (Gemma 3)."""
    norm_after_rotation: bool = False
    """The head norm follows the rotation (Hunyuan)."""
    norm_per_head: bool = False
    """The head norm has weights of its own for each head (Cohere)."""
    norm_each: bool = False
    """Each head has a LayerNorm module of its own (StableLM 2 12B)."""
    wide_norm: Norm | None = None
    """Norm over all query or key heads together (OLMo 2)."""
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    clipped: bool = False
    """Projections are clamped in place (OLMo)."""
    capped: bool = False
    """Scores pass through a tanh (Gemma 2)."""
    eager_only: bool = False
    """transformers has no other form of this attention."""
    wide_softmax: bool = True
    """The eager softmax runs in fp32 (not in GPT-2 and BioGPT)."""
    scaled_by_position: bool = False
    """Turned queries are multiplied by a number for each position (Ministral 3)."""
    key_scaled: bool = False
    """Keys are multiplied by a number as they are split (Falcon H1)."""
    query_scaled: bool = False
    """Queries are scaled as they are projected (OPT)."""
    flash_repeats_before: tuple[int, int] = (0, 0)
    """Version of transformers before which this family's FlashAttention path repeated keys and
    values per query head."""
    dropout: float = 0.0
    output_dropout: float = 0.0
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    kind: str = "linear"
    """Of its projections."""
    scope: str = "self_attn"

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope(self.scope) as frame:
            frame.local(x)
            if self._lays(t):
                from napkinmath.models.layers.laid_heads import laid_heads

                q, key, value = laid_heads(
                    t, frame, x, self.kv_heads, bias=self.bias, rotary=self.rotary, kind=self.kind
                )
                return self.finish(t, frame, q, key, value, shared, turned=True)
            kv, dense = self.kv_heads, self.dense_gradients(t, x, shared)
            fused = self._fused(t, x)
            projected = (
                fused[:2]
                if fused
                else [self._projected(t, x, which, heads) for which, heads in ((0, a), (1, kv))]
            )
            q, key = (
                self._heads(t, p, which, heads, dense)
                for p, which, heads in zip(projected, (0, 1), (a, kv), strict=True)
            )
            if self.key_scaled:
                key = scale(t, key)
            value = split_heads(
                t, fused[2] if fused else self._projected(t, x, 2, kv), kv, copies=dense
            )
            return self.finish(t, frame, q, key, value, shared)

    def _lays(self, t: Tape) -> bool:
        """Whether the library lays out heads by itself, of which it has plain ones alone."""
        norms = self.head_norm or self.wide_norm or self.norm_each
        other = self.clipped or self.key_scaled or self.query_scaled or self.rotary_size
        return t.policy.stack.attention.lays_heads and not norms and not other

    def _fused(self, t: Tape, x: Value) -> list[Value]:
        """Queries, keys and values out of one patched operation, where the patch has one for these
        projections."""
        if not t.policy.patches("qkv"):
            return []
        from napkinmath.lowering.patched_linears import fused_projections

        widths = (a * dh, self.kv_heads * dh, self.kv_heads * dh)
        return fused_projections(
            t, x, tuple(zip(self.names[:3], widths, strict=True)), bias=self.bias
        )

    virtual_tokens: ClassVar[str] = DECODER_TOKENS

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of its key/value heads."""
        from napkinmath.ir.cache import keys_and_values

        return keys_and_values(self.kv_heads, window=self.window)

    @property
    def kv_heads(self) -> Size:
        """Key/value heads."""
        return k if self.grouped else a

    def finish(
        self,
        t: Tape,
        frame: Scope,
        q: Value,
        key: Value,
        value: Value,
        shared: dict[str, Value],
        *,
        turned: bool = False,
    ) -> Value:
        """Rotation, attention and output projection of q, k, v of axes (b, heads, s, dh), which may
        be `turned` and laid out already; `frame` is the attention's forward."""
        if self.rotary and not turned:
            patched = t.policy.patches("rope") and self.rotation is Rotation.HALVES
            q, key = (self._rotate_patched if patched else self._rotate)(t, q, key, shared, frame)
        if self.scaled_by_position:
            q = scaled_by_position(t, q)
        if self.norm_after_rotation and self.head_norm is not None:
            with t.scope() as inner:
                inner.local(q, key)
                q = self.head_norm.record(t, q, self.norm_names[0])
                inner.local(q)
                key = self.head_norm.record(t, key, self.norm_names[1])
        if "prefix" in shared:
            from napkinmath.lowering.virtual_tokens import with_prefix

            key, value = with_prefix(t, key, value, shared["prefix"])
        groups: Size = a // k if self.grouped else 1
        if self.grouped and repeats_keys(t, self.flash_repeats_before, self.eager_only):
            key, value = (
                repeat_heads(t, key, groups, (b, a, s, dh)),
                repeat_heads(t, value, groups, (b, a, s, dh)),
            )
            groups = 1
        frame.local(q, key, value)
        out = attend(
            t,
            q,
            key,
            value,
            shared,
            groups=groups,
            window=self.window,
            dropout_p=self.dropout,
            capped=self.capped,
            eager_only=self.eager_only,
            contiguous=self._heads_lie_outside(t),
            wide_softmax=self.wide_softmax,
        )
        frame.local(out)
        joint = t.view(out, (b, s, a * dh))
        if turned:
            from napkinmath.models.layers.laid_heads import positions_first

            joint = positions_first(t, joint)
        projected = linear(t, joint, self.names[3], h, bias=self.output_bias, kind=self.kind)
        return dropout(t, projected, self.output_dropout)

    def _projected(self, t: Tape, x: Value, which: int, heads: Size) -> Value:
        out = linear(t, x, self.names[which], heads * dh, bias=self.bias, kind=self.kind)
        if self.query_scaled and not which:
            out = scale(t, out)
        if self.clipped:
            out = clamp_(t, out)
        if self.wide_norm is not None and which < 2:
            out = self.wide_norm.record(t, out, self.norm_names[which])
        return out

    def _heads(self, t: Tape, projected: Value, which: int, heads: Size, dense: bool) -> Value:
        copies = self.copies_rotated(t, dense=dense) and t.known(heads) > 1
        if self.norm_each:
            return norm_of_each_head(
                t, split_heads(t, projected, heads, copies=copies), self.norm_names[which]
            )
        if self.head_norm is None or self.norm_after_rotation:
            return split_heads(t, projected, heads, copies=copies)
        name = self.norm_names[which]
        if self.norm_transposed:
            return self.head_norm.record(t, split_heads(t, projected, heads, copies=copies), name)
        viewed = t.view(projected, (b, s, heads, dh))
        if t.policy.patches("norm"):
            return t.view(
                self.head_norm.record(t, viewed, name), (b, heads, s, dh), copies_gradient=copies
            )
        return t.view(
            self.head_norm.record(t, viewed, name, (heads, dh) if self.norm_per_head else None),
            (b, heads, s, dh),
        )

    def _heads_lie_outside(self, t: Tape) -> bool:
        """Whether q and k lie in memory with the heads outside the rows: where a rotation has put
        them together anew, or a patched norm."""
        patch, laid = t.policy.patch, self.norm_transposed and self.head_norm is not None
        laid = laid and t.policy.patches("norm")
        if patch is None or "rope" not in patch.parts:
            return self.rotary_size > 0 or laid
        return patch.rope == "new" and laid

    def copies_rotated(self, t: Tape, *, dense: bool) -> bool:
        """Whether the gradient of the split heads is copied: what makes it hands it back with the
        heads outside the rows."""
        patch = t.policy.patch
        if patch is not None and "norm" in patch.parts and self.norm_transposed:
            return True
        if patch is not None and "rope" in patch.parts:
            return dense and (patch.rope == "new" or not self.rotary)
        return (self.rotary and t.policy.stack.attention.rotary == "eager") or dense

    def _rotate_patched(
        self, t: Tape, q: Value, key: Value, shared: dict[str, Value], caller: Scope
    ) -> tuple[Value, Value]:
        from napkinmath.models.layers.patched import patched_rotary

        with t.scope() as frame:
            frame.local(q, key)
            dense = self.dense_gradients(t, q, shared)
            tables = shared[f"cos{self.tables}"], shared[f"sin{self.tables}"]
            return patched_rotary(t, q, key, tables, dense=dense, sliced=not self.names[1])

    def _rotate(
        self, t: Tape, q: Value, key: Value, shared: dict[str, Value], caller: Scope
    ) -> tuple[Value, Value]:
        cos, sin = shared[f"cos{self.tables}"], shared[f"sin{self.tables}"]
        turn, halves = self._turn(), self.rotation is Rotation.HALVES
        if t.policy.stack.attention.rotary == "in place" and halves and not self.rotary_size:
            from napkinmath.ops.rotary import rotary_in_place

            return rotary_in_place(t, q), rotary_in_place(t, key)
        if t.compiles or t.policy.stack.attention.rotary == "fused":
            from napkinmath.ops.fused import rotary_fused

            return rotary_fused(t, q), rotary_fused(t, key)
        if self.rotation in (Rotation.PAIRS, Rotation.PAIRS_WIDE):
            from napkinmath.ops.rotary import interleaved_table

            cos, sin = interleaved_table(t, cos), interleaved_table(t, sin)
        if self.rotary_size:
            from napkinmath.ops.rotary import rotary_partial

            return rotary_partial(
                t, q, key, cos, sin, self.rotary_size, turn, caller if self.holds_pieces else None
            )
        with t.scope() as frame:
            frame.local(q, key, cos, sin)
            turned = turn(t, q, cos, sin)
            frame.local(turned)
            return turned, turn(t, key, cos, sin)

    def _turn(self) -> Callable[[Tape, Value, Value, Value], Value]:
        """The operations that turn one tensor of heads."""
        if self.rotation is Rotation.HALVES:
            return rotary
        from napkinmath.ops import rotary as turns

        return {
            Rotation.PAIRS: turns.rotary_interleaved,
            Rotation.PAIRS_READY: turns.rotary_interleaved,
            Rotation.PAIRS_FP32: turns.rotary_interleaved_fp32,
            Rotation.PAIRS_WIDE: turns.rotary_interleaved_wide,
            Rotation.HALVES_FP32: turns.rotary_fp32_tables,
        }[self.rotation]

    def dense_gradients(self, t: Tape, x: Value, shared: dict[str, Value]) -> bool:
        """Whether the gradients of queries and keys come back contiguous."""
        return dense_gradients(
            t, x.dtype, shared, grouped=self.grouped, window=self.window, eager_only=self.eager_only
        )


def scaled_by_position(t: Tape, q: Value) -> Value:
    """q times a number for each position, made anew in each layer (models/ministral3
    get_llama_4_attn_scale)."""
    steps = [constant(t, f"scale of positions, step {i + 1}", (1, 1, s, 1), FP32) for i in range(2)]
    factor = cast(t, steps[-1], q.dtype)
    t.touch(steps[-1].tensor)
    return t.op(
        "mul",
        (q, factor),
        q.axes,
        q.dtype,
        saves=(factor,),
        gradients=(LIKE, None),
        costs=(Move(2 * traffic(q)),),
        backward_costs=(Move(2 * traffic(q)),),
    )


def norm_of_each_head(t: Tape, x: Value, name: str) -> Value:
    """Heads split, each through its own LayerNorm, and put together again (models/stablelm
    StableLmLayerNormPerHead)."""
    heads = t.known(x.axes[1])
    with t.scope(name), t.scope("norms") as frame:
        parts = chunk(t, x, (dh,) * heads, name="split")
        parts = tuple(Value(p.tensor, (b, 1, s, dh), p.dtype, p.requires_grad) for p in parts)
        t.ops[-1].outputs = parts if x.requires_grad else t.ops[-1].outputs
        frame.local(*parts)
        return concatenate(
            t,
            tuple(
                layer_norm(t, part, name=str(index), bias=False) for index, part in enumerate(parts)
            ),
            x.axes,
        )


def split_heads(t: Tape, projected: Value, heads: Size, *, copies: bool) -> Value:
    """(b, s, heads·dh) seen as (b, heads, s, dh); `copies`: the gradient comes back laid out that
    way and is copied."""
    return t.view(projected, (b, heads, s, dh), copies_gradient=copies and t.known(heads) > 1)
