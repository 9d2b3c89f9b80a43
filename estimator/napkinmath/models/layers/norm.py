"""Norm: which normalisation a family uses, and how the stack runs it."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.expr import Size
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import Tape
from napkinmath.ops.norm import (
    layer_norm,
    layer_norm_eager,
    layer_norm_one_plus,
    layer_norm_plain,
    rms_norm_eager,
    rms_norm_fused,
    rms_norm_in_place,
    rms_norm_power,
)


class NormKind(str, Enum):
    """Normalisations as the library codes them."""

    RMS = "rms"
    RMS_GEMMA = "rms_gemma"
    RMS_POWER = "rms_power"
    """The root is a power of -1/2, the weight is applied in fp32 (Gemma 4)."""
    RMS_POWER_PLAIN = "rms_power_plain"
    """The same without a weight."""
    RMS_CAST_LAST = "rms_cast_last"
    """The weight is applied before the cast back (GPT-OSS, OLMo 2)."""
    LAYER = "layer"
    LAYER_NO_BIAS = "layer_no_bias"
    LAYER_PLAIN = "layer_plain"
    """No parameters, in fp32 (OLMo)."""
    LAYER_NO_AFFINE = "layer_no_affine"
    """No parameters."""
    LAYER_EAGER = "layer_eager"
    """Operation by operation in fp32, no bias (Cohere)."""
    LAYER_ONE_PLUS = "layer_one_plus"
    """Scaled by 1 + weight (Nemotron)."""


RMS_KINDS = (NormKind.RMS, NormKind.RMS_GEMMA, NormKind.RMS_POWER, NormKind.RMS_CAST_LAST)


class Norm(Record):
    """A normalisation over the last axis."""

    kind: NormKind = NormKind.RMS

    def record(
        self, t: Tape, x: Value, name: str, axes: Size | tuple[Size, ...] | None = None
    ) -> Value:
        """Applies the norm named `name`; `axes` are its weight's, the last of x unless given."""
        if not isinstance(axes, tuple):
            axes = (x.axes[-1] if axes is None else axes,)
        with t.scope() as frame:
            frame.local(x)
            return self._apply(t, x, name, axes)

    def _apply(self, t: Tape, x: Value, name: str, axes: tuple[Size, ...]) -> Value:
        width = axes[-1]
        if self.kind is NormKind.RMS_POWER_PLAIN:
            return rms_norm_power(t, x, name=name, affine=False)
        if self.kind in RMS_KINDS:
            if t.policy.patches("norm"):
                from napkinmath.models.layers.patched import patched_norm

                return patched_norm(t, x, name=name, width=width)
            if t.policy.stack.model.rms_norm == "fused" or t.compiles:
                return rms_norm_fused(t, x, name=name, width=width)
            if t.policy.stack.model.rms_norm == "in place":
                return rms_norm_in_place(t, x, name=name, width=width)
            if self.kind is NormKind.RMS_POWER:
                return rms_norm_power(t, x, name=name)
            return rms_norm_eager(
                t,
                x,
                name=name,
                width=width,
                scale_in_fp32=self.kind is NormKind.RMS_GEMMA,
                cast_last=self.kind is NormKind.RMS_CAST_LAST,
            )
        if self.kind is NormKind.LAYER_EAGER:
            return layer_norm_eager(t, x, name=name, axes=axes)
        if self.kind is NormKind.LAYER_PLAIN:
            return layer_norm_plain(t, x, name=name)
        if self.kind is NormKind.LAYER_ONE_PLUS:
            return layer_norm_one_plus(t, x, name=name)
        return layer_norm(
            t,
            x,
            name=name,
            bias=self.kind is NormKind.LAYER,
            affine=self.kind is not NormKind.LAYER_NO_AFFINE,
        )
