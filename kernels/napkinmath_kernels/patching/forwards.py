"""Forwards that take the place of modules' own, each made for one module and falling back to its
own forward where it must."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.gated import Activation, gated
from ..ops.qlora import qlora_linears
from ..ops.qlora_mlp import MlpGroup, qlora_mlp_of
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from .linears import GroupReader, ReadGroup

Forward = Callable[..., Any]

# Objects and not closures: a copy or a pickle of a patched model gets forwards of its own modules.


@dataclass(eq=False)
class NormForward:
    """RMS norm with the module's weight and epsilon."""

    module: Any
    offset: float
    eps: float

    @staticmethod
    def of(module: Any, offset: float) -> NormForward:
        """With the epsilon under the name that the module has it."""
        return NormForward(
            module, offset, float(getattr(module, "variance_epsilon", None) or module.eps)
        )

    def __call__(self, hidden_states: torch.Tensor) -> Any:
        return rms_norm(hidden_states, self.module.weight, self.eps, offset=self.offset)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> Any:
    """transformers' apply_rotary_pos_emb in one launch.

    Not in place: a selective checkpoint that keeps the projections' outputs would keep them
    rotated, and rotate them again.
    """
    assert unsqueeze_dim == 1, "the patched attentions hold heads before tokens"
    return rope(q, k, cos, sin)


_rotating: dict[type, types.FunctionType] = {}


def _rotating_function(kind: type) -> types.FunctionType:
    """A copy of the class's forward that calls `rotate` for its rotary function; nothing else sees
    it.

    One for all modules of a class, with a code object of its own: torch.compile keeps what it
    compiled by code object, and looks for it among that function's globals.
    """
    if kind not in _rotating:
        own = kind.forward  # type: ignore[attr-defined]
        names = {**own.__globals__, "apply_rotary_pos_emb": rotate}
        copy = types.FunctionType(
            own.__code__.replace(), names, own.__name__, own.__defaults__, own.__closure__
        )
        copy.__kwdefaults__ = own.__kwdefaults__
        _rotating[kind] = copy
    return _rotating[kind]


class RotatingForward:
    """The module's own forward with `rotate` in place of its rotary function."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.function = _rotating_function(type(module))

    @staticmethod
    def fits(module: torch.nn.Module) -> bool:
        """True if its class's forward calls the rotary function by its name."""
        return "apply_rotary_pos_emb" in type(module).forward.__code__.co_names

    def __reduce__(self) -> tuple[Any, ...]:
        return RotatingForward, (self.module,)  # a function that no module has cannot be pickled

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(self.module, *arguments, **options)


class LinearForward:
    """One linear with its adapter."""

    def __init__(self, module: torch.nn.Module, own: Forward) -> None:
        self.own = own
        self._reader = GroupReader([module])

    def __call__(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = None if arguments or options else self._reader.read()
        if found is None:
            return self.own(x, *arguments, **options)
        return _run_group(x, found)[0]


def _run_group(x: torch.Tensor, found: ReadGroup) -> list[torch.Tensor]:
    """The linears of x, computed in their own dtype where they have one."""
    dtype = found.compute_dtype
    if dtype is None or dtype is x.dtype:
        return qlora_linears(x, found.group, dropout=found.dropout)
    return [y.to(x.dtype) for y in qlora_linears(x.to(dtype), found.group, dropout=found.dropout)]


class SharedProjections:
    """Linears that are called one after another on the same x: the first computes all, the others
    hand out theirs."""

    def __init__(self, modules: list[torch.nn.Module], own: list[Forward]) -> None:
        self._alone = [
            LinearForward(module, forward) for module, forward in zip(modules, own, strict=True)
        ]
        self._reader = GroupReader(modules)
        self._x: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # what waits is of a step, not of the model
        return {**self.__dict__, "_x": None, "_waiting": {}}

    def run(self, index: int, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """The index-th linear of x."""
        if arguments or options:
            return self._alone[index].own(x, *arguments, **options)
        if index > 0 and self._x is x and index in self._waiting:
            y = self._waiting.pop(index)
            if not self._waiting:
                self._x = None
            return y
        return self._compute(x, index)

    def _compute(self, x: torch.Tensor, index: int) -> Any:
        self._x, self._waiting = None, {}
        found = self._reader.read() if index == 0 else None
        if found is None:
            return self._alone[index](x)
        outputs = _run_group(x, found)
        self._x, self._waiting = x, dict(enumerate(outputs[1:], start=1))
        return outputs[0]


@dataclass(eq=False)
class ProjectionForward:
    """One linear of `SharedProjections`."""

    shared: SharedProjections
    index: int

    def __call__(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return self.shared.run(self.index, x, *arguments, **options)


class MlpForward:
    """A gated MLP: one op if its three linears can be fused, else their own forwards around the
    fused activation."""

    def __init__(self, module: Any, activation: Activation) -> None:
        self.module, self.activation = module, activation
        self._reader = GroupReader((module.gate_proj, module.up_proj, module.down_proj), MlpGroup)

    def __call__(self, x: torch.Tensor) -> Any:
        module = self.module
        linears = (module.gate_proj, module.up_proj, module.down_proj)
        if linears != self._reader.modules:  # an adapter was put in, or merged, since
            self._reader = GroupReader(linears, MlpGroup)
        found = self._reader.read()
        if found is None or found.group.is_dense:
            return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), self.activation))
        dtype = found.compute_dtype or x.dtype
        assert isinstance(found.group, MlpGroup)
        y = qlora_mlp_of(x.to(dtype), found.group, self.activation, dropout=found.dropout)
        return y if dtype is x.dtype else y.to(x.dtype)


@dataclass(eq=False)
class FusedMlpForward:
    """Phi-3's MLP, whose gate and up come out of one linear."""

    module: Any
    activation: Activation

    def __call__(self, hidden_states: torch.Tensor) -> Any:
        gate, up = self.module.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.module.down_proj(gated(gate, up, self.activation))


@dataclass(eq=False)
class ExpertsGate:
    """The fused activation in place of a mixture's `_apply_gate`, which gets (rows, 2 x width)."""

    activation: Activation

    def __call__(self, gate_up: torch.Tensor) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return gated(gate, up, self.activation)
