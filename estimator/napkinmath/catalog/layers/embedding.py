"""The entrance of a language model: token ids, embeddings, rotary tables and the attention mask that all layers share."""

from __future__ import annotations

from napkinmath.catalog.layers.symbols import b, dh, h, s, v
from napkinmath.dtypes import FP32, INT64
from napkinmath.expr import Size
from napkinmath.ledger import Role, Value
from napkinmath.model_spec import Part
from napkinmath.ops.elementwise import cast, scale
from napkinmath.ops.index import constant, embedding, model_input
from napkinmath.tape import Tape
from napkinmath.train_config import Attention


class TokenEmbedding(Part):
    """Token embeddings, with rotary cos/sin tables where the family uses them."""

    rotary: bool = True
    rotary_size: Size = 0
    """Rotated part of the head; 0 is the whole head."""
    complex_rotary: bool = False
    """One table of complex fp32 numbers, a pair each, instead of cos and sin (DeepSeek V2, Llama 4)."""
    scaled: bool = False
    """Gemma multiplies embeddings by sqrt(hidden size)."""
    name: str = "embed_tokens"
    masked: bool = False
    """The layers have no form without a mask (attention that transformers runs eager only)."""
    sliding: bool = False
    """Sliding layers read a mask of their own."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        ids = shared["input_ids"] = model_input(t, "input ids", (b, s), INT64)
        shared["labels"] = model_input(t, "labels", (b, s), INT64)
        out = embedding(t, ids, self.name, v, h)
        if self.scaled:
            out = scale(t, out)
        if self.complex_rotary:
            shared["rotary"] = constant(t, "rotary table", (1, s, self.rotary_size or dh), FP32)
        elif self.rotary:
            rotary_tables(t, shared, self.rotary_size or dh, out)
        if self.masked or t.policy.config.attention is Attention.EAGER:
            shared["mask"] = constant(t, "attention mask", (b, 1, s, s), out.dtype)
            if self.sliding:
                shared["sliding mask"] = constant(t, "sliding attention mask", (b, 1, s, s), out.dtype)
        return out


def rotary_tables(t: Tape, shared: dict[str, Value], size: Size, like: Value) -> None:
    """cos and sin of every position, computed in fp32 and cast to the type of the hidden states."""
    with t.scope("rotary_emb"):
        for name in ("cos", "sin"):
            shared[name] = cast(t, constant(t, name, (1, s, size), FP32), like.dtype)
            shared[name].tensor.role = Role.ACTIVATIONS
