"""The entrance of a language model: token ids, embeddings, rotary tables and the attention mask
that all layers share."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT32, INT64, DType
from napkinmath.base.expr import Size, ceil_div
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import DECODER_TOKENS, Part
from napkinmath.ir.symbols import b, dh, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.masks import causal_masks, needs_eager_masks
from napkinmath.ops.elementwise import cast, dropout, scale
from napkinmath.ops.index import constant, embedding, input_leaf, masked_scatter, model_input
from napkinmath.ops.norm import rms_norm_power

FEATURES = "image features"
"""The shared value that a tower and its projector leave for the text."""


class Entrance(Part):
    """The first part of a model that reads tokens: it reads their labels too."""

    labels: tuple[Size, ...] = (b, s)
    """Shape of the labels: one for each token, or fewer."""

    def labelled(self, axes: tuple[Size, ...]) -> Part:
        return self.replace(labels=axes)


class TokenEmbedding(Entrance):
    """Token embeddings, with rotary cos/sin tables where the family uses them."""

    rotary: bool = True
    rotary_size: Size = 0
    """Rotated part of the head; 0 is the whole head."""
    complex_rotary: bool = False
    """One table of complex fp32 numbers, a pair each, instead of cos and sin (DeepSeek V2, Llama
    4)."""
    tables: tuple[str, ...] = ("",)
    """Names of the rotary tables, where sliding layers have their own (Gemma 3)."""
    wide_tables: bool = False
    """Rotary tables stay in fp32 (OLMo)."""
    tables_per_row: bool = False
    """Every sequence has positions, and so tables, of its own (the Qwen VLs' three axes)."""
    extra_rows: int = 0
    """Rows of the table beyond the vocabulary."""
    scaled: bool = False
    """The model multiplies embeddings by a number (Granite)."""
    scaled_inside: bool = False
    """The embedding module itself does (Gemma)."""
    normed_inside: bool = False
    """The embedding module itself norms them, without a weight (Muse Glimmer)."""
    name: str = "embed_tokens"
    padded: bool = False
    """The embedding has a padding index."""
    dropout: float = 0.0
    masked: bool = False
    """The layers have no form without a mask (attention that transformers runs eager only)."""
    windows: tuple[int, ...] = ()
    """Windows of sliding layers, each with a mask of its own."""
    chunked: bool = False
    """They are chunks: a token sees those before it in its own."""
    masks_see_images: bool = False
    """Masks of windows let images be seen whole, and are made when those are in their places."""
    full_mask: bool = True
    """Some layer sees everything before it."""

    @property
    def virtual_tokens(self) -> str:
        return DECODER_TOKENS if self.labels == (b, s) else ""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = token_ids(t, shared, self.labels)
        out = embedding(
            t, ids, self.name, v + self.extra_rows if self.extra_rows else v, h, padded=self.padded
        )
        if self.scaled_inside:
            out = scale(t, out)
        if self.normed_inside:
            with t.scope(self.name):
                out = rms_norm_power(t, out, name="embed_norm", affine=False)
        out = behind_virtual_tokens(t, input_leaf(t, out), shared)
        if self.scaled:
            out = scale(t, out)
        later = self.masks_see_images and t.policy.config.batch.images
        windows = () if later and not needs_eager_masks(t) else self.windows
        causal_masks(
            t,
            shared,
            out.dtype,
            full=self.full_mask,
            windows=windows,
            eager_only=self.masked,
            chunked=self.chunked,
        )
        out = dropout(t, out, self.dropout)
        if self.complex_rotary:
            shared["rotary"] = constant(t, "rotary table", (1, s, self.rotary_size or dh), FP32)
        elif self.rotary:
            for suffix in self.tables:
                rotary_tables(
                    t,
                    shared,
                    self.rotary_size or dh,
                    FP32 if self.wide_tables else out.dtype,
                    suffix,
                    rows=b if self.tables_per_row else 1,
                )
        return out


def token_ids(t: Tape, shared: dict[str, Value], labels: tuple[Size, ...] = (b, s)) -> Value:
    """Token ids and labels of the batch, and the position of each token."""
    own = s - t.policy.virtual_tokens(AdapterKind.PROMPT)
    ids = shared["input_ids"] = model_input(t, "input ids", (b, own), INT64)
    shared["labels"] = model_input(t, "labels", (b, own) if labels == (b, s) else labels, INT64)
    if not packed_positions(t, shared):
        shared["position ids"] = constant(t, "position ids", (1, s), INT64)
    return ids


def packed_positions(t: Tape, shared: dict[str, Value]) -> bool:
    """Whether sequences are packed: their batch brings its own positions, which say where sequences
    begin, and flash-attn is given their ends."""
    if not t.policy.config.batch.packing:
        return False
    shared["position ids"] = model_input(t, "position ids", (b, s), INT64)
    if not t.policy.masks_packed:
        ends = (2, num_sequences(t) + 1)
        shared["cu_seqlens"] = constant(t, "ends of the sequences", ends, INT32)
    return True


def behind_virtual_tokens(t: Tape, x: Value, shared: dict[str, Value]) -> Value:
    """The embeddings with a trained prompt before them; a trained prefix is published for the
    layers."""
    if t.policy.adapter is None or t.policy.adapter.kind not in (
        AdapterKind.PROMPT,
        AdapterKind.PREFIX,
    ):
        return x
    from napkinmath.lowering.virtual_tokens import with_virtual_tokens

    return with_virtual_tokens(t, x, shared)


def num_sequences(t: Tape) -> Size:
    """Sequences packed into a batch: as many of their mean length as fill it, or one a row where
    lengths are not known."""
    lengths = t.policy.config.batch.lengths
    return ceil_div(b * s * len(lengths), sum(lengths)) if lengths else b


def rotary_tables(
    t: Tape, shared: dict[str, Value], size: Size, dtype: DType, suffix: str = "", *, rows: Size = 1
) -> None:
    """cos and sin of every position, computed in fp32 and cast to the type of the hidden states (or
    kept).

    Source: transformers 5.23 models/llama/modeling_llama.py LlamaRotaryEmbedding.forward.
    """
    with t.scope("rotary_emb") as frame:
        for name in ("inv_freq", "original_inv_freq"):
            t.weight(name + suffix, (size // 2,), dtype=FP32, buffer=True)
        frame.local(constant(t, "frequencies", (rows, s, size // 2), FP32))
        angles = constant(t, "angles", (rows, s, size), FP32)
        frame.local(angles)
        wide = [_scaled_table(t, name, (rows, s, size)) for name in ("cos", "sin")]
        frame.local(*wide)
        for name, table in zip(("cos", "sin"), wide, strict=True):
            shared[name + suffix] = cast(t, table, dtype)
            shared[name + suffix].tensor.role = Role.ACTIVATIONS


def _scaled_table(t: Tape, name: str, axes: tuple[Size, ...]) -> Value:
    raw = constant(t, name, axes, FP32)
    table = constant(t, f"scaled {name}", axes, FP32)
    t.touch(raw.tensor)
    return table


def with_features(t: Tape, words: Value, features: Value) -> Value:
    """The embeddings with features of images in the places of their tokens."""
    with t.scope() as frame:
        frame.local(words)
        mask = constant(t, "places of image tokens", (b, s, 1), BOOL)
        return masked_scatter(t, words, features, mask)
