"""Decoder layers: attention and feed-forward one after the other, or side by side, with norms
before or after."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.elementwise import add, cast, dropout, scale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from napkinmath.ir.cache import Cached

    class Sublayer(Protocol):
        """Attention or feed-forward: reads the normed hidden states, returns what is added to the
        residual."""

        def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value: ...


class AttentionLayer(Part):
    """A layer that takes the virtual tokens, and caches the tensors, that its attention does."""

    attention: Sublayer

    @property
    def virtual_tokens(self) -> str:
        return getattr(self.attention, "virtual_tokens", "")

    @property
    def cached(self) -> tuple[Cached, ...]:
        return getattr(self.attention, "cached", ())

    @property
    def needs_whole_sequence(self) -> bool:
        return getattr(self.attention, "needs_whole_sequence", False)


class DecoderLayer(AttentionLayer):
    """residual + attention(norm), then residual + feed-forward(norm), as LlamaDecoderLayer.forward
    and its kin."""

    mlp: Sublayer
    norm: Norm = Norm()
    names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Norms before attention and feed-forward; '' for none."""
    post_names: tuple[str, str] = ("", "")
    """Norms after attention and feed-forward, before the residual is added (OLMo 2, Gemma 2)."""
    scaled: bool = False
    """What is added to the residual is multiplied by a number first (Granite, MiniCPM)."""
    dropout: float = 0.0
    """Dropout of what is added to the residual."""
    holds_attention: bool = False
    """Names of their own keep the first norm's and the attention's output alive to the end
    (StableLM, Falcon)."""

    norms_last: bool = False
    """Each norm follows the residual's sum (OPT 350M)."""
    names_outputs: bool = False
    """Norm and sublayer outputs are alive under names of their own as the residual is added, the
    attention's to the end (GPT-2, Llama 4)."""
    names_attention: bool = True
    """With `names_outputs`: the attention's output has a name (not where the attention adds the
    residual itself, BLOOM)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        middle = self._residual(t, x, self.attention, 0, shared)
        return self._residual(t, middle, self.mlp, 1, shared)

    def _residual(
        self, t: Tape, x: Value, part: Sublayer, which: int, shared: dict[str, Value]
    ) -> Value:
        with t.scope() as frame:
            frame.local(x)
            normed = (
                self.norm.record(t, x, self.names[which])
                if self.names[which] and not self.norms_last
                else x
            )
            out = part.record(t, normed, shared)
            if self.holds_attention and not which:
                t.keep(normed, out)
            if self.post_names[which]:
                with t.scope() as inner:
                    inner.local(out)
                    out = self.norm.record(t, out, self.post_names[which])
            out = dropout(t, out, self.dropout)
            if self.names_outputs:
                frame.local(normed)
                if self.names_attention:
                    frame.local(out)
                    if not which:
                        t.keep(out)
            if self.scaled:
                frame.local(out)
                out = scale(t, out)
            total = add(t, x, out)
            return self.norm.record(t, total, self.names[which]) if self.norms_last else total


class ParallelLayer(AttentionLayer):
    """residual + attention(norm) + feed-forward(norm), both reading the same input (GPT-J, Phi,
    Cohere, GPT-NeoX)."""

    mlp: Sublayer
    norm: Norm = Norm()
    names: tuple[str, ...] = ("input_layernorm",)
    """One norm for both, or one each for attention and feed-forward."""
    residual_last: bool = False
    """attention + feed-forward + residual, rather than residual + attention + feed-forward."""
    mlp_first: bool = False
    """The norm's output is not held under a name: norms are made in place of the arguments
    (GPT-NeoX)."""
    dropout: float = 0.0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            normed = self.norm.record(t, x, self.names[0])
            if not self.mlp_first:
                frame.local(normed)
            attended = dropout(t, self.attention.record(t, normed, shared), self.dropout)
            frame.local(attended)
            other = self.norm.record(t, x, self.names[1]) if len(self.names) > 1 else normed
            fed = dropout(t, self.mlp.record(t, other, shared), self.dropout)
            frame.local(fed)
            if self.residual_last:
                return add(t, add(t, attended, fed), x)
            return add(t, add(t, x, attended), fed)


class MixerLayer(Part):
    """residual + mixer(norm), the residual in fp32 where the config says so (MambaBlock)."""

    mixer: Sublayer
    norm: Norm = Norm()
    name: str = "norm"
    residual_in_fp32: bool = False

    @property
    def cached(self) -> tuple[Cached, ...]:
        return getattr(self.mixer, "cached", ())

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            normed = self.norm.record(t, cast(t, x, t.policy.parameter_dtype("norm")), self.name)
            residual = cast(t, x, FP32) if self.residual_in_fp32 else x
            frame.local(residual)
            return add(t, residual, self.mixer.record(t, normed, shared))
