"""Gemma 3n's text. Each layer reads one of several copies of the hidden states and predicts the
others (AltUp). Beside its attention is a low-rank path (LAuReL), and its feed-forward cuts most
gates to zero. Layers have embeddings of their own, and late ones share keys and values.

Source: transformers 5.23 models/gemma3n/modeling_gemma3n.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, dh, f, h, s, v
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.decoder import AttentionLayer
from napkinmath.models.layers.embedding import TokenEmbedding, rotary_tables, token_ids
from napkinmath.models.layers.gemma4 import NORM, OF_IDS, PER_LAYER, PLAIN, Gemma4Attention
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.masks import causal_masks
from napkinmath.models.layers.vision_towers import WithImages
from napkinmath.ops.altup import (
    add_to_rest,
    add_to_view,
    bounded,
    choose,
    divide_rows,
    mean_of_copies,
    repeat_copies,
    sqrt,
    standard_deviation,
)
from napkinmath.ops.elementwise import (
    add,
    add_,
    cast,
    copy,
    mul,
    power,
    relu,
    scale,
    scale_,
    shift,
    tanh,
)
from napkinmath.ops.index import concatenate, constant, embedding, input_leaf, slice_of
from napkinmath.ops.matmul import bmm, dense_linear, linear
from napkinmath.ops.norm import mean_square, row_mean, row_scale, subtract_rows
from napkinmath.ops.rotary import subtract

COPIES = "copies of the embeddings"
FACTORS = (
    "per_layer_projection_scale",
    "per_layer_input_scale",
    "embed_tokens.embed_scale",
    "embed_tokens_per_layer.embed_scale",
)
"""Buffers of one number."""


class Placeholders(Record):
    """Ids beyond the text's embedded by a table of their own, normed and projected, in every place;
    they take the places that are theirs (Gemma3nMultimodalEmbedder, Gemma3nModel.forward)."""

    name: str
    rows: int = 128
    width: int = 2048
    between: bool = False
    """Ids of another kind lie above its own, so that both ends are compared."""
    kind: str = "linear"

    def record(self, t: Tape, shared: dict[str, Value], ids: Value, x: Value) -> Value:
        """x with this embedder's rows in their places."""
        for end in ("first", "last") if self.between else ():
            t.touch(constant(t, f"ids from the {end}", ids.axes, BOOL).tensor)
        mask = shared[f"{self.name} places"] = constant(t, "places", ids.axes, BOOL)
        own = shared[f"{self.name} ids"] = constant(t, "ids in their places", ids.axes, INT64)
        with t.scope(self.name) as frame:
            t.weight("soft_embedding_norm.weight", (self.width,), kind="norm")
            frame.local(own)
            shifted = constant(t, "ids from 0", ids.axes, INT64)
            rows = embedding(t, shifted, "embedding", self.rows, self.width)
            frame.local(rows)
            normed = NORM.record(t, rows, "hard_embedding_norm")
            frame.local(normed)
            projected = linear(t, normed, "embedding_projection", h, kind=self.kind)
            frame.local(projected)
            found = PLAIN.record(t, projected, "embedding_post_projection_norm")
        found = shared[f"{self.name} embeddings"] = cast(t, found, x.dtype)
        return choose(t, t.view(mask, (*ids.axes, 1)), found, x)

    @property
    def holds(self) -> tuple[str, ...]:
        """Names of what the joint model's forward holds."""
        return tuple(f"{self.name} {what}" for what in ("places", "ids", "embeddings"))


class Gemma3nEmbedding(TokenEmbedding):
    """Scaled token embeddings, embeddings of each token for each layer, and copies projected to the
    length of the embeddings."""

    per_layer: int = 256
    per_layer_rows: int = 262_144
    layers: int = 0
    copies: int = 4
    beside: tuple[Placeholders, ...] = ()
    """In the joint model: what embeds the ids of images and of sounds."""

    @property
    def virtual_tokens(self) -> str:
        """Nothing goes before the tokens: each layer embeds their ids anew."""
        return ""

    def output_is_held(self, *, training: bool) -> bool:
        return False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = token_ids(t, shared, self.labels)
        if not self.beside:
            words, rows = self._words(t, ids)
            return self.enter(t, shared, words, rows)
        with t.scope("language_model"):
            words, rows = self._words(t, ids)
        for one in self.beside:
            words = one.record(t, shared, ids, words)
        if t.policy.config.batch.images:
            shared[OF_IDS] = rows
            return words
        with t.scope("language_model"):
            return self.enter(t, shared, words, rows)

    def _words(self, t: Tape, ids: Value) -> tuple[Value, Value]:
        """The embeddings, and what ids say to each layer."""
        out = input_leaf(t, scale(t, embedding(t, ids, self.name, v, h, padded=self.padded)))
        return out, self._of_ids(t, ids)

    def enter(self, t: Tape, shared: dict[str, Value], x: Value, rows: Value) -> Value:
        """What the text's own forward makes of the embeddings before its layers run."""
        self._for_each_layer(t, shared, x, rows)
        causal_masks(t, shared, x.dtype, full=self.full_mask, windows=self.windows)
        stacked = self._copied(t, shared, x)
        for suffix in self.tables:
            rotary_tables(t, shared, dh, stacked.dtype, suffix)
        return stacked

    def _of_ids(self, t: Tape, ids: Value) -> Value:
        """What a token's id says to each layer; ids without a row read the first."""
        for name in ("ids of at least 0", "ids below the table", "ids in the table"):
            constant(t, name, ids.axes, BOOL)
        found = constant(t, "ids in the table, or 0", ids.axes, INT64)
        name, width = "embed_tokens_per_layer", self.layers * self.per_layer
        rows = scale(t, embedding(t, found, name, self.per_layer_rows, width, padded=self.padded))
        return t.view(rows, (b, s, self.layers, self.per_layer))

    def _for_each_layer(self, t: Tape, shared: dict[str, Value], x: Value, rows: Value) -> None:
        with t.scope() as frame:
            frame.local(rows)
            width = self.layers * self.per_layer
            projected = linear(t, x, "per_layer_model_projection", width)
            factors = [t.weight(name, (1,), buffer=True).value for name in FACTORS]
            projected = t.view(scale_(t, projected, factors[0]), rows.axes)
            projected = NORM.record(t, projected, "per_layer_projection_norm")
            frame.local(projected)
            shared[PER_LAYER] = scale(t, add(t, projected, rows))

    def _copied(self, t: Tape, shared: dict[str, Value], x: Value) -> Value:
        """x and its projections, as long as x; the model's forward holds them to its end."""
        length = power(t, mean_square(t, x))
        found = [x]
        for index in range(1, self.copies):
            projected = linear(t, x, f"altup_projections.{index - 1}", h)
            found.append(of_length(t, cast(t, projected, x.dtype), length))
        for index, one in enumerate((length, *found)):
            shared[f"{COPIES} {index}"] = one
        stacked = tuple(t.view(one, (1, b, s, h)) for one in found)
        return concatenate(t, stacked, (self.copies, b, s, h), name="stack")


def held_names(copies: int) -> tuple[str, ...]:
    """Names under which the embedding shares what the model's forward holds."""
    return tuple(f"{COPIES} {index}" for index in range(copies + 1))


def of_length(t: Tape, x: Value, length: Value) -> Value:
    """x as long as a root of a mean of squares says."""
    own = sqrt(t, bounded(t, mean_square(t, x), "x >= low"))
    return divide_rows(t, row_scale(t, x, length), own)


class SparseMlp(Record):
    """A gated feed-forward whose gates are cut to zero below some standard deviations above their
    mean, so that few remain (Gemma3nTextMLP)."""

    activation: str = "gelu_pytorch_tanh"
    width: Size = f
    sparse: bool = False

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x."""
        with t.scope("mlp") as frame:
            frame.local(x)
            gate = linear(t, x, "gate_proj", self.width)
            gate = self._cut(t, gate) if self.sparse else gate
            frame.local(gate)
            made = activate(t, gate, self.activation)
            frame.local(made)
            up = linear(t, x, "up_proj", self.width)
            frame.local(up)
            return linear(t, mul(t, made, up), "down_proj", h)

    def _cut(self, t: Tape, x: Value) -> Value:
        with t.scope() as frame:
            frame.local(x)
            mean = row_mean(t, x, x.dtype)
            deviation = standard_deviation(t, x)
            frame.local(mean, deviation)
            factor = constant(t, "deviations above the mean", (1,), x.dtype)
            above = add(t, mean, mul(t, deviation, factor))
            frame.local(above)
            return relu(t, subtract_rows(t, x, above))


class WithGemma3nImages(WithImages):
    """The text's forward begins when the images are in their places."""

    text: Gemma3nEmbedding

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        merged = super().record(t, x, shared)
        if merged is None or not t.policy.config.batch.images:
            return merged
        with t.scope("language_model"):
            return self.text.enter(t, shared, merged, shared[OF_IDS])


class AltUp(Record):
    """Predicts all copies from what the layer reads, and corrects them by what it made."""

    copies: int = 4
    clipped: bool = True
    """The coefficients are clamped in training (`altup_coef_clip`)."""
    scaled: bool = True
    """The corrected copy is scaled by a weight (`altup_correct_scale`)."""

    def _modalities(self, t: Tape, x: Value) -> Value:
        with t.scope() as frame:
            frame.local(x)
            t.weight("router_input_scale", (1,), buffer=True)
            inputs = scale(t, NORM.record(t, x, "router_norm"))
            frame.local(inputs)
            routed = linear(t, inputs, "modality_router", self.copies)
            frame.local(routed)
            return cast(t, tanh(t, cast(t, routed, FP32)), x.dtype)

    def predict(self, t: Tape, x: Value) -> Value:
        """All copies, from x of axes (copies, b, s, h)."""
        n = self.copies
        with t.scope("altup") as frame:
            frame.local(x)
            modalities = self._modalities(t, slice_of(t, x, (b, s, h)))
            frame.local(modalities)
            coefficients = linear(t, modalities, "prediction_coefs", n * n)
            frame.local(coefficients)
            squares = t.view(coefficients, (b * s, n, n), copies_gradient=True)
            last = t.view(x, (b * s, h, n))
            predicted = bmm(t, last, squares, b * s, h, n, n, (b * s, h, n))
            predicted = add_to_view(t, t.view(predicted, x.axes), x)
            frame.local(predicted)
            return cast(t, copy(t, predicted), x.dtype)

    def correct(self, t: Tape, predicted: Value, made: Value) -> Value:
        """All copies, from their predictions and what the layer made of the first."""
        n = self.copies
        with t.scope("altup") as frame:
            frame.local(predicted, made)
            modalities = self._modalities(t, made)
            frame.local(modalities)
            news = subtract(t, made, slice_of(t, predicted, made.axes))
            news = repeat_copies(t, news, n)
            frame.local(news)
            factors = shift(t, self._corrections(t, modalities))
            frame.local(factors)
            corrected = row_scale(t, news, t.view(factors, (n, b, s, 1)))
            return add_(t, corrected, predicted)

    def _corrections(self, t: Tape, modalities: Value) -> Value:
        if not (self.clipped and t.policy.training):
            return linear(t, modalities, "correction_coefs", self.copies)
        with t.scope("correction_coefs"):
            weight = t.weight("weight", (self.copies, self.copies), kind="linear").value
        return dense_linear(t, modalities, bounded(t, weight, "w >= -clip", "w <= clip"), None)

    def first(self, t: Tape, corrected: Value) -> Value:
        """A copy of the first, scaled in the type of its weight."""
        found = copy(t, slice_of(t, corrected, (b, s, h)), name="clone")
        if not self.scaled:
            return found
        with t.scope("altup") as frame:
            frame.local(found)
            factors = t.weight("correct_output_scale", (h,)).value
            return cast(t, mul(t, cast(t, found, factors.dtype), factors), found.dtype)


class Gemma3nLayer(AttentionLayer):
    """Attention and feed-forward on the first copy, whose result corrects all of them; the layer's
    own embeddings are added to the others."""

    attention: Gemma4Attention
    mlp: SparseMlp
    altup: AltUp = AltUp()
    per_layer: int = 256
    laurel_rank: int = 64
    activation: str = "gelu_pytorch_tanh"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        own = slice_of(t, shared[PER_LAYER], (b, s, self.per_layer))
        with t.scope() as frame:
            frame.local(x)
            predicted = self.altup.predict(t, x)
            frame.local(predicted)
            active = slice_of(t, predicted, (b, s, h))
            made = self._fed(t, frame, self._attended(t, frame, active, shared), shared)
            frame.local(made)
            corrected = self.altup.correct(t, predicted, made)
            frame.local(corrected)
            return add_to_rest(t, corrected, self._own(t, self.altup.first(t, corrected), own))

    def _attended(self, t: Tape, frame: Scope, x: Value, shared: dict[str, Value]) -> Value:
        """Every result has a name in the layer's forward, which holds it to its end."""
        normed = NORM.record(t, x, "input_layernorm")
        low = self._laurel(t, normed)
        frame.local(normed, low)
        out = NORM.record(t, self.attention.record(t, normed, shared), "post_attention_layernorm")
        frame.local(out)
        gated = add(t, x, out)
        frame.local(gated)
        return scale(t, add(t, gated, low))

    def _laurel(self, t: Tape, x: Value) -> Value:
        with t.scope("laurel") as frame:
            frame.local(x)
            low = linear(t, linear(t, x, "linear_left", self.laurel_rank), "linear_right", h)
            frame.local(low)
            return add(t, x, NORM.record(t, low, "post_laurel_norm"))

    def _fed(self, t: Tape, frame: Scope, x: Value, shared: dict[str, Value]) -> Value:
        frame.local(x)
        normed = NORM.record(t, x, "pre_feedforward_layernorm")
        frame.local(normed)
        out = self.mlp.record(t, normed, shared)
        frame.local(out)
        out = NORM.record(t, out, "post_feedforward_layernorm")
        frame.local(out)
        return add(t, x, out)

    def _own(self, t: Tape, x: Value, own: Value) -> Value:
        with t.scope() as frame:
            frame.local(x)
            gate = linear(t, x, "per_layer_input_gate", self.per_layer)
            frame.release(x)
            gate = activate(t, gate, self.activation)
            out = linear(t, mul(t, gate, own), "per_layer_projection", h)
            return NORM.record(t, out, "post_per_layer_input_norm")


class Gemma3nHead(CausalLmHead):
    """The copies made one again before the last norm."""

    copies: int = 4
    is_last: bool = True
    """No other modules of the model are registered behind its projections."""

    @property
    def registered_early(self) -> str:
        return self.norm_name if self.is_last else ""

    def hidden(self, t: Tape, x: Value) -> Value:
        with t.scope() as frame:
            frame.local(x)
            return super().hidden(t, self._joined(t, x))

    def _joined(self, t: Tape, x: Value) -> Value:
        one, path = x.axes[1:], self.norm_name.rpartition(".")[0]
        with t.scope() as frame:
            length = power(t, mean_square(t, slice_of(t, x, one)))
            found = [slice_of(t, x, one)]
            with t.scope(path):
                for index in range(1, self.copies):
                    name = f"altup_unembed_projections.{index - 1}"
                    # the type of the embeddings, whatever the layers made of the copies
                    embedded = t.policy.parameter_dtype("embedding")
                    made = cast(t, linear(t, slice_of(t, x, one), name, h), embedded)
                    found.append(of_length(t, made, length))
            frame.local(length, *found)
            stacked = concatenate(
                t, tuple(t.view(part, (1, *one)) for part in found), x.axes, name="stack"
            )
            return mean_of_copies(t, stacked)
