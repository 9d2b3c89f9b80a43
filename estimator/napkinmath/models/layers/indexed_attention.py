"""DeepSeek's sparse attention: beside latent attention, an indexer that scores all keys for each
query and masks out all but the best.

transformers computes whole scores and masks them, so that the attention itself is dense. Sources:
transformers 5.23 models/deepseek_v32/modeling_deepseek_v32.py DeepseekV32Indexer,
models/glm_moe_dsa/modeling_glm_moe_dsa.py GlmMoeDsaIndexer.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT32, INT64
from napkinmath.base.expr import minimum
from napkinmath.config.train_config import Attention
from napkinmath.ir.cache import Cached
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import Scope, Tape
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.latent_attention import LatentAttention
from napkinmath.models.layers.masks import visible_positions
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import cast, scale, unary
from napkinmath.ops.index import concatenate, constant, rotary, slice_of
from napkinmath.ops.matmul import bmm, linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.rotary import rotary_pairs
from napkinmath.ops.routing import top_k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

KEPT_WHOLE = "unquantized linear"  # _keep_in_fp32_modules: quantizers leave the heads' weights


class MaskedEmbedding(TokenEmbedding):
    """An entrance whose layers have no form without a mask, for SDPA as bools."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        out = super().record(t, x, shared)
        if "mask" not in shared:
            shared["mask"] = Value(visible_positions(t, 0).tensor, (b, 1, s, s), BOOL)
        return out


class IndexedAttention(LatentAttention):
    """Latent attention over the keys that an indexer chooses, which learns nothing from the loss."""

    needs_whole_sequence: ClassVar[bool] = True
    index_heads: int
    index_size: int
    """Width of the indexer's heads."""
    chosen: int
    """Keys that each query sees at most."""
    pairs: bool = False
    """The indexer turns interleaved pairs (GLM) rather than halves (DeepSeek)."""
    hands_on: bool = False
    """The layer returns the chosen keys too (GLM)."""
    own: bool = True
    """It has an indexer; without one it sees the keys that the layer before chose (GLM 5.2)."""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The latent row, of which a query sees the chosen ones, and the indexer's key."""
        rows = tuple(row.replace(chosen=self.chosen) for row in super().cached)
        if not self.own:
            return rows
        key = Cached(name="indexer key", axes=(1, self.index_size), choosing_heads=self.index_heads)
        return (*rows, key)

    def _seen(
        self, t: Tape, frame: Scope, x: Value, resident: Value, shared: dict[str, Value]
    ) -> Value | None:
        if self.own:
            chosen = self._chosen(t, x, resident, shared)
            frame.local(chosen)
            if self.hands_on:
                t.hand_on(chosen)
        ones = constant(t, "no key chosen", (b, s, s), BOOL)
        places = constant(t, "chosen keys in int64", (b, s, minimum(s, self.chosen)), INT64)
        masked = constant(t, "keys not chosen", (b, s, s), BOOL)
        t.touch(ones.tensor, places.tensor)
        frame.local(masked)
        mask, axes = shared["mask"], (b, 1, s, s)
        t.touch(mask.tensor)
        if mask.dtype is not BOOL:
            return constant(t, "mask of the chosen keys", axes, mask.dtype)
        inverse = constant(t, "keys chosen", axes, BOOL)
        seen = constant(t, "mask of the chosen keys", axes, BOOL)
        t.touch(inverse.tensor)
        frame.local(seen)
        return seen

    def _attend(self, t: Tape, q: Value, key: Value, value: Value, mask: Value | None) -> Value:
        if t.policy.config.attention is Attention.EAGER:
            return super()._attend(t, q, key, value, mask)
        return sdpa(t, q, key, value, groups=1, mask=mask, causal=False, dropout_p=self.dropout)

    def _chosen(self, t: Tape, x: Value, resident: Value, shared: dict[str, Value]) -> Value:
        """The best keys of each query, of axes (b, s, chosen); `resident` is the normed low-rank
        query."""
        x, resident = t.without_graph(x, resident)
        with t.scope("indexer") as frame:
            frame.local(x, resident)
            scores, weights = self._scores(t, frame, x, resident, shared)
            summed = bmm(t, weights, scores, b * s, 1, s, self.index_heads, (b, s, s))
            frame.local(scores, weights)
            if shared["mask"].dtype is BOOL:
                inverse = constant(t, "masked keys", (b, s, s), BOOL)
                t.touch(inverse.tensor)
            known = constant(t, "masked scores", (b, s, s), summed.dtype)
            t.touch(summed.tensor)
            frame.local(known)
            values, places = top_k(t, known, minimum(s, self.chosen))
            narrow = cast(t, places, INT32)
            t.touch(values.tensor)
        t.records_no_graph = False
        return narrow

    def _scores(
        self, t: Tape, frame: Scope, x: Value, resident: Value, shared: dict[str, Value]
    ) -> tuple[Value, Value]:
        """What each head of the indexer gives each key, and each head's weight, in fp32."""
        heads, size = self.index_heads, self.index_size
        q = t.view(linear(t, resident, "wq_b", heads * size), (b, s, heads, size))
        key = layer_norm(t, linear(t, x, "wk", size), name="k_norm")
        frame.local(q, key)
        key = t.view(key, (b, s, 1, size))
        q, key = (
            self._indexer_turned(t, frame, q, shared),
            self._indexer_turned(t, frame, key, shared),
        )
        frame.local(q, key)
        scores = self._products(t, cast(t, q, FP32), cast(t, key, FP32))
        scores = unary(t, "relu", scale(t, scores))
        frame.local(scores)
        weights = scale(t, cast(t, linear(t, x, "weights_proj", heads, kind=KEPT_WHOLE), FP32))
        return scores, weights

    def _indexer_turned(self, t: Tape, frame: Scope, x: Value, shared: dict[str, Value]) -> Value:
        *rows, size = x.axes
        first = slice_of(t, x, (*rows, self.turned))
        turn = rotary_pairs if self.pairs else rotary
        turned = turn(t, first, shared["cos"], shared["sin"])
        frame.local(turned)
        return concatenate(t, (turned, slice_of(t, x, (*rows, size - self.turned))), x.axes)

    def _products(self, t: Tape, q: Value, key: Value) -> Value:
        """Every query's heads times every key: keys are copied for each query of a batch (matmul
        expands them over positions)."""
        heads, size = self.index_heads, self.index_size
        if t.policy.autocast is not None:  # before matmul expands them
            q, key = cast(t, q, t.policy.autocast), cast(t, key, t.policy.autocast)
        read = key
        if t.at_least("b", 2):
            read = constant(t, "keys for each query", (b, s, size, s), key.dtype)
        scores = bmm(t, q, read, b * s, heads, s, size, (b, s, heads, s))
        t.touch(key.tensor)
        return scores
