"""The tower of Kimi K2.5: positions of a grid sampled bicubically, frames averaged in squares.

Source: transformers 5.23 models/kimi_k25/modeling_kimi_k25.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.vision_towers import Patches
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, cast
from napkinmath.ops.index import constant, input_leaf, model_input

BICUBIC_TAPS = 16  # rows of the grid that a place is sampled from


class BicubicPatches(Patches):
    """Patches with a place that is sampled from a learned grid, and the number of their frame
    (Kimi_K25VisionPatchEmbed)."""

    frames: int
    """Rows of the table of frames, a first one of zeros among them."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        images, length = self.tower_axes(t)
        # the class casts nothing, so that a caller without autocast has to
        dtype = t.policy.compute_dtype
        given = shared["pixel values"] = model_input(
            t, "pixel values", (images, length, self.inputs), FP32 if t.policy.autocast else dtype
        )
        pixels = cast(t, given, dtype)
        rows = (images, length, self.width)
        with t.scope("patch_embed") as frame:
            out = patch_projection(
                t, pixels, "proj", rows, self.patch, self.channels, self.width, bias=True
            )
            if self.leaf:
                out = input_leaf(t, out)
            frame.local(out)
            with t.scope("pos_emb"):
                out = add(t, out, self._places(t, images, length))
        for name in ("vision cos", "vision sin"):
            shared[name] = constant(t, name, (images * length, self.rotary_size), FP32)
        return out

    def _places(self, t: Tape, images: Size, length: Size) -> Value:
        count = images * length
        grid = t.weight("position_embeddings", (self.positions, self.width)).value
        # made in fp32 by the class, whatever the model is loaded in
        axes_of_frames = (self.frames, self.width)
        t.weight("time_position_embeddings", axes_of_frames, dtype=FP32, buffer=True)
        with t.scope() as frame:
            taps = (count, BICUBIC_TAPS)
            places = constant(t, "nearest places", taps, INT64)
            weights = constant(t, "weights of places", taps, FP32)
            narrow = cast(t, weights, grid.dtype)
            bags = constant(t, "bag of each place", (count * BICUBIC_TAPS,), INT64)
            frame.local(places, weights, narrow, bags)
            cost = (
                traffic(places, narrow)
                + (BICUBIC_TAPS + 1) * count * self.width * grid.dtype.bits // 8
            )
            sampled = t.op(
                "embedding_bag",
                (grid,),
                (images, length, self.width),
                grid.dtype,
                saves=(grid, places, narrow, bags),
                gradients=(LIKE,),
                costs=(Move(cost),),
                backward_costs=(Move(cost + traffic(grid), 2),),
            )
            frame.local(sampled)
            numbers = constant(t, "numbers of frames", (count,), INT64)
            offsets = constant(t, "rows of frames", sampled.axes, FP32)
            frame.local(numbers, offsets)
            whole = t.op(
                "add",
                (sampled, offsets),
                sampled.axes,
                FP32,
                gradients=(LIKE, None),
                costs=(Move(traffic(sampled) + 2 * traffic(offsets)),),
                backward_costs=(Move(traffic(sampled, offsets)),),
            )
            frame.local(whole)
            return cast(t, whole, grid.dtype)


class FrameMean(Part):
    """The norm at the end of the tower, then squares of patches gathered and averaged over frames:
    of images, one each."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        normed = Norm(kind=NormKind.LAYER).record(t, x, "final_layernorm")
        with t.scope() as frame:
            frame.local(normed)
            images, length, _ = x.axes
            places = constant(t, "squares of patches", (images * length,), INT64)
            gathered = t.op(
                "index",
                (normed,),
                normed.axes,
                normed.dtype,
                saves=(places,),
                gradients=(LIKE,),
                costs=(Move(2 * traffic(normed)),),
                backward_costs=(Move(3 * traffic(normed), 2),),
            )
            frame.local(gathered, places)
            return t.op(
                "mean",
                (gathered,),
                normed.axes,
                normed.dtype,
                gradients=(LIKE,),
                costs=(Move(2 * traffic(normed)),),
                backward_costs=(Move(2 * traffic(normed)),),
            )
