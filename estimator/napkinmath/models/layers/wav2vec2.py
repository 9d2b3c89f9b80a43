"""wav2vec 2.0 and kin: samples through convolutions that are left frozen, an encoder with positions
from a convolution, a loss over paths of labels (CTC).

Source: transformers 5.23 models/wav2vec2/modeling_wav2vec2.py (hubert, unispeech and data2vec are
copies of it), loss/loss_ctc.py; examples/pytorch/speech-recognition/run_speech_recognition_ctc.py,
whose `freeze_feature_encoder` is on by default.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, INT64
from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.sounds import RATE, Sound, lengths_of
from napkinmath.ir.symbols import a, b, dh, h, s, v
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.t5 import st
from napkinmath.models.layers.wavlm import GatedPlaceAttention
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import add, dropout
from napkinmath.ops.images import group_norm
from napkinmath.ops.index import constant, input_leaf, model_input
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.sounds import convolution, ctc_loss, masked_rows, weight_norm
from napkinmath.ops.whole_scores import eager_attention

PLACES, PROJECTED = "places of the convolution", "projected features"
FEATURES, RAW = "normed features", "features of the convolutions"


class SoundConvolutions(Record):
    """The feature encoder: a convolution, perhaps a norm, an activation, a few times over."""

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    bias: bool = False
    norms: str = "group"
    """'group': one of each channel after the first convolution; 'layer': after each."""
    activation: str = "gelu"

    def record(self, t: Tape, shared: dict[str, Value]) -> Value:
        """Features of axes (b, channels, s), without a graph."""
        lengths = lengths_of(s, self.kernels, self.strides)
        t.records_no_graph = True
        with t.scope("feature_extractor"):
            with t.scope("conv_layers.0.conv"):
                axes = (self.channels[0], 1, self.kernels[0])
                dtype = t.weight("weight", axes, kind="conv").value.dtype
            # neither the model nor a trainer casts them but under autocast
            given = shared["samples"] = model_input(t, "samples", (b, lengths[0]), dtype)
            x = t.view(given, (b, 1, lengths[0]))
            for i, (channels, kernel) in enumerate(zip(self.channels, self.kernels, strict=True)):
                with t.scope(f"conv_layers.{i}") as layer:
                    layer.local(x)
                    out = convolution(
                        t, x, "conv", channels, kernel, lengths[i + 1], bias=self.bias
                    )
                    x = activate(t, self._normed(t, out, i), self.activation)
        t.records_no_graph = False
        return x

    def _normed(self, t: Tape, x: Value, number: int) -> Value:
        rows, channels, length = x.axes
        with t.scope() as frame:
            frame.local(x)
            if self.norms == "layer":
                turned = layer_norm(t, t.view(x, (rows, length, channels)), name="layer_norm")
                return t.view(turned, x.axes)
            return x if number else group_norm(t, x, "layer_norm", self.channels[0])


class PlaceConvolution(Record):
    """Positions from convolutions over the hidden states: one whose weight is normed, or several
    with a norm after each (Data2Vec)."""

    kernel: int
    groups: int
    layers: int = 0
    """Of several; 0 for the one."""
    activation: str = "gelu"

    def record(self, t: Tape, x: Value) -> Value:
        """Positions of axes (b, s, h)."""
        with t.scope("pos_conv_embed") as frame:
            out = t.view(x, (b, h, s))
            for number in range(self.layers or 1):
                name = f"layers.{number}." if self.layers else ""
                out = self._one(t, out, f"{name}conv")
            frame.local(out)
            return t.view(out, (b, s, h))

    def _one(self, t: Tape, x: Value, name: str) -> Value:
        inner = t.sizes["h"] // self.groups
        weight = None if self.layers else weight_norm(t, name, (h, inner, self.kernel))
        odd = 1 - self.kernel % 2
        out = convolution(
            t, x, name, h, self.kernel, s + odd, groups=self.groups, bias=True, weight=weight
        )
        if odd:
            out = t.view(out, x.axes, "slice", copies_gradient=True)
        if self.layers:
            turned = layer_norm(t, t.view(out, (b, s, h)), name="", affine=False)
            out = t.view(turned, x.axes)
        return activate(t, out, self.activation)


class SoundEntrance(Part):
    """Samples to the hidden states of the first layer."""

    convolutions: SoundConvolutions
    places: PlaceConvolution
    hop: int
    """Samples of a step."""
    normed_features: bool = True
    projection_dropout: float = 0.0
    dropout: float = 0.1
    norm_first: bool = False
    """Layers norm what they read: no norm before the first."""
    masks: tuple[bool, bool] = (True, False)
    """Whether steps and features are masked in training (SpecAugment)."""
    marked: bool = True
    """There is an embedding for what is masked."""
    hands_back: bool = True
    """The normed features are among what the model returns."""
    labels: tuple[Size, ...] = (b, st)

    @property
    def hears(self) -> Sound:
        lengths = lengths_of(0, self.convolutions.kernels, self.convolutions.strides)
        return Sound(hop=self.hop, fewer=int(lengths[0]) // self.hop)  # type: ignore[reportArgumentType]

    @property
    def brings(self) -> str:
        return (
            f"{RATE // self.hop} steps of the context are a second of sound; the convolutions are"
            " frozen, as transformers' scripts leave them"
        )

    def output_is_held(self, *, training: bool) -> bool:
        return False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        shared["labels"] = model_input(t, "labels", self.labels, INT64)
        with t.scope() as frame:
            found = self.convolutions.record(t, shared)
            features = t.view(found, (b, s, self.convolutions.channels[-1]))
            if not self.hands_back:
                shared[RAW] = Value(features.tensor, features.axes, features.dtype)
            with t.scope("feature_projection"):
                if self.normed_features:
                    features = layer_norm(t, features, name="layer_norm")
                out = linear(t, features, "projection", h, bias=True)
                out = dropout(t, out, self.projection_dropout)
            out = input_leaf(t, self._masked(t, out))
            if self.hands_back:
                shared[FEATURES] = Value(features.tensor, features.axes, features.dtype)
            shared[PROJECTED] = Value(out.tensor, out.axes, out.dtype)
            with t.scope("encoder"):
                places = self.places.record(t, out)
                shared[PLACES] = Value(places.tensor, places.axes, places.dtype)
                frame.local(places)
                total = add(t, out, places)
                if not self.norm_first:
                    total = layer_norm(t, total, name="layer_norm")
                return dropout(t, total, self.dropout)

    def _masked(self, t: Tape, x: Value) -> Value:
        word = None
        if self.marked:
            word = t.weight("masked_spec_embed", (h,), kind="other").value
        if not t.policy.training:
            return x
        if self.masks[0] and word is not None:
            x = masked_rows(t, x, constant(t, "masked steps", (b, s), BOOL), word)
        if self.masks[1]:
            x = masked_rows(t, x, constant(t, "masked features", (b, h), BOOL), None)
        return x


class SoundLayer(Part):
    """Self-attention and feed-forward, a norm after each residual or before each sublayer."""

    width: int
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    norm_first: bool = False
    gated: GatedPlaceAttention | None = None
    """WavLM's attention, in the place of the plain one."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            read = layer_norm(t, x, name="layer_norm") if self.norm_first else x
            if self.gated is None:
                attended = self._attention(t, read)
            else:
                attended = self.gated.record(t, read, shared, frame)
            x = add(t, x, dropout(t, attended, self.dropout))
            x = x if self.norm_first else layer_norm(t, x, name="layer_norm")
            read = layer_norm(t, x, name="final_layer_norm") if self.norm_first else x
            x = add(t, x, self._feed_forward(t, read))
            return x if self.norm_first else layer_norm(t, x, name="final_layer_norm")

    def _feed_forward(self, t: Tape, x: Value) -> Value:
        with t.scope("feed_forward"):
            wide = linear(t, x, "intermediate_dense", self.width, bias=True)
            wide = dropout(t, activate(t, wide, self.activation), self.activation_dropout)
            return dropout(t, linear(t, wide, "output_dense", h, bias=True), self.dropout)

    def _attention(self, t: Tape, x: Value) -> Value:
        with t.scope("attention") as frame:
            frame.local(x)
            q, k, value = (
                t.view(linear(t, x, name, a * dh, bias=True), (b, a, s, dh))
                for name in ("q_proj", "k_proj", "v_proj")
            )
            frame.local(q, k, value)
            probability = self.attention_dropout
            if t.policy.config.attention is Attention.EAGER:
                out = eager_attention(
                    t, q, k, value, groups=1, mask=None, dropout_p=probability, fp32_softmax=False
                )
            else:
                out = sdpa(t, q, k, value, groups=1, causal=False, dropout_p=probability)
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * dh)), "out_proj", h, bias=True)


class SoundNorm(Part):
    """The norm behind layers that norm what they read."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return layer_norm(t, x, name="layer_norm")


class CtcHead(Part):
    """Dropout, a linear over the letters, the loss of all paths that spell the labels."""

    dropout: float = 0.1

    @property
    def task(self) -> str:
        return "ctc"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = dropout(t, x, self.dropout)
            frame.local(hidden)
            logits = linear(t, hidden, "lm_head", v, bias=True, role=Role.LOGITS)
            # where the batch brings no mask, one as long as the samples is made
            whole = constant(t, "mask of the samples", shared["samples"].axes, INT64)
            frame.local(logits, whole)
            return ctc_loss(t, logits, st)


class SoundClassifier(Part):
    """A projection of every step, their mean, the classes."""

    width: int
    classes: int = 2

    @property
    def task(self) -> str:
        return "sequence-classification"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = linear(t, x, "projector", self.width, bias=True)
            frame.local(hidden)
            mean = t.op(
                "mean",
                (hidden,),
                (b, self.width),
                hidden.dtype,
                gradients=(LIKE,),
                costs=(Move(traffic(hidden)),),
                backward_costs=(Move(traffic(hidden)),),
            )
            frame.local(mean)
            logits = linear(t, mean, "classifier", self.classes, bias=True, role=Role.LOGITS)
            frame.local(logits)
            return cross_entropy(t, logits, upcast=False)
