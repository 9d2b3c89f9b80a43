"""DeepSeek's multi-head latent attention: keys and values expanded from one compressed row a
token."""

from __future__ import annotations

from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.symbols import a, b, h, s
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.attention import scaled_by_position
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.attention import fused
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import chunk, concatenate, rotary
from napkinmath.ops.matmul import linear
from napkinmath.ops.rotary import rotary_complex, rotary_pairs
from napkinmath.ops.whole_scores import eager_attention, math_attention


class LatentAttention(Record):
    """Queries (optionally through a low rank), one latent row for keys and values, a rotary part
    shared by all heads.

    The head of q and k (`plain` + `turned`) is wider than that of v, so flash cannot run it: SDPA
    takes its memory-efficient kernel. Source: transformers 5.23
    models/deepseek_v3/modeling_deepseek_v3.py DeepseekV3Attention,
    models/deepseek_v2/modeling_deepseek_v2.py DeepseekV2Attention.
    """

    plain: int
    """qk_nope_head_dim: the part of a head without rotary embedding."""
    turned: int
    """qk_rope_head_dim."""
    value: int
    """v_head_dim."""
    kv_rank: int
    q_rank: int = 0
    """0: one full-rank query projection."""
    form: str = "pairs"
    """Rotary form: pairs (interleaved), halves (rotate_half) or complex (DeepSeek V2)."""
    bias: bool = False
    norm: Norm = Norm()
    dropout: float = 0.0
    scaled_by_position: bool = False
    """Queries are multiplied by a number for each position (Mistral 4)."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The latent row and the turned part of the key, one of each a token for all heads."""
        rows = (("latent", self.kv_rank), ("turned key", self.turned))
        return tuple(Cached(name=name, axes=(1, width)) for name, width in rows)

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (b, s, h)."""
        head = self.plain + self.turned
        with t.scope("self_attn") as frame:
            if t.policy.tensor is not None:
                x = t.policy.tensor.whole_sequence(t, x)
            frame.local(x)
            resident = self._low_queries(t, x) if self.q_rank else x
            name = "q_b_proj" if self.q_rank else "q_proj"
            q = t.view(
                t.view(linear(t, resident, name, a * head), (b, s, a, head)),
                (b, a, s, head),
                copies_gradient=True,
            )
            q_plain, q_turned = chunk(t, q, (self.plain, self.turned))
            latent = linear(t, x, "kv_a_proj_with_mqa", self.kv_rank + self.turned, bias=self.bias)
            frame.local(q, latent)
            rows, k_turned = chunk(t, latent, (self.kv_rank, self.turned))
            normed = self.norm.record(t, rows, "kv_a_layernorm", self.kv_rank)
            k_turned = t.view(k_turned, (b, 1, s, self.turned))
            q_turned, k_turned = self._rotate(t, q_turned, k_turned, shared)
            frame.local(normed, q_turned, k_turned)
            query = concatenate(t, (q_plain, q_turned), (b, a, s, head))
            if self.scaled_by_position:
                query = scaled_by_position(t, query)
            frame.local(query)
            key, value = self._expand(t, normed, k_turned, head)
            frame.local(key, value)
            out = self._attend(t, query, key, value, self._seen(t, frame, x, resident, shared))
            frame.local(out)
            return linear(t, t.view(out, (b, s, a * self.value)), "o_proj", h, bias=self.bias)

    def _low_queries(self, t: Tape, x: Value) -> Value:
        low = linear(t, x, "q_a_proj", self.q_rank, bias=self.bias)
        return self.norm.record(t, low, "q_a_layernorm", self.q_rank)

    def _seen(
        self, t: Tape, frame: Scope, x: Value, resident: Value, shared: dict[str, Value]
    ) -> Value | None:
        """The mask of which keys a query sees; None where causality is a flag. `resident` is what
        queries are projected from."""
        return shared.get("mask")

    def _rotate(
        self, t: Tape, q: Value, key: Value, shared: dict[str, Value]
    ) -> tuple[Value, Value]:
        with t.scope() as frame:
            frame.local(q, key)
            if self.form == "complex":
                return rotary_complex(t, q, key, shared["rotary"])
            turn = rotary_pairs if self.form == "pairs" else rotary
            turned = turn(t, q, shared["cos"], shared["sin"])
            frame.local(turned)
            return turned, turn(t, key, shared["cos"], shared["sin"])

    def _expand(self, t: Tape, latent: Value, turned: Value, head: int) -> tuple[Value, Value]:
        with t.scope() as frame:
            frame.local(latent, turned)
            width = self.plain + self.value
            both = t.view(
                linear(t, t.view(latent, (b, 1, s, self.kv_rank)), "kv_b_proj", a * width),
                (b, s, a, width),
            )
            both = t.view(both, (b, a, s, width), copies_gradient=True)
            frame.local(both)
            plain, value = chunk(t, both, (self.plain, self.value), "split")
            every = t.view(turned, (b, a, s, self.turned), "expand", copies_gradient=True)
            return _filled(t, plain, every, (b, a, s, head)), value

    def _attend(self, t: Tape, q: Value, key: Value, value: Value, mask: Value | None) -> Value:
        if t.policy.config.attention is Attention.EAGER:
            return eager_attention(t, q, key, value, groups=1, mask=mask, dropout_p=self.dropout)
        with t.scope():
            q, key, value = (cast(t, x, t.policy.attended_dtype(x.dtype)) for x in (q, key, value))
            kernel = t.policy.sdpa_kernel(
                q.dtype, head_size=t.known(q.axes[-1]), masked=mask is not None, grouped=False
            )
            if kernel == "math":
                return math_attention(t, q, key, value, groups=1, mask=mask, dropout_p=self.dropout)
            taken = "efficient" if kernel == "flash" else kernel
            return fused(t, taken, q, key, value, causal=True, window=None)


def _filled(t: Tape, first: Value, second: Value, axes: tuple[Size, ...]) -> Value:
    """A new tensor filled by two copies into its slices; backward copies the whole gradient and the
    slice, once for each (CopySlices)."""
    tensor = t.tensor("keys", axes, first.dtype)
    out = Value(tensor, axes, first.dtype, first.requires_grad or second.requires_grad)
    backward: list[tuple[str, Tensor]] = []
    gradients: list[Gradient] = []
    for part in (second, first):
        whole = t.tensor("gradient before the copy", axes, first.dtype, Role.WORKSPACE)
        backward.append((ALLOC, whole))
        if part.requires_grad:
            made = t.gradient_of(part)
            gradients.append(Gradient(part, made))
            backward.append((ALLOC, made))
        backward.append((FREE, whole))
    cost = Move(2 * traffic(out), 2)
    t.append(
        "fill keys",
        (first, second),
        (out,),
        forward=((ALLOC, tensor),),
        costs=(cost,),
        backward=tuple(backward),
        gradients=gradients,
        backward_costs=(cost, cost),
    )  # type: ignore[arg-type]
    return out
