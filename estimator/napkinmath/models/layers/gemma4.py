"""Gemma 4's text layers: two kinds of attention with heads of their own size, keys and values that
late layers share, embeddings for each layer, a mixture of experts beside the feed-forward.

Source: transformers 5.23 models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, keys_and_values
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import DECODER_TOKENS
from napkinmath.ir.symbols import a, b, dh, e, h, k, s, topk, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.attend import attend
from napkinmath.models.layers.decoder import AttentionLayer
from napkinmath.models.layers.embedding import TokenEmbedding, rotary_tables, token_ids
from napkinmath.models.layers.masks import (
    causal_masks,
    mask_name,
    needs_eager_masks,
    visible_positions,
)
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.router import TOKENS
from napkinmath.models.layers.vision_towers import WithImages
from napkinmath.ops import routing
from napkinmath.ops.elementwise import add, mul, scale, scale_, softmax
from napkinmath.ops.index import constant, embedding, input_leaf, rotary, slice_of
from napkinmath.ops.matmul import linear

NORM = Norm(kind=NormKind.RMS_POWER)
PLAIN = Norm(kind=NormKind.RMS_POWER_PLAIN)
PER_LAYER = "inputs of each layer"
OF_IDS = "what ids say to each layer"


class Gemma4Embedding(TokenEmbedding):
    """Scaled token embeddings, and where the model has them, embeddings of each token for each
    layer."""

    per_layer: int = 0
    """Width of a layer's own embeddings; 0 is none."""
    per_layer_rows: int = 0
    layers: int = 0
    full_size: Size = dh
    """Head size of the full layers, whose rotary tables have the name ''."""
    joint: bool = False
    """The joint model's own forward looks for placeholders of images, videos and sounds first."""
    always_masked: bool = False
    """The joint model says of each token in which image it lies, with or without one, so that SDPA
    gets a mask in every layer (Gemma 4 12B)."""

    @property
    def virtual_tokens(self) -> str:
        """Nothing goes before the tokens where each layer embeds their ids anew."""
        return "" if self.per_layer or self.labels != (b, s) else DECODER_TOKENS

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = token_ids(t, shared, self.labels)
        looked_up = self._without_placeholders(t, shared, ids) if self.joint else ids
        out = scale(t, embedding(t, looked_up, self.name, v, h, padded=self.padded))
        out = input_leaf(t, out)
        if self.per_layer:
            self._say_ids(t, shared, looked_up, out)
        waits = self.joint and t.policy.config.batch.images
        if not waits:  # else when the images are in place
            self.enter(t, shared, out)
        return out

    def enter(self, t: Tape, shared: dict[str, Value], x: Value) -> None:
        """What the text's own forward makes of the embeddings x before its layers run."""
        if self.per_layer:
            self._for_each_layer(t, shared, x)
        if self.always_masked and not needs_eager_masks(t):
            self._mask_by_images(t, shared)
        made = [window for window in self.windows if mask_name(window) not in shared]
        full = self.full_mask and not (self.always_masked and mask_name(0) in shared)
        causal_masks(t, shared, x.dtype, full=full, windows=tuple(made))
        for suffix in self.tables:
            rotary_tables(t, shared, dh if suffix else self.full_size, x.dtype, suffix)

    def _mask_by_images(self, t: Tape, shared: dict[str, Value]) -> None:
        whole = (b, 1, s, s)
        for window in (*((0,) if self.full_mask else ()), *self.windows):
            seen = visible_positions(t, window)
            same = [constant(t, name, whole, BOOL) for name in ("same image", "in one image")]
            shared[mask_name(window)] = constant(t, "mask that sees images whole", whole, BOOL)
            t.touch(seen.tensor, *(one.tensor for one in same))

    def _without_placeholders(self, t: Tape, shared: dict[str, Value], ids: Value) -> Value:
        """The ids with padding in the place of what is no text (Gemma4Model.forward)."""
        for kind in ("images", "videos", "sounds", "anything but text"):
            shared[f"places of {kind}"] = constant(t, f"places of {kind}", ids.axes, BOOL)
        cloned = constant(t, "cloned ids", ids.axes, INT64)
        shared["text ids"] = found = constant(t, "ids of the text", ids.axes, INT64)
        t.touch(cloned.tensor)
        return found

    def _say_ids(self, t: Tape, shared: dict[str, Value], ids: Value, x: Value) -> None:
        """What a token's id says to each layer."""
        if self.joint:
            shared["embeddings without placeholders"] = constant(
                t, "embeddings without placeholders", x.axes, x.dtype
            )
        name, width = "embed_tokens_per_layer", self.layers * self.per_layer
        rows = scale(t, embedding(t, ids, name, self.per_layer_rows, width, padded=self.padded))
        shared[OF_IDS] = t.view(rows, (b, s, self.layers, self.per_layer))

    def _for_each_layer(self, t: Tape, shared: dict[str, Value], x: Value) -> None:
        """What a token's id says to each layer, and what its embedding does, joined."""
        rows, width = shared[OF_IDS], self.layers * self.per_layer
        with t.scope() as frame:
            frame.local(rows)
            projected = scale(t, linear(t, x, "per_layer_model_projection", width))
            projected = NORM.record(t, t.view(projected, rows.axes), "per_layer_projection_norm")
            frame.local(projected)
            shared[PER_LAYER] = scale(t, add(t, projected, rows))


class WithGemma4Images(WithImages):
    """The text's forward begins when the images are in their places."""

    text: Gemma4Embedding

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        merged = super().record(t, x, shared)
        if merged is not None and t.policy.config.batch.images:
            with t.scope("language_model"):
                self.text.enter(t, shared, merged)
        return merged


class Gemma4Attention(Record):
    """Queries and keys normed and turned before the heads change places, values normed too; a late
    layer attends to the keys and values of the last layer of its kind that made any."""

    size: Size = dh
    heads: Size = k
    """Key/value heads."""
    grouped: bool = True
    window: int = 0
    """Tokens a query sees; 0 is all."""
    tables: str = ""
    bias: bool = False
    joined: bool = False
    """Values are the keys before their norm (`attention_k_eq_v`)."""
    shares: bool = False
    """Later layers read its keys and values."""
    reads: bool = False
    """It makes none of its own."""
    dropout: float = 0.0
    values_last: bool = False
    """Values are projected when the keys are turned (Gemma 3n)."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values, unless those of another layer are read."""
        if self.reads:
            return ()
        return keys_and_values(self.heads, size=self.size, window=self.window)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        with t.scope("self_attn") as frame:
            frame.local(x)
            q = self._turned(t, self._projected(t, x, "q", a), "q_norm", shared)
            key, value = self._read(shared) if self.reads else self._made(t, x, shared)
            if self.shares:
                shared[f"shared keys{self.tables}"] = key
                shared[f"shared values{self.tables}"] = value
                t.store(key, value)
            frame.local(q, key, value)
            out = attend(
                t,
                q,
                key,
                value,
                shared,
                groups=a // self.heads if self.grouped else 1,
                window=self.window,
                dropout_p=self.dropout,
            )
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * self.size)), "o_proj", h, bias=self.bias)

    def _projected(self, t: Tape, x: Value, name: str, heads: Size) -> Value:
        out = linear(t, x, f"{name}_proj", heads * self.size, bias=self.bias)
        return t.view(out, (b, s, heads, self.size))

    def _turned(self, t: Tape, x: Value, norm: str, shared: dict[str, Value]) -> Value:
        cos, sin = shared[f"cos{self.tables}"], shared[f"sin{self.tables}"]
        normed = NORM.record(t, x, norm)
        with t.scope() as frame:
            frame.local(normed, cos, sin)
            turned = rotary(t, normed, cos, sin)
        return self._heads_first(t, turned, shared)

    def _heads_first(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        rows, length, heads, size = x.axes
        return t.view(x, (rows, heads, length, size))

    def _read(self, shared: dict[str, Value]) -> tuple[Value, Value]:
        return shared[f"shared keys{self.tables}"], shared[f"shared values{self.tables}"]

    def _made(self, t: Tape, x: Value, shared: dict[str, Value]) -> tuple[Value, Value]:
        key = self._projected(t, x, "k", self.heads)
        if self.values_last:
            with t.scope() as frame:
                key = self._turned(t, key, "k_norm", shared)
                frame.local(key)
                value = self._projected(t, x, "v", self.heads)
                return key, self._heads_first(t, PLAIN.record(t, value, "v_norm"), shared)
        value = key if self.joined else self._projected(t, x, "v", self.heads)
        with t.scope() as frame:
            frame.local(value)
            key = self._turned(t, key, "k_norm", shared)
            frame.local(key)
            return key, self._heads_first(t, PLAIN.record(t, value, "v_norm"), shared)


class Gemma4Router(Record):
    """Normed and scaled states scored in fp32, the best experts' shares of one, times a number for
    each expert."""

    def record(self, t: Tape, x: Value) -> tuple[Value, Value]:
        """Weights and indices, of axes (tokens, topk), for x of axes (tokens, h)."""
        with t.scope("router") as frame:
            scaled = t.weight("scale", (h,)).value
            of_expert = t.weight("per_expert_scale", (e,)).value
            states = scale(t, mul(t, PLAIN.record(t, x, "norm"), scaled))
            scores = linear(t, states, "proj", e)
            frame.local(states, scores)
            chances = softmax(t, scores, dtype=FP32)
            frame.local(chances)
            weights, indices = routing.top_k(t, chances, topk)
            weights = routing.divide_rows_(t, weights, routing.row_sum(t, weights))
            frame.local(weights, indices)
            factors = routing.take_rows(
                t, of_expert, t.view(indices, (x.axes[0] * topk,)), "factors"
            )
            found = mul(t, weights, t.view(factors, weights.axes))
            t.keep(chances)  # the layer's forward takes it as its first result
            return found, indices


class Gemma4Layer(AttentionLayer):
    """Attention and feed-forward between norms, then what the layer's own embeddings add, the whole
    times a number."""

    attention: Gemma4Attention
    mlp: GatedMlp
    experts: Experts | None = None
    """A mixture that reads the same states as the feed-forward."""
    per_layer: int = 0
    layers: int = 0
    activation: str = "gelu_pytorch_tanh"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        own = slice_of(t, shared[PER_LAYER], (b, s, self.per_layer)) if self.per_layer else None
        out = self._fed(t, self._attended(t, x, shared), shared)
        if own is not None:
            out = self._with_own_embeddings(t, out, own)
        return scale_(t, out, t.weight("layer_scalar", (1,), buffer=True).value)

    def _attended(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        with t.scope() as frame:
            frame.local(x)
            normed = NORM.record(t, x, "input_layernorm")
            out = self.attention.record(t, normed, shared)
            return add(t, x, NORM.record(t, out, "post_attention_layernorm"))

    def _fed(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        with t.scope() as frame:
            frame.local(x)
            out = self.mlp.record(t, NORM.record(t, x, "pre_feedforward_layernorm"), shared)
            if self.experts is not None:
                out = self._with_experts(t, self.experts, x, out)
            return add(t, x, NORM.record(t, out, "post_feedforward_layernorm"))

    def _with_experts(self, t: Tape, experts: Experts, x: Value, fed: Value) -> Value:
        with t.scope() as frame:
            frame.local(fed)
            dense = NORM.record(t, fed, "post_feedforward_layernorm_1")
            frame.local(dense)
            mixed = self._mixed(t, experts, x)
            return add(t, dense, NORM.record(t, mixed, "post_feedforward_layernorm_2"))

    def _mixed(self, t: Tape, experts: Experts, x: Value) -> Value:
        """Every tensor-parallel rank runs all experts on its share of their width, and the parts are
        summed; or it routes the tokens that it has."""
        split = t.policy.tensor
        if split is not None and t.policy.experts is not None and t.policy.experts.own_tokens:
            split = None
        with t.scope() as frame:
            whole = x if split is None else split.whole_sequence(t, x)
            rows = TOKENS if t.policy.tensor is None else whole.axes[0] * whole.axes[1]
            flat = t.view(whole, (rows, h))
            weights, indices = Gemma4Router().record(t, flat)
            frame.local(weights, indices)
            read = NORM.record(t, flat, "pre_feedforward_layernorm_2")
            if split is not None:
                read = t.view(split.enter(t, t.view(read, whole.axes)), (rows, h))
            out = t.view(experts.record(t, read, weights, indices), whole.axes)
            return out if split is None else split.leave(t, out)

    def _with_own_embeddings(self, t: Tape, x: Value, own: Value) -> Value:
        with t.scope() as frame:
            frame.local(x)
            gate = linear(t, x, "per_layer_input_gate", self.per_layer)
            gated = mul(t, activate(t, gate, self.activation), own)
            out = linear(t, gated, "per_layer_projection", h)
            return add(t, x, NORM.record(t, out, "post_per_layer_input_norm"))
