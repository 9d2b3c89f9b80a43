"""Reading a linear of a Hugging Face model, PEFT's and bitsandbytes' wrappers and transformers' FP8 included, as the
fused ops take it.

Looked at in every call, because adapters are switched, merged and moved while a model lives; what
cannot be fused right now gives None, and the caller runs the module's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.eight_bit import ScaledWeight
from ..ops.linear_group import FrozenLinear, LinearGroup, LoraAdapter
from ..ops.nf4 import QuantizedWeight


@dataclass(frozen=True, eq=False)
class ReadLinear:
    """A linear that can be fused, the dropout in front of its adapter, and the dtype that its base
    computes in (None: x's)."""

    linear: FrozenLinear
    dropout: float
    compute_dtype: torch.dtype | None


def _scales_of(base: Any) -> Any:
    """Scales of transformers' `FP8Linear`; None for what is not in FP8."""
    weight = getattr(base, "weight", None)
    is_fp8 = weight is not None and weight.dtype is torch.float8_e4m3fn
    return getattr(base, "weight_scale_inv", None) if is_fp8 else None


def _read_base(base: torch.nn.Module) -> tuple[Any, torch.dtype | None] | None:
    weight = getattr(base, "weight", None)
    if weight is None or weight.requires_grad or not isinstance(base, torch.nn.Linear):
        return None
    state = getattr(weight, "quant_state", None)
    if type(weight).__name__ == "Params4bit":
        if state is None or getattr(state, "packing_format_for_cpu", False):
            return None  # not on its device yet, or repacked for inference
        return QuantizedWeight.from_bitsandbytes(weight.data, state), getattr(
            base, "compute_dtype", None
        )
    scales = _scales_of(base)
    if scales is not None:
        block = getattr(base, "block_size", None)
        return ScaledWeight.of_linear(weight, scales, block, torch.bfloat16), None
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return None
    return weight, None


def _read_adapter(module: Any) -> tuple[LoraAdapter | None, float] | None:
    """(adapter, dropout) of a PEFT LoRA layer, (None, 0) if its adapters are off, None if it does
    more than plain LoRA."""
    if module.disable_adapters:
        return (None, 0.0) if not module.merged else None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.merged or len(active) > 1:
        return None
    if not active:
        return None, 0.0
    name = active[0]
    a, b = module.lora_A[name], module.lora_B[name]
    if (
        name in getattr(module, "lora_variant", {})
        or b.bias is not None
        or not isinstance(a, torch.nn.Linear)
    ):
        return None
    drop = module.lora_dropout[name]
    if not isinstance(drop, torch.nn.Dropout | torch.nn.Identity):
        return None
    probability = drop.p if isinstance(drop, torch.nn.Dropout) and drop.training else 0.0
    return LoraAdapter(a.weight, b.weight, float(module.scaling[name])), probability


def read_linear(module: Any) -> ReadLinear | None:
    """The linear as the fused ops take it, or None."""
    has_adapter = hasattr(module, "lora_A") and hasattr(module, "base_layer")
    base = _read_base(module.base_layer if has_adapter else module)
    found = _read_adapter(module) if has_adapter else (None, 0.0)
    if base is None or found is None:
        return None
    weight, compute_dtype = base
    adapter, dropout = found
    bias = module.base_layer.bias if has_adapter else module.bias
    if bias is not None and bias.requires_grad:
        return None
    if adapter is not None and adapter.a.requires_grad != adapter.b.requires_grad:
        return None
    return ReadLinear(FrozenLinear(weight, bias, adapter), dropout, compute_dtype)


def _fingerprint(module: Any) -> tuple[Any, ...] | None:
    """All that `read_linear` looks at, cheaply; None for what is not a plain linear or one active
    adapter on it. Numbers of objects, so they hold only while what was read is kept."""
    try:
        parts = module._modules
        base = parts.get("base_layer", module)
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        state = getattr(weight, "quant_state", None)
        found = (
            id(base),
            id(weight),
            weight.data_ptr(),
            weight.requires_grad,
            id(state),
            0 if state is None else id(state.absmax),
            id(base._parameters.get("weight_scale_inv")),
            id(bias),
            bias is not None and bias.requires_grad,
            getattr(base, "compute_dtype", None),
        )
        if base is module:
            return found
        (name,) = module.active_adapters
        a, b = parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]
        drop = parts["lora_dropout"]._modules[name]
        left, right = a._parameters["weight"], b._parameters["weight"]
        return (
            *found,
            module._disable_adapters,
            len(module.merged_adapters),
            len(module.lora_variant),
            id(a),
            id(left),
            left.requires_grad,
            id(right),
            right.requires_grad,
            b._parameters["bias"] is None,
            module.scaling[name],
            type(drop),
            drop.training,
            getattr(drop, "p", 0.0),
        )
    except (AttributeError, KeyError, ValueError):
        return None


@dataclass(frozen=True, eq=False)
class ReadGroup:
    """Linears that one fused op takes, what they share, and the group that the op keeps."""

    group: LinearGroup
    dropout: float
    compute_dtype: torch.dtype | None


class GroupReader:
    """Reads linears at every call, and anew only where something about them has changed."""

    def __init__(self, modules: Sequence[Any], kind: type[LinearGroup] = LinearGroup) -> None:
        self.modules = tuple(modules)
        self.kind = kind
        self._seen: Any = None
        self._found: ReadGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        return GroupReader(self.modules, self.kind).__dict__  # a copy reads its own modules

    def read(self) -> ReadGroup | None:
        """The linears as a fused op takes them; None if one cannot be fused or they disagree on
        dropout or compute dtype."""
        if torch.compiler.is_compiling():
            return self._read()
        seen = [_fingerprint(module) for module in self.modules]
        if self._found is None or seen != self._seen or None in seen:
            self._found, self._seen = self._read(), seen
        return self._found

    def _read(self) -> ReadGroup | None:
        found = [read_linear(module) for module in self.modules]
        known = [one for one in found if one is not None]
        if len(known) < len(found) or len({(one.dropout, one.compute_dtype) for one in known}) != 1:
            return None
        group = self.kind([one.linear for one in known])
        return ReadGroup(group, known[0].dropout, known[0].compute_dtype)


def is_worth_fusing(module: torch.nn.Module) -> bool:
    """True for a linear with a LoRA adapter, or a weight in 4 or 8 bits; a plain one is best left
    to torch."""
    base = getattr(module, "base_layer", module)
    packed = type(getattr(base, "weight", None)).__name__ == "Params4bit"
    return hasattr(module, "lora_A") or packed or _scales_of(base) is not None
