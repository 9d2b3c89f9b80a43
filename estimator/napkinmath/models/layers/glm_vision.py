"""The tower of GLM 4.1V: positions sampled from a table, a convolution that merges patches.

Source: transformers 5.23 models/glm4v/modeling_glm4v.py Glm4vVisionModel.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import PIXELS, Patches
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, cast, mul
from napkinmath.ops.images import convolution
from napkinmath.ops.index import constant, input_leaf, model_input
from napkinmath.ops.matmul import linear
from napkinmath.ops.norm import layer_norm


class SampledPatches(Patches):
    """Patches normed, then a learned table of positions that is sampled between its rows in fp32
    (Glm4vVisionEmbeddings)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, length = self.tower_axes(t)
        given = shared["pixel values"] = model_input(
            t, "pixel values", (images, length, self.inputs), FP32
        )
        shared[PIXELS] = pixels = cast(t, given, t.policy.compute_dtype)
        rows = (images, length, self.width)
        out = patch_projection(
            t, pixels, self.convolution, rows, self.patch, self.channels, self.width, bias=True
        )
        if self.leaf:
            out = input_leaf(t, out)
        out = Norm(kind=NormKind.RMS).record(t, out, "post_conv_layernorm")
        for name in ("vision cos", "vision sin"):
            shared[name] = constant(t, name, (images * length, self.rotary_size), FP32)
        with t.scope() as frame:
            frame.local(out)
            return add(t, out, self._sampled(t, rows))

    def _sampled(self, t: Tape, axes: tuple[object, ...]) -> Value:
        images, length, width = axes
        with t.scope("embeddings") as frame:
            with t.scope("position_embedding"):
                table = t.weight("weight", (self.positions, self.width), kind="embedding").value
            wide = cast(t, table, FP32)
            frame.local(wide)
            grid = constant(t, "places in the table", (images * length, 2), FP32)  # type: ignore[operator]
            sampled = t.op(
                "grid_sample",
                (wide,),
                (images, length, width),  # type: ignore[arg-type]
                FP32,
                saves=(wide, grid),
                gradients=(LIKE,),
                costs=(Move(traffic(grid) + 17 * traffic(wide)),),
                backward_costs=(Move(traffic(grid) + 17 * traffic(wide)),),
            )
            frame.local(sampled, grid)
            return cast(t, sampled, table.dtype)


class MergedPatches(Part):
    """A norm, and squares of patches made one row by a convolution (Glm4vVisionModel.downsample)."""

    merge: int
    outputs: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images, length, width = x.axes
        normed = Norm(kind=NormKind.RMS).record(t, x, "post_layernorm")
        places = length // self.merge**2
        squares = t.view(normed, (images * places, width, self.merge, self.merge), "permute")
        merged = convolution(
            t,
            squares,
            "downsample",
            self.outputs,
            kernel=self.merge,
            stride=self.merge,
            padded=False,
        )
        return t.view(merged, (images, places, self.outputs))


class GatedMerger(Part):
    """A linear, a norm, GELU, and a gated feed-forward (Glm4vVisionPatchMerger)."""

    width: int
    inner: int
    activation: str = "silu"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            normed = layer_norm(t, linear(t, x, "proj", self.width), name="post_projection_norm")
            hidden = activate(t, normed, "gelu")
            frame.local(hidden)
            wide = activate(t, linear(t, hidden, "gate_proj", self.inner), self.activation)
            wide = mul(t, wide, linear(t, hidden, "up_proj", self.inner))
            return linear(t, wide, "down_proj", self.width)
