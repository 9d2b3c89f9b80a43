"""ALBERT: embeddings narrower than the layers, and layers that share one set of weights.

Source: transformers 5.23 models/albert/modeling_albert.py AlbertAttention, AlbertLayer,
AlbertTransformer.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import f, h
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.encoder import BidirectionalAttention, EncoderEmbedding
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.shared_weights import share_casts, take_casts, tie
from napkinmath.ops.elementwise import add, dropout
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm


class AlbertEmbedding(EncoderEmbedding):
    """BERT's embeddings, then a linear to the layers' width."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        with t.scope("embeddings"):
            narrow = super().record(t, x, shared)
        assert narrow is not None
        return linear(t, narrow, "encoder.embedding_hidden_mapping_in", h, bias=True)


class AlbertLayer(Part):
    """One run of a layer's weights: attention, residual, norm; feed-forward, residual, norm."""

    attention: BidirectionalAttention = BidirectionalAttention()
    activation: str = "gelu_new"
    dropout: float = 0.0
    use: int = 0
    """How many layers before have run these weights. Each is a block of its own: gradients wait
    for those of the first."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        path = t.module
        if self.use:
            take_casts(t, shared, path)
        with t.scope("attention") as frame:
            frame.local(x)
            attended = self.attention.record(t, x, shared)
            dropped = dropout(t, linear(t, attended, "dense", h, bias=True), self.dropout)
            frame.local(dropped)
            middle = layer_norm(t, add(t, x, dropped), name="LayerNorm")
        with t.scope() as frame:
            frame.local(x, middle)
            wide = activate(t, linear(t, middle, "ffn", f, bias=True), self.activation)
            out = linear(t, wide, "ffn_output", h, bias=True)
            frame.local(out)
            made = layer_norm(t, add(t, out, middle), name="full_layer_layer_norm")
        for weight in t.weights if self.use else ():
            tie(weight, path, path)
        share_casts(t, shared, t.weights)
        return made
