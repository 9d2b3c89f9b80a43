"""BLIP-2: a tower whose attention has one projection, and the Q-Former, which reads its states
through a few trained queries.

Source: transformers 5.23 models/blip_2/modeling_blip_2.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.config.train_config import Attention
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.vision_towers import Patches
from napkinmath.ops.attention import sdpa
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, cast, dropout
from napkinmath.ops.index import concatenate, input_leaf, model_input, slice_of
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm
from napkinmath.ops.whole_scores import eager_attention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.recording import RecordingPolicy

STATES = "states of the tower"
SEEN = "states of the tower in the queries' type"
WHOLE = "unquantized linear"  # _keep_in_fp32_modules: quantizers leave the Q-Former whole


class BlipPatches(Patches):
    """Patches behind a class token, learned positions as one parameter; the whole module is what
    transformers hooks as an input embedding (Blip2VisionEmbeddings)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        if not t.policy.config.batch.images:
            raise InputError(
                "the forward of a blip-2 takes an image with every text; give --images 1"
            )
        images, length = self.tower_axes(t)
        side = self.pictures.side
        shape = (images, self.channels, side, side)
        given = shared["pixel values"] = model_input(t, "pixel values", shape, FP32)
        pixels = cast(t, given, t.policy.compute_dtype)
        with t.scope("embeddings") as frame:
            token = t.weight("class_embedding", (1, 1, self.width)).value
            places = t.weight("position_embedding", (1, length + 1, self.width)).value
            rows = (images, length, self.width)
            patches = patch_projection(
                t,
                pixels,
                "patch_embedding",
                rows,
                self.patch,
                self.channels,
                self.width,
                bias=True,
            )
            frame.local(patches)
            first = t.view(token, (images, 1, self.width), "expand", copies_gradient=True)
            out = concatenate(t, (first, patches), (images, length + 1, self.width))
            frame.local(out)
            return input_leaf(t, add_broadcast(t, out, places), of_pixels=True)

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return policy.pixels_require_grad


class BlipAttention(Record):
    """Queries, keys and values as slices of one projection, softmax in the model's type
    (Blip2Attention)."""

    heads: int
    size: int
    bias: bool = True
    dropout: float = 0.0

    def record(self, t: Tape, x: Value, shared: dict[str, Value]) -> Value:
        """Attention over x of axes (images, patches, width), before the output projection."""
        rows, length, width = x.axes
        with t.scope() as frame:
            frame.local(x)
            whole = linear(t, x, "qkv", 3 * self.heads * self.size, bias=self.bias)
            frame.local(whole)
            axes = (rows, self.heads, length, self.size)
            q, k, v = (slice_of(t, whole, axes) for _ in range(3))
            frame.local(q, k, v)
            if t.policy.config.attention is Attention.EAGER:
                out = eager_attention(
                    t, q, k, v, groups=1, mask=None, dropout_p=self.dropout, fp32_softmax=False
                )
            else:
                out = sdpa(t, q, k, v, groups=1, causal=False, dropout_p=self.dropout)
            return t.view(out, (rows, length, width))


class Queries(Part):
    """The trained queries, the same for each image, behind a norm (Blip2QFormerModel)."""

    count: int
    width: int
    dropout: float

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, *_ = shared[STATES].axes
        tokens = t.weight("query_tokens", (1, self.count, self.width)).value
        axes = (images, self.count, self.width)
        rows = t.view(tokens, axes, "expand", copies_gradient=True)
        with t.scope("qformer"):
            if shared[STATES].dtype is not rows.dtype:
                shared[SEEN] = cast(t, shared[STATES], rows.dtype)
            return dropout(t, layer_norm(t, rows, name="layernorm"), self.dropout)

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return False


class QFormerLayer(Part):
    """Attention of the queries to each other, in some layers to the tower's states, and a
    feed-forward, a residual and a norm after each (Blip2QFormerLayer)."""

    width: int
    inner: int
    heads: int
    across: bool = False
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            out = self._attended(t, x, x, "attention")
            frame.local(out)
            if self.across:
                out = self._attended(t, out, shared.get(SEEN, shared[STATES]), "crossattention")
                frame.local(out)
            with t.scope("intermediate_query"):
                wide = activate(t, self._dense(t, out, "dense", self.inner), self.activation)
            frame.local(wide)
            with t.scope("output_query"):
                return self._output(t, wide, out)

    def _attended(self, t: Tape, x: Value, source: Value, name: str) -> Value:
        with t.scope(name) as frame:
            frame.local(x)
            with t.scope("attention") as inside:
                inside.local(x)
                q, k, v = (
                    self._heads(t, given, one)
                    for given, one in ((x, "query"), (source, "key"), (source, "value"))
                )
                inside.local(q, k, v)
                if t.policy.config.attention is Attention.EAGER:
                    out = eager_attention(
                        t,
                        q,
                        k,
                        v,
                        groups=1,
                        mask=None,
                        dropout_p=self.attention_dropout,
                        fp32_softmax=False,
                    )
                else:
                    out = sdpa(t, q, k, v, groups=1, causal=False, dropout_p=self.attention_dropout)
                out = t.view(out, x.axes)
            frame.local(out)
            with t.scope("output"):
                return self._output(t, out, x)

    def _heads(self, t: Tape, x: Value, name: str) -> Value:
        rows, length, _ = x.axes
        made = self._dense(t, x, name, self.width)
        return t.view(made, (rows, self.heads, length, self.width // self.heads))

    def _output(self, t: Tape, x: Value, residual: Value) -> Value:
        with t.scope() as frame:
            dropped = dropout(t, self._dense(t, x, "dense", self.width), self.dropout)
            frame.local(dropped)
            return layer_norm(t, add(t, dropped, residual), name="LayerNorm")

    def _dense(self, t: Tape, x: Value, name: str, outputs: int) -> Value:
        return linear(t, x, name, outputs, bias=True, kind=WHOLE)
