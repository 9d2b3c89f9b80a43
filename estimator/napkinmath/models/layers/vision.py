"""Vision towers: patch embeddings with a class token, and pre-norm layers over patches (ViT)."""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.encoder import BidirectionalAttention
from napkinmath.models.layers.mlp import activate
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, dropout
from napkinmath.ops.index import concatenate, input_leaf, model_input
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.ir.recording import RecordingPolicy


class ImageEntrance(Part):
    """What a classifier's images go through first."""

    image: tuple[int, int]
    """(height, width) in pixels."""
    channels: int
    width: int

    @property
    def length(self) -> int:
        """Tokens that an image becomes; 0 where it is no sequence."""
        return 0

    def labelled_pixels(self, t: Tape, shared: dict[str, Value], dtype: DType) -> Value:
        """The pixels of a batch, and a label of each image."""
        axes = (b, self.channels, *self.image)
        pixels = shared["pixel values"] = model_input(t, "pixel values", axes, dtype)
        shared["labels"] = model_input(t, "labels", (b,), INT64)
        return pixels


class PatchEmbedding(ImageEntrance):
    """Patches of an image through a convolution, a class token in front, learned positions, dropout
    (ViTEmbeddings)."""

    patch: tuple[int, int]
    dropout: float = 0.0

    @property
    def length(self) -> int:
        """Patches and the class token."""
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1]) + 1

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return policy.pixels_require_grad

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        token = t.weight("cls_token", (1, 1, self.width)).value
        positions = t.weight("position_embeddings", (1, self.length, self.width)).value
        pixels = self.labelled_pixels(t, shared, token.dtype)
        patches = (b, self.length - 1, self.width)
        with t.scope("patch_embeddings"):
            rows = patch_projection(
                t, pixels, "projection", patches, self.patch, self.channels, self.width
            )
            if self.output_needs_grad(t.policy):
                rows = input_leaf(t, rows)
        first = t.view(token, (b, 1, self.width), "expand", copies_gradient=True)
        both = concatenate(t, (first, rows), (b, self.length, self.width))
        return dropout(t, add_broadcast(t, both, positions), self.dropout)


class VisionLayer(Part):
    """Residual + attention(norm), residual + feed-forward(norm) (ViTLayer)."""

    attention: BidirectionalAttention
    width: int
    inner: int
    activation: str = "gelu"
    dropout: float = 0.0
    names: tuple[str, str] = ("layernorm_before", "layernorm_after")
    scope: str = "attention"
    output: str = "o_proj"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            normed = layer_norm(t, x, name=self.names[0])
            frame.local(normed)
            with t.scope(self.scope):
                attended = linear(
                    t, self.attention.record(t, normed), self.output, self.width, bias=True
                )
            frame.release(normed)
            middle = add(t, dropout(t, attended, self.dropout), x)
            frame.release(x)
            normed = layer_norm(t, middle, name=self.names[1])
            frame.local(middle, normed)
            with t.scope("mlp"):
                wide = activate(t, linear(t, normed, "fc1", self.inner, bias=True), self.activation)
                out = linear(t, wide, "fc2", self.width, bias=True)
            frame.release(normed)
            return add(t, dropout(t, out, self.dropout), middle)
