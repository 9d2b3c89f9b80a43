"""Heads of encoders: masked language modelling, classification of a sequence or an image, and
none."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.config.workload_config import Head
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b, h, v
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.score_head import EmbeddingHead
from napkinmath.ops.elementwise import dropout, tanh
from napkinmath.ops.index import slice_of
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.nodes import node, result
from napkinmath.ops.norm import layer_norm


class MaskedLmHead(Part):
    """Dense, activation, LayerNorm, and a decoder tied to the word embeddings with its own bias;
    the loss is not shifted."""

    dense: str = "cls.predictions.transform.dense"
    norm: str = "cls.predictions.transform.LayerNorm"
    decoder: str = "cls.predictions.decoder"
    tied_to: str = ""
    activation: str = "gelu"
    dense_bias: bool = True
    norm_bias: bool = True
    decoder_bias: bool = True
    upcast: bool = False
    """Logits are copied to fp32 before the loss (loss_utils.ForMaskedLMLoss, which ModernBERT calls
    and BERT does not)."""
    shifts: bool = False
    """Each position predicts the next token: the loss is loss_utils.ForCausalLMLoss."""
    width: Size = h
    """Of the embeddings, which the decoder shares."""

    @property
    def task(self) -> str:
        return "causal-lm" if self.shifts else "masked-lm"

    def hidden(self, t: Tape, x: Value) -> Value:
        """What the decoder reads: dense layer, activation, norm."""
        with t.scope() as frame:
            frame.local(x)
            dense = linear(t, x, self.dense, self.width, bias=self.dense_bias)
            wide = activate(t, dense, self.activation)
            return layer_norm(t, wide, name=self.norm, bias=self.norm_bias)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = self.hidden(t, x)
            with t.scope(self.decoder):
                weight = t.weight("weight", (v, self.width), kind="head", tied_to=self.tied_to)
            logits = linear(
                t,
                hidden,
                self.decoder,
                v,
                bias=self.decoder_bias,
                kind="head",
                role=Role.LOGITS,
                weight=weight,
            )
            frame.local(logits)
            return cross_entropy(t, logits, upcast=self.upcast, shifted=self.shifts)


class ClassificationHead(Part):
    """The first token through an optional pooler (dense, tanh), dropout and a classifier."""

    labels: int = 2
    pooler: str = ""
    """Path of the pooler's dense layer; none where empty."""
    activation: str = "tanh"
    """After the pooler."""
    norm: str = ""
    """Path of a final LayerNorm over all tokens (ViT)."""
    dropout: float = 0.1
    name: str = "classifier"
    width: Size = h
    pooler_bias: bool = True
    pooled_norm: str = ""
    """Path of a LayerNorm without a bias after the pooler (ModernBERT)."""
    pooler_kind: str = "linear"
    kind: str = "linear"
    """TASK_HEAD where PEFT trains the classifier whole beside adapters, which it does for text."""
    images: bool = False

    @property
    def task(self) -> str:
        return "image-classification" if self.images else "sequence-classification"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            if self.norm:
                x = layer_norm(t, x, name=self.norm)
                frame.local(x)
            first = slice_of(t, x, (b, x.axes[-1]))
            if self.pooler:
                dense = linear(
                    t, first, self.pooler, self.width, bias=self.pooler_bias, kind=self.pooler_kind
                )
                first = (
                    tanh(t, dense)
                    if self.activation == "tanh"
                    else activate(t, dense, self.activation)
                )
                frame.local(first)
                if self.pooled_norm:
                    first = layer_norm(t, first, name=self.pooled_norm, bias=False)
                    frame.local(first)
            dropped = dropout(t, first, self.dropout)
            frame.local(dropped)
            logits = linear(
                t, dropped, self.name, self.labels, bias=True, kind=self.kind, role=Role.LOGITS
            )
            frame.local(logits)
            return cross_entropy(t, logits, upcast=False)


class EndOfTextHead(Part):
    """The decoder's state at the last end of text through dropout, a dense layer, tanh, dropout and
    a classifier (BartForSequenceClassification, T5ForSequenceClassification). Adapters reach both
    linears as any others."""

    labels: int = 2
    dropout: float = 0.0

    @property
    def task(self) -> str:
        return "sequence-classification"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            last = self._last(t, x)
            with t.scope("classification_head"):
                dense = linear(t, dropout(t, last, self.dropout), "dense", h, bias=True)
                inner = dropout(t, tanh(t, dense), self.dropout)
                logits = linear(t, inner, "out_proj", self.labels, bias=True, role=Role.LOGITS)
            frame.local(last, logits)
            return cross_entropy(t, logits, upcast=False)

    def _last(self, t: Tape, x: Value) -> Value:
        """The rows whose token ends a text, each sequence's last."""
        chosen = result(t, "states at the ends of text", (b, h), x.dtype, (x,))
        node(
            t,
            "index",
            (x,),
            (chosen,),
            new=(chosen.tensor,),
            costs=(Move(2 * traffic(chosen)),),
            backward_costs=(Move(traffic(x, chosen)),),
        )
        return slice_of(t, chosen, (b, h))


class MeanOutput(Part):
    """No head: the mean of the last hidden states (or of the pooled first token) stands for a
    loss."""

    norm: str = ""
    pooler: str = ""

    @property
    def task(self) -> str:
        return "feature-extraction"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if self.norm:
            x = layer_norm(t, x, name=self.norm)
        if self.pooler:
            x = self._pooled(t, x)
        return t.op(
            "mean",
            (x,),
            (1,),
            FP32 if t.policy.autocast else x.dtype,
            gradients=(LIKE,),
            costs=(Move(traffic(x)),),
            role=Role.LOGITS,
        )

    def _pooled(self, t: Tape, x: Value) -> Value:
        first = slice_of(t, x, (b, x.axes[-1]))
        return tanh(t, linear(t, first, self.pooler, x.axes[-1], bias=True))

    def hidden(self, t: Tape, x: Value) -> Value:
        """The last hidden states, beside a pooler's output that nobody reads."""
        states = layer_norm(t, x, name=self.norm) if self.norm else x
        if self.pooler:
            self._pooled(t, states)
        return states

    def ending_in(self, head: Head) -> Part | None:
        return EmbeddingHead(exit=self) if head is Head.EMBEDDINGS else None
