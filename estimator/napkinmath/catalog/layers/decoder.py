"""The pre-norm decoder layer: residual + attention(norm), residual + feed-forward(norm)."""

from __future__ import annotations

from napkinmath.catalog.layers.norm import Norm
from napkinmath.ledger import Value
from napkinmath.model_spec import Part
from napkinmath.ops.elementwise import add
from napkinmath.tape import Tape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Sublayer(Protocol):
        """Attention or feed-forward: reads the normed hidden states, returns what is added to the residual."""

        def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value: ...


class DecoderLayer(Part):
    """transformers' LlamaDecoderLayer.forward and its kin."""

    attention: Sublayer
    mlp: Sublayer
    norm: Norm = Norm()
    names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            attended = self.attention.record(t, self.norm.record(t, x, self.names[0]), shared)
            middle = add(t, x, attended)
            frame.release(x)
            frame.local(middle)
            return add(t, middle, self.mlp.record(t, self.norm.record(t, middle, self.names[1]), shared))
