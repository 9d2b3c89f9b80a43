"""The gated delta network of OLMo Hybrid: the rule of models/layers/gated_delta.py behind a
projection each."""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.gated_delta import GatedDeltaNet
from napkinmath.ops.convolution import causal_convolution
from napkinmath.ops.elementwise import scale, sigmoid
from napkinmath.ops.index import chunk, concatenate
from napkinmath.ops.matmul import linear


class SeparateDeltaNet(GatedDeltaNet):
    """Each of queries, keys and values has a projection, joined for the convolution; the gate is
    projected after the rule (transformers 5.23 models/olmo_hybrid OlmoHybridGatedDeltaNet)."""

    doubled: bool = True
    """The learning rate is between 0 and 2 (linear_allow_neg_eigval)."""

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        with t.scope("linear_attn") as frame:
            frame.local(x)
            channels = 2 * self.keys + self.values
            parts = tuple(
                linear(t, x, name, width)
                for name, width in (
                    ("q_proj", self.keys),
                    ("k_proj", self.keys),
                    ("v_proj", self.values),
                )
            )
            mixed = t.view(concatenate(t, parts, (b, s, channels)), (b, channels, s))
            mixed = causal_convolution(t, mixed, "conv1d", channels, self.kernel, bias=False)
            q, k, v = chunk(
                t, t.view(mixed, (b, s, channels)), (self.keys, self.keys, self.values), "split"
            )
            frame.local(mixed)
            beta = sigmoid(t, linear(t, x, "b_proj", self.value_heads))
            beta = scale(t, beta) if self.doubled else beta
            decay = self._decay(t, linear(t, x, "a_proj", self.value_heads))
            frame.local(beta, decay)
            out = self._rule(t, q, k, v, decay, beta)
            frame.local(out)
            gate = linear(t, x, "g_proj", self.values)
            frame.local(gate)
            return self._gated(t, frame, out, gate, ("o_norm", "o_proj"))
