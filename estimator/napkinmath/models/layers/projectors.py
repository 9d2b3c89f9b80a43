"""Projectors of vision-language models: features of a tower brought to the text's width.

Sources: transformers 5.23 models/llava, models/gemma3, models/mistral3, models/qwen2_vl,
models/paligemma.
"""

from __future__ import annotations

from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.pictures import Pictures
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.mlp import activate
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.ops.elementwise import copy, mul
from napkinmath.ops.images import interpolated
from napkinmath.ops.index import chunk, concatenate, slice_of, split_rows
from napkinmath.ops.matmul import linear


class MlpProjector(Part):
    """Image features into the text's width: optional norm, neighbouring patches merged into one
    row, two linears."""

    inputs: int
    outputs: int
    inner: int = 0
    """Width between the two linears; 0 is the output's."""
    bias: bool = True
    activation: str = "gelu"
    drop_first: bool = False
    """The class token is left out."""
    norm: Norm | None = None
    norm_name: str = "norm"
    norm_merged: bool = False
    """The norm runs over merged rows (Qwen 3 VL's deep features)."""
    merged: int = 1
    """Patches in a row after merging."""
    merger: str = ""
    """A linear that brings merged rows back to the tower's width (Mistral 3)."""
    pictures: Pictures | None = None
    """Whose patches make no whole squares at the edge, which are dropped."""
    linears: tuple[str, str] = ("linear_1", "linear_2")

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images, length, _ = x.axes
        with t.scope() as frame:
            frame.local(x)
            if self.drop_first:
                length = length - 1
                x = slice_of(t, x, (images, length, self.inputs))
            merged = length // self.merged
            if self.pictures is not None:
                picture = self.pictures.of(t.policy.config.batch)
                merged = length // picture.patches * picture.tokens
            rows = (images, merged, self.inputs * self.merged)
            if self.norm is not None and not self.norm_merged:
                x = self.norm.record(t, x, self.norm_name)
            if self.merged > 1:
                x = copy(t, x, rows) if self.merger else t.view(x, rows)
            if self.norm is not None and self.norm_merged:
                x = self.norm.record(t, x, self.norm_name)
            if self.merger:
                x = linear(t, x, self.merger, self.inputs)
            frame.local(x)
            wide = activate(
                t,
                linear(t, x, self.linears[0], self.inner or self.outputs, bias=self.bias),
                self.activation,
            )
            return linear(t, wide, self.linears[1], self.outputs, bias=self.bias)


class GridProjector(Part):
    """Image by image: a norm, squares of patches laid side by side in a copy, two linears (Paddle's
    OCR)."""

    merge: int
    outputs: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images, length, width = x.axes
        inner = width * self.merge**2
        with t.scope() as frame:
            frame.local(x)
            x = Norm(kind=NormKind.LAYER).record(t, x, "pre_norm")
            x = copy(t, x, (images, length // self.merge**2, inner))
            wide = activate(t, linear(t, x, "linear_1", inner, bias=True), "gelu")
            out = linear(t, wide, "linear_2", self.outputs, bias=True)
            frame.local(wide, out)
            joined = concatenate(t, split_rows(t, out, (images,)), out.axes)
            return concatenate(t, split_rows(t, joined, (images,)), out.axes)


class ResampledProjector(Part):
    """Image by image sampled anew, at the size that it has; two linears (VideoLLaMA 3)."""

    outputs: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope("vision_model") as frame:
            (split,) = split_rows(t, x, (x.axes[0],))
            frame.local(x, split)
            sampled = interpolated(t, split, x.axes)
            frame.local(sampled)
            x = concatenate(t, (sampled,), x.axes)
        with t.scope("projector.readout") as frame:
            frame.local(x)
            wide = activate(t, linear(t, x, "0", self.outputs, bias=True), "gelu")
            out = linear(t, wide, "2", self.outputs, bias=True)
            frame.local(wide, out)
            return concatenate(t, split_rows(t, out, (out.axes[0],)), out.axes)


class PooledProjector(Part):
    """Gemma 3: average pooling over squares of patches, a norm, a product with a parameter."""

    inputs: int
    outputs: int
    tokens: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        images = x.axes[0]
        square = copy(t, x)
        pooled = t.op(
            "avg_pool2d",
            (square,),
            (images, self.tokens, self.inputs),
            x.dtype,
            saves=(square,),
            gradients=(LIKE,),
            costs=(Move(traffic(x)),),
            backward_costs=(Move(traffic(x)),),
        )
        normed = Norm(kind=NormKind.RMS_GEMMA).record(t, pooled, "mm_soft_emb_norm")
        weight = t.weight(
            "mm_input_projection_weight", (self.inputs, self.outputs), kind="projection"
        ).value
        cost = Gemm(images * self.tokens, self.outputs, self.inputs, x.dtype)
        return t.op(
            "matmul",
            (normed, weight),
            (images, self.tokens, self.outputs),
            x.dtype,
            saves=(normed, weight),
            gradients=(LIKE, LIKE),
            costs=(cost,),
            backward_costs=(cost, cost),
        )


class GatedProjector(Part):
    """Folded features through a norm where there is one, and a feed-forward whose first linear makes
    gate and values at once (Aya Vision, Command A Vision)."""

    outputs: int
    inner: int
    normed: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            if self.normed:
                x = Norm(kind=NormKind.LAYER).record(t, x, "layernorm")
                frame.local(x)
            whole = linear(t, x, "linear_1", self.inner, bias=True)
            frame.local(whole)
            axes = (*whole.axes[:-1], self.inner // 2)
            values, gate = chunk(t, whole, (self.inner // 2, self.inner // 2))
            wide = mul(t, activate(t, gate, "silu"), values)
            frame.local(wide)
            return linear(t, t.view(wide, axes), "linear_2", self.outputs, bias=True)


class LinearProjector(Part):
    """One linear, named; optionally without a bias (PaliGemma, Llama 4, Llama 3.2 Vision)."""

    outputs: int
    name: str = "linear"
    bias: bool = True
    scaled: bool = False

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return linear(t, x, self.name, self.outputs, bias=self.bias)
