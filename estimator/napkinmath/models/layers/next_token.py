"""A layer that predicts the token after next, held with a model whose own forward leaves it out."""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b, h, s
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.index import concatenate
from napkinmath.ops.matmul import linear


class NextTokenLayer(Part):
    """A norm each of the next token's embedding and of the hidden states, one linear of both, a
    decoder layer, a norm.

    Source: NVIDIA-NeMo/Megatron-Bridge models/mimo/mimo_bridge.py, parameters of `mtp_layers`.
    """

    layer: DecoderLayer
    norm: Norm = Norm()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            pair = tuple(
                self.norm.record(t, x, name) for name in ("token_layernorm", "hidden_layernorm")
            )
            both = concatenate(t, pair, (b, s, 2 * h))
            out = self.layer.record(t, linear(t, both, "input_proj", h), shared)
            assert out is not None
            return self.norm.record(t, out, "final_layernorm")
