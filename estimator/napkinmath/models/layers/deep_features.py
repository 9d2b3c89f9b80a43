"""Qwen 3 VL: features of inner depths of the tower, added to the image rows of the first text layers'
outputs.

Source: transformers 5.23 models/qwen3_vl Qwen3VLVisionModel.forward,
Qwen3VLTextModel._deepstack_process.
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.projectors import MlpProjector
from napkinmath.models.layers.vision_towers import (
    DEEP,
)
from napkinmath.ops.elementwise import add, copy
from napkinmath.ops.index import constant
from napkinmath.ops.nodes import node, same_storage


class DeepFeatures(Part):
    """A merger of an inner layer's hidden states, which go on as they are."""

    merger: MlpProjector
    index: int = 0

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        merged = self.merger.record(t, x, shared)
        assert merged is not None
        shared[f"{DEEP} {self.index}"] = merged
        return t.view(x, x.axes)


class AddDeepFeatures(Part):
    """A copy of the hidden states in which image rows have features of an inner depth added."""

    index: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        features = shared.get(f"all {DEEP} {self.index}")
        if x is None or features is None:  # a batch of text
            return x
        with t.scope() as frame:
            frame.local(x)
            cloned = copy(t, x)
            frame.local(cloned)
            images, tokens, _ = features.axes
            places = constant(t, "places of image rows", (2, images * tokens), INT64)
            chosen = t.op(
                "index",
                (cloned,),
                features.axes,
                x.dtype,
                saves=(places,),
                gradients=(LIKE,),
                costs=(Move(2 * traffic(features)),),
                backward_costs=(Move(traffic(x, features), 2),),
            )
            total = add(t, chosen, features)
            frame.local(chosen, total, places)
            out = same_storage(cloned)
            out.requires_grad = cloned.requires_grad or total.requires_grad
            node(
                t,
                "index_put_",
                (cloned, total),
                (out,),
                saves=(places.tensor,),
                costs=(Move(2 * traffic(features)),),
                backward_costs=(Move(2 * traffic(x), 2),),
            )
            return out
