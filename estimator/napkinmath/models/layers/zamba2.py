"""Zamba 2's layers: Mamba 2, in some of them behind one transformer block whose weights several
layers share; each of these has a low-rank pair of its own beside the shared projections.

Source: transformers 5.23 models/zamba2/modeling_zamba2.py Zamba2Attention, Zamba2MLP,
Zamba2HybridLayer, Zamba2MambaDecoderLayer, Zamba2Model.get_layers.
"""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import a, b, f, h, s
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.activations import activate
from napkinmath.models.layers.attention import GroupedQueryAttention, split_heads
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.mamba2 import Mamba2Mixer
from napkinmath.models.layers.norm import Norm
from napkinmath.models.layers.shared_weights import share_casts, take_casts, tie
from napkinmath.ops.elementwise import add, copy, mul
from napkinmath.ops.index import chunk, concatenate, constant
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.cache import Cached

ORIGINAL = "original hidden states"


class KeptEmbedding(TokenEmbedding):
    """Token embeddings, of which a copy is read by every shared block."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        out = super().record(t, x, shared)
        assert out is not None
        shared[ORIGINAL] = copy(t, out)
        return out


class Use(Record):
    """One layer's use of a shared block."""

    index: int
    """Its number among the uses of all blocks: the place of its own low-rank pairs."""
    others: tuple[int, ...] = ()
    """Uses of the same block by other layers, whose pairs lie in every copy of the module."""
    owner: str = ""
    """Path of the first layer that uses the block, whose weights the others share; '' for itself."""
    rank: int = 0
    """Of the pairs."""
    attends_adapted: bool = False
    """Queries, keys and values have pairs too, not the feed-forward alone."""

    @property
    def kind(self) -> str:
        """Of the block's linears. A quantizer leaves tied weights as they are (transformers
        quantizers/base.py get_keys_to_not_convert)."""
        return "unquantized linear" if self.others else "linear"

    def added(self, t: Tape, x: Value, out: Value, name: str, width: Size) -> Value:
        """out + the layer's own pair of x."""
        with t.scope() as frame:
            frame.local(out)
            path = f"{name}_adapter_list.{self.index}"
            return add(t, out, self._pair(t, x, path, width))

    def declare(self, t: Tape, name: str, inputs: Size, width: Size) -> None:
        """The weights of the other layers' pairs, which do not run here."""
        for index in self.others:
            idle = Tape(t.policy, t.sizes)
            idle.module = t.module
            rows = constant(idle, "no input", (1, inputs), t.policy.compute_dtype)
            self._pair(idle, rows, f"{name}_adapter_list.{index}", width)
            for weight in idle.weights:
                weight.trainable = weight.trainable and weight.kind != "adapter"
            t.weights += idle.weights

    def _pair(self, t: Tape, x: Value, path: str, width: Size) -> Value:
        low = linear(t, x, f"{path}.0", self.rank, kind=self.kind)
        return linear(t, low, f"{path}.1", width, kind=self.kind)


class SharedAttention(GroupedQueryAttention):
    """Attention over the hidden states joined with the embeddings, which are twice as wide."""

    use: Use

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        with t.scope(self.scope) as frame:
            frame.local(x)
            kv, dense = self.kv_heads, self.dense_gradients(t, x, shared)
            heads = (a, kv, kv)
            made = [self._projected(t, x, i, count) for i, count in enumerate(heads)]
            if self.use.attends_adapted:
                frame.local(*made)
                for i, name in enumerate(("linear_q", "linear_k", "linear_v")):
                    frame.release(made[i])
                    made[i] = self.use.added(t, x, made[i], name, 2 * h)
                    frame.local(made[i])
                frame.release(*made)
                for name in ("linear_q", "linear_k", "linear_v"):
                    self.use.declare(t, name, 2 * h, 2 * h)
            q, key, value = (
                split_heads(t, one, count, copies=dense)
                for one, count in zip(made, heads, strict=True)
            )
            return self.finish(t, frame, q, key, value, shared)


class SharedMlp(Record):
    """down(act(gate) * up), gate and up by one linear beside the layer's own pair."""

    activation: str
    bias: bool
    use: Use

    def record(self, t: Tape, x: Value) -> Value:
        """Feed-forward of x."""
        with t.scope("feed_forward") as frame:
            frame.local(x)
            both = linear(t, x, "gate_up_proj", 2 * f, bias=self.bias, kind=self.use.kind)
            both = self.use.added(t, x, both, "gate_up_proj", 2 * f)
            self.use.declare(t, "gate_up_proj", h, 2 * f)
            gate, up = chunk(t, both, (f, f))
            frame.local(both)
            product = mul(t, activate(t, gate, self.activation), up)
            return linear(t, product, "down_proj", h, bias=self.bias, kind=self.use.kind)


class Zamba2Layer(Part):
    """residual + mixer(norm(residual + what the shared block gives, if there is one))."""

    mixer: Mamba2Mixer
    norm: Norm = Norm()
    attention: SharedAttention | None = None
    mlp: SharedMlp | None = None
    place: str = ""
    """Its number, which its shared weights are named by."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        own = self.attention.cached if self.attention is not None else ()
        return (*self.mixer.cached, *own)

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if self.attention is None:
            return self._mamba(t, x, None)
        with t.scope(self.place) as frame:
            frame.local(x)
            given = linear(t, self._shared(t, x, shared), "linear", h)
            frame.local(given)
            with t.scope("mamba_decoder"):
                return self._mamba(t, x, given)

    def _mamba(self, t: Tape, x: Value, given: Value | None) -> Value:
        with t.scope() as frame:
            frame.local(x)
            mixed = x if given is None else add(t, x, given)
            frame.local(mixed)
            normed = self.norm.record(t, mixed, "input_layernorm")
            frame.release(mixed)
            frame.local(normed)
            out = self.mixer.record(t, normed, shared={})
            frame.release(normed)
            return add(t, x, out)

    def _shared(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        assert self.attention is not None and self.mlp is not None
        owner, before = self.attention.use.owner, len(t.weights)
        with t.scope("shared_transformer") as frame:
            take_casts(t, shared, owner)
            joint = concatenate(t, (x, shared[ORIGINAL]), (b, s, 2 * h))
            frame.local(joint)
            normed = self.norm.record(t, joint, "input_layernorm")
            frame.release(joint)
            out = self.attention.record(t, normed, shared)
            frame.local(out)
            normed = self.norm.record(t, out, "pre_ff_layernorm")
            frame.release(out)
            made = self.mlp.record(t, normed)
            path = t.module
        for weight in t.weights[before:] if owner else ():
            if weight.kind != "adapter":  # what PEFT adds to a module is the layer's own
                tie(weight, path, owner)
        share_casts(t, shared, t.weights[before:])
        return made
