"""Which of the recorded forms of a learned class runs, by the types that a policy computes in."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.ir.recording import RecordingPolicy

HALF, SINGLE, AUTOCAST, OVER_QUANTIZED = "half", "fp32", "autocast", "autocast over quantized"
_WIDENED = ("native_layer_norm", "native_group_norm", "_fused_rms_norm", "pow")
"""Operations that autocast runs in fp32 (torch 2.13 ATen/autocast_mode.h) and whose result is as
wide as the hidden states. Those on a router's scores, sums and softmaxes, are cast back by it."""
_ALIKE: dict[str, bool] = {}


def variant_of(policy: RecordingPolicy, form: Mapping[str, Any]) -> str:
    """The form that runs. Those under autocast were recorded with fp32 weights, whose embeddings
    make every later sum fp32. Over half weights a class without an operation that autocast widens
    runs as it does without autocast."""
    if policy.autocast is None:
        return SINGLE if policy.parameter_dtype("norm") is FP32 else HALF
    kinds = ("norm", "embedding")
    if all(policy.parameter_dtype(kind) is not FP32 for kind in kinds) and _runs_alike(form):
        return HALF
    return AUTOCAST if policy.format is None else OVER_QUANTIZED


def _runs_alike(form: Mapping[str, Any]) -> bool:
    """Whether autocast over half weights widens nothing of a form."""
    digest = str(form["digest"])
    if digest not in _ALIKE:
        modes = form["variants"][HALF].values()
        _ALIKE[digest] = not any(_widens(block) for mode in modes for block in _blocks(mode))
    return _ALIKE[digest]


def _blocks(mode: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    pieces = [mode.get(name) for name in ("entrance", "end", "middle", "exit", "after")]
    several = (*mode["layers"], *mode.get("between", ()))
    return [block for block in (*pieces, *several) if block is not None]


def _widens(block: Mapping[str, Any]) -> bool:
    """Whether an operation that autocast widens makes a half value."""
    return any(
        op[0].partition(".")[0] in _WIDENED and any(out[1] == BF16.name for out in op[3])
        for op in block["ops"]
    )
