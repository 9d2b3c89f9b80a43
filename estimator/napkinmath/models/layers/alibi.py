"""The entrance of models with ALiBi: token embeddings, and the bias that grows with distance."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32
from napkinmath.base.expr import Size
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import a, b, h, s, v
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.embedding import Entrance, token_ids
from napkinmath.models.layers.masks import causal_masks
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.index import constant, embedding, input_leaf


class AlibiEmbedding(Entrance):
    """Token embeddings, with a norm in BLOOM, and the ALiBi bias."""

    name: str = "word_embeddings"
    norm: Norm | None = None
    norm_name: str = "word_embeddings_layernorm"
    padded: bool = False
    bias_rows: Size = 0
    """Key positions of an fp32 bias without a batch axis (MPT); 0 is one in the model's type for
    each sequence (BLOOM)."""
    alibi: bool = True
    bool_mask: bool = False
    """Layers read the mask as bools (MPT)."""

    def output_is_held(self, *, training: bool) -> bool:
        return self.norm is None

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = token_ids(t, shared, self.labels)
        out = input_leaf(t, embedding(t, ids, self.name, v, h, padded=self.padded))
        if self.norm is not None:
            shared["token embeddings"] = Value(out.tensor, out.axes, out.dtype)
            out = self.norm.record(t, out, self.norm_name)
        if self.alibi:
            axes = (a, 1, self.bias_rows) if self.bias_rows else (b * a, 1, s)
            shared["alibi"] = constant(t, "alibi", axes, FP32 if self.bias_rows else out.dtype)
        causal_masks(t, shared, out.dtype, eager_only=True)
        if self.bool_mask:
            shared["bool mask"] = constant(t, "mask as bools", (b, 1, s, s), BOOL)
            t.touch(shared.pop("mask").tensor)
        return out
