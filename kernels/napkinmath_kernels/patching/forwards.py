"""Forwards that take the place of modules' own, each made for one module and falling back to its own forward where it must."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..ops.gated import Activation, gated
from ..ops.qlora import qlora_linears
from ..ops.qlora_mlp import qlora_mlp
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from .linears import read_group, read_linear

Forward = Callable[..., Any]


def norm_forward(module: torch.nn.Module, offset: float) -> Forward:
    """RMS norm with the module's weight and epsilon."""
    eps = float(getattr(module, "variance_epsilon", None) or module.eps)

    def forward(hidden_states: torch.Tensor) -> Any:
        return rms_norm(hidden_states, module.weight, eps, offset=offset)

    return forward


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    """transformers' apply_rotary_pos_emb in one launch.

    Not in place: a selective checkpoint that keeps the projections' outputs would keep them rotated, and rotate them again.
    """
    assert unsqueeze_dim == 1, "the patched attentions hold heads before tokens"
    return rope(q, k, cos, sin)


def attention_forward_with_rope(module: torch.nn.Module) -> Forward | None:
    """The module's own forward with `rotate` in place of its rotary function, in a copy: nothing else sees it. None if it has none."""
    own = type(module).forward
    if "apply_rotary_pos_emb" not in own.__code__.co_names:
        return None
    names = {**own.__globals__, "apply_rotary_pos_emb": rotate}
    copy = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return types.MethodType(copy, module)


def linear_forward(module: torch.nn.Module, own: Forward) -> Forward:
    """One linear with its adapter."""

    def forward(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = None if arguments or options else read_linear(module)
        if found is None:
            return own(x, *arguments, **options)
        y = qlora_linears(x.to(found.compute_dtype or x.dtype), [found.linear], dropout=found.dropout)[0]
        return y.to(x.dtype) if found.compute_dtype is not None else y

    return forward


class SharedProjections:
    """Forwards for linears that are called one after another on the same x: the first computes all, the others hand out theirs."""

    def __init__(self, modules: list[torch.nn.Module], own: list[Forward]) -> None:
        self._modules = modules
        self._own = own
        self._x: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def forward_of(self, index: int) -> Forward:
        """The forward of the index-th linear."""

        def forward(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if arguments or options:
                return self._own[index](x, *arguments, **options)
            if index > 0 and self._x is x and index in self._waiting:
                y = self._waiting.pop(index)
                if not self._waiting:
                    self._x = None
                return y
            return self._compute(x, index)

        return forward

    def _compute(self, x: torch.Tensor, index: int) -> Any:
        self._x, self._waiting = None, {}
        found = read_group(self._modules) if index == 0 else None
        if found is None:
            return linear_forward(self._modules[index], self._own[index])(x)
        dtype = found[0].compute_dtype
        outputs = qlora_linears(x.to(dtype or x.dtype), [one.linear for one in found], dropout=found[0].dropout)
        if dtype is not None:
            outputs = [y.to(x.dtype) for y in outputs]
        self._x, self._waiting = x, dict(enumerate(outputs[1:], start=1))
        return outputs[0]


def mlp_forward(module: torch.nn.Module, activation: Activation) -> Forward:
    """A gated MLP: one op if its three linears can be fused, else their own forwards around the fused activation."""

    def forward(x: torch.Tensor) -> Any:
        found = read_group([module.gate_proj, module.up_proj, module.down_proj])
        if found is None or all(one.linear.adapter is None and isinstance(one.linear.weight, torch.Tensor) for one in found):
            return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))
        dtype = found[0].compute_dtype
        linears = (one.linear for one in found)
        y = qlora_mlp(x.to(dtype or x.dtype), *linears, activation=activation, dropout=found[0].dropout)
        return y.to(x.dtype) if dtype is not None else y

    return forward


def fused_mlp_forward(module: torch.nn.Module, activation: Activation) -> Forward:
    """Phi-3's MLP, whose gate and up come out of one linear."""

    def forward(hidden_states: torch.Tensor) -> Any:
        gate, up = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return module.down_proj(gated(gate, up, activation))

    return forward


def experts_forward(module: torch.nn.Module, activation: Activation) -> Forward:
    """A mixture's experts, one after another over the tokens routed to each."""

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= module.num_experts:
                continue
            token, place = torch.where(top_k_index == expert)
            gate, up = torch.nn.functional.linear(hidden_states[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
            y = torch.nn.functional.linear(gated(gate, up, activation), module.down_proj[expert])
            out.index_add_(0, token, (y * top_k_weights[token, place, None]).to(out.dtype))
        return out

    return forward
