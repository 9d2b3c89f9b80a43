"""SigLIP 2's tower of pictures of their own shapes, padded to one number of patches, and LFM2-VL's
projector.

Source: transformers 5.23 models/siglip2, models/lfm2_vl.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, INT32, INT64
from napkinmath.config.train_config import Attention
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import BLOCKS, Patches
from napkinmath.ops.elementwise import add, cast, copy
from napkinmath.ops.index import (
    concatenate,
    constant,
    input_leaf,
    model_input,
    slice_of,
    split_rows,
)
from napkinmath.ops.matmul import linear
from napkinmath.ops.nodes import made, passed, same_storage


class NaflexPatches(Patches):
    """Patches through a linear; the table of positions is scaled to each picture's shape
    (Siglip2VisionEmbeddings)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        pictures, length = self.tower_axes(t)
        given = shared["pixel values"] = model_input(
            t, "pixel values", (pictures, length, self.inputs), FP32
        )
        for name, axes, dtype in (
            ("mask of patches", (pictures, length), INT32),
            ("shapes of pictures", (pictures, 2), INT64),
        ):
            shared[name] = model_input(t, name, axes, dtype)
        with t.scope("embeddings") as frame:
            pixels = cast(t, given, t.policy.compute_dtype)
            frame.local(pixels)
            out = _leaf(t, linear(t, pixels, "patch_embedding", self.width, bias=True))
            frame.local(out)
            out = add(t, out, self._positions(t, out))
        self.hold(t, out, shared)
        if self._padded(t):
            eager = t.policy.config.attention is Attention.EAGER
            dtype = out.dtype if eager else BOOL
            shared[BLOCKS] = constant(t, "mask of padding", (pictures, 1, length, length), dtype)
        return out

    def _padded(self, t: Tape) -> bool:
        """Whether a picture has fewer patches than it is padded to."""
        picture = self.pictures.of(t.policy.config.batch)
        return picture.rows * picture.columns < picture.patches

    def _positions(self, t: Tape, like: Value) -> Value:
        table = t.weight("position_embedding.weight", (self.positions, self.width)).value
        scaled = constant(t, "positions of a picture", like.axes[1:], table.dtype)
        out = t.op(
            "upsample_bilinear",
            (table,),
            like.axes,
            table.dtype,
            gradients=(LIKE,),
            costs=(Move(2 * traffic(like)),),
            backward_costs=(Move(4 * traffic(like), 4),),
        )
        t.touch(scaled.tensor)
        return out


def _leaf(t: Tape, x: Value) -> Value:
    """The output of patches' linear as a leaf. Under an adapter that is what the base gives, which
    the hook of `enable_input_require_grads` stays on."""
    if not (x.requires_grad and t.policy.inputs_require_grad):
        return input_leaf(t, x)
    base, out = t.tensor("output of the base", x.axes, x.dtype), same_storage(x)
    t.append("requires_grad_", (x,), (out,), forward=made(base), saves=(base,), gradients=passed(x))
    t.touch(base)
    return out


class UnshuffledProjector(Part):
    """Without padding, squares of patches folded into rows, a norm where the config has one, two
    linears (Lfm2VlMultiModalProjector)."""

    tokens: Patches
    merged: int
    inner: int
    outputs: int
    bias: bool = True
    normed: bool = True
    activation: str = "gelu"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        width = x.axes[-1]
        picture = self.tokens.pictures.of(t.policy.config.batch)
        images = x.axes[0] // picture.tiles
        with t.scope("multi_modal_projector") as frame:
            real = slice_of(t, x, (images, picture.tokens * self.merged, width))
            folded = copy(t, real, (images, picture.tokens, width * self.merged))
            if self.normed:
                folded = Norm(kind=NormKind.LAYER).record(t, folded, "layer_norm")
            frame.local(folded)
            wide = linear(t, folded, "linear_1", self.inner, bias=self.bias)
            wide = activate(t, wide, self.activation)
            out = linear(t, wide, "linear_2", self.outputs, bias=self.bias)
            frame.local(wide, out)
        return concatenate(t, split_rows(t, out, (images,)), out.axes)
