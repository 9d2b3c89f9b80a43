"""Falcon H1's layer: Mamba 2 and attention read the same norm, their outputs are added, and nearly
every product is multiplied by a number of the config.

Source: transformers 5.23 models/falcon_h1/modeling_falcon_h1.py FalconH1DecoderLayer, FalconH1MLP.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import f
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import AttentionLayer
from napkinmath.models.layers.mamba2 import Mamba2Mixer
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import add, mul, scale
from napkinmath.ops.matmul import linear


class MultipliedMlp(Record):
    """down(up(x) * act(gate(x) * number)) * number."""

    activation: str = "silu"
    bias: bool = False

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Feed-forward of x of axes (b, s, h)."""
        with t.scope("feed_forward") as frame:
            frame.local(x)
            up = linear(t, x, "up_proj", f, bias=self.bias)
            gate = activate(
                t, scale(t, linear(t, x, "gate_proj", f, bias=self.bias)), self.activation
            )
            product = mul(t, up, gate)
            frame.local(product)
            return scale(t, linear(t, product, "down_proj", x.axes[-1], bias=self.bias))


class MixedLayer(AttentionLayer):
    """residual + mixer(norm) + attention(norm), then residual + feed-forward(norm)."""

    attention: GroupedQueryAttention
    mixer: Mamba2Mixer
    mlp: MultipliedMlp

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What the attention and the mixer keep of earlier tokens."""
        return (*self.attention.cached, *self.mixer.cached)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        middle = self._mixed(t, x, shared)
        with t.scope() as frame:
            frame.local(middle)
            normed = Norm().record(t, middle, "pre_ff_layernorm")
            return add(t, middle, self.mlp.record(t, normed, shared))

    def _mixed(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        with t.scope() as frame:
            frame.local(x)
            normed = Norm().record(t, x, "input_layernorm")
            frame.local(normed)
            mixed = scale(t, self.mixer.record(t, normed, shared))
            frame.local(mixed)
            attended = scale(t, self.attention.record(t, scale(t, normed), shared))
            frame.local(attended)
            return add(t, x, add(t, mixed, attended))
