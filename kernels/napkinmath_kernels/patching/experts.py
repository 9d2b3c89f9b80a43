"""Experts of a Hugging Face mixture with PEFT's adapters on their stacks, or with stacks that
bitsandbytes holds in 4 bits: transformers' own grouped forward with `expert_linear` for its product.

PEFT wraps the module once for each adapted parameter and, in every forward, puts W + scaling B A in
the parameter's place; bitsandbytes decodes the parameter whenever it is read. Here the stack and
its factors are handed to the product as they are stored.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.expert_linear import ExpertAdapter, expert_linear
from ..ops.nf4 import QuantizedWeight

STACKS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """One parameter of all experts, and the adapter on it."""

    weight: QuantizedWeight | torch.Tensor
    adapter: ExpertAdapter | None


class _View:
    """The experts as transformers' forward sees them, its stacks in the form that
    `_stacked_product` takes."""

    def __init__(self, experts: Any, stacks: dict[str, ExpertStack]) -> None:
        self.experts, self.stacks = experts, stacks

    def __getattr__(self, name: str) -> Any:
        stacks: dict[str, ExpertStack] = self.__dict__["stacks"]
        return stacks[name] if name in stacks else getattr(self.__dict__["experts"], name)


def _stacked_product(
    input: torch.Tensor,
    weight: ExpertStack,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """transformers' `_grouped_linear` on a `ExpertStack`."""
    x = input.to(weight.weight.dtype)
    y = expert_linear(x, weight.weight, offs, weight.adapter, transposed=is_transposed)
    return y if bias is None else y.add_(bias)


@functools.cache
def grouped_forward() -> Callable[..., torch.Tensor] | None:
    """transformers' grouped forward of experts with `_stacked_product` for its product; None in a
    version that has no such forward."""
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward as own
    except ImportError:
        return None
    if "_grouped_linear" not in own.__code__.co_names:
        return None
    names = {**own.__globals__, "_grouped_linear": _stacked_product}
    return types.FunctionType(own.__code__.replace(), names, own.__name__, own.__defaults__)


def is_wrapper(module: Any) -> bool:
    """True for PEFT's wrapper of a parameter."""
    return hasattr(module, "parameter_name") and hasattr(module, "lora_A")


def experts_of(module: Any) -> Any:
    """The module under PEFT's wrappers of its parameters."""
    while is_wrapper(module):
        module = module.base_layer
    return module


def is_worth_fusing(module: Any) -> bool:
    """True for experts with an adapter on a stack, or with a stack in 4 bits."""
    return is_wrapper(module) or any(_four_bit(module, name) is not None for name in STACKS)


def _four_bit(experts: Any, name: str) -> QuantizedWeight | None:
    parametrized = getattr(experts, "parametrizations", None)
    if parametrized is None or name not in parametrized:
        return None
    steps = parametrized[name]
    if len(steps) != 1 or type(steps[0]).__name__ != "Bnb4bitParametrization":
        return None
    return QuantizedWeight.from_bitsandbytes(steps.original.data, steps[0].quant_state)


def _weight(experts: Any, name: str) -> QuantizedWeight | torch.Tensor | None:
    """A frozen stack (experts, ., .) as it is stored; None for what cannot be taken."""
    weight = experts._parameters.get(name)
    if weight is None:
        return _four_bit(experts, name)
    return weight if weight.dim() == 3 and not weight.requires_grad else None


def _adapter(wrapper: Any) -> ExpertAdapter | None:
    """The wrapper's one active adapter, as views of PEFT's matrices: A (experts * r, in), B (out,
    r * experts)."""
    (name,) = (name for name in wrapper.active_adapters if name in wrapper.lora_A)
    a, b, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    return ExpertAdapter(
        a.reshape(experts, -1, a.shape[1]),
        b.reshape(b.shape[0], -1, experts).permute(2, 0, 1),
        float(wrapper.scaling[name]),
    )


def _active(wrapper: Any) -> int | None:
    """How many adapters act on the wrapper's parameter; None for a state that PEFT itself must
    handle."""
    if wrapper.disable_adapters:
        return None if wrapper.merged else 0
    if wrapper.merged:
        return 0
    count = sum(name in wrapper.lora_A for name in wrapper.active_adapters)
    return count if count <= 1 else None


def read_experts(module: Any) -> _View | None:
    """The experts under `module` as `grouped_forward` takes them; None where something is not plain
    LoRA on a frozen stack."""
    wrappers: dict[str, Any] = {}
    while is_wrapper(module):
        wrappers[module.parameter_name] = module
        module = module.base_layer
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        return None
    names = [name for name in STACKS if hasattr(type(module), name) or name in module._parameters]
    if set(wrappers) - set(names):
        return None
    stacks: dict[str, ExpertStack] = {}
    for name in names:
        weight = _weight(module, name)
        count = _active(wrappers[name]) if name in wrappers else 0
        if weight is None or count is None:
            return None
        adapter = _adapter(wrappers[name]) if count else None
        if adapter is not None and adapter.a.requires_grad != adapter.b.requires_grad:
            return None
        stacks[name] = ExpertStack(weight, adapter)
    return _View(module, stacks)


@dataclass(eq=False)
class ExpertsForward:
    """All experts of a layer, their stacks taken as they are stored."""

    module: Any
    own: Callable[..., Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        run, found = grouped_forward(), read_experts(self.module)
        if run is None or found is None:
            return self.own(*arguments, **options)
        return run(found, *arguments, **options)
