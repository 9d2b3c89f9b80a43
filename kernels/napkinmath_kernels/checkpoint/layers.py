"""How a layer is checkpointed: a policy for each, applied to a model's layers and taken off again.

Built on torch.utils.checkpoint without reentrant autograd; selective policies name the ops whose
outputs are kept. The fused ops of this package are custom ops, so policies see them by name.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..errors import KernelInputError
from .offload import HostStore


class Recompute(enum.Enum):
    """What a layer does between its forward and its backward."""

    KEEP = "keep"
    """Keeps everything its backward needs."""
    FULL = "full"
    """Keeps its input and computes the rest again."""
    KEEP_ATTENTION = "keep-attention"
    """Keeps its input and the attention's output, the costliest op to repeat on long sequences."""
    KEEP_MATMULS = "keep-matmuls"
    """Keeps its input and the outputs of matrix products and attention; norms and activations are
    computed again."""
    OFFLOAD = "offload"
    """Keeps its input in host memory and computes the rest again."""


_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "napkinmath::flash_attention",
)
_MATMULS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "napkinmath::qlora_linears",
    "bitsandbytes::gemm_4bit",
)
KEPT_OPS = {
    Recompute.KEEP_ATTENTION: frozenset(_ATTENTION),
    Recompute.KEEP_MATMULS: frozenset((*_ATTENTION, *_MATMULS)),
}


def _keep_named(
    kept: frozenset[str], _context: Any, op: Any, *_arguments: Any, **_options: Any
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if op.name().partition(".")[0] in kept
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def run_layer(
    function: Callable[..., Any],
    how: Recompute,
    hidden: torch.Tensor,
    *arguments: Any,
    store: HostStore | None = None,
    kept: frozenset[str] | None = None,
    **options: Any,
) -> Any:
    """function(hidden, ...), checkpointed as `how` says. `kept` names further ops
    (`namespace::name`) whose outputs stay.

    OFFLOAD needs a `store`. Without gradients every policy is a plain call.
    """
    if how is Recompute.KEEP or not torch.is_grad_enabled():
        return function(hidden, *arguments, **options)
    if how is Recompute.OFFLOAD and store is None:
        raise KernelInputError(
            "run_layer",
            "OFFLOAD without a store",
            "a HostStore shared by the model's layers",
            "Recompute.FULL",
        )
    outside = (
        store.hooks(hidden)
        if how is Recompute.OFFLOAD and store is not None
        else contextlib.nullcontext()
    )
    names = KEPT_OPS.get(how, frozenset()) | (kept or frozenset())
    extra: dict[str, Any] = {}
    if names:
        extra["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, functools.partial(_keep_named, names)
        )
    with outside:
        return checkpoint(function, hidden, *arguments, use_reentrant=False, **extra, **options)


def full(num_layers: int) -> list[Recompute]:
    """Every layer recomputed."""
    return [Recompute.FULL] * num_layers


def every(num_layers: int, k: int) -> list[Recompute]:
    """Layers 0, k, 2k, ... recomputed, the others kept."""
    if k < 1:
        raise KernelInputError("every", f"k={k}", "1 or more", "full(num_layers)")
    return [Recompute.FULL if i % k == 0 else Recompute.KEEP for i in range(num_layers)]


def set_forward(module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
    """Gives a module this forward, or with None its class's."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = forward  # type: ignore[method-assign]


@dataclass(eq=False)
class CheckpointedForward:
    """A layer's forward under a policy while it is training. An object, so that a copy of the layer
    has one of its own."""

    layer: torch.nn.Module
    own: Callable[..., Any]
    how: Recompute
    store: HostStore
    kept: frozenset[str] | None

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if not self.layer.training:
            return self.own(hidden_states, *arguments, **options)
        if self.how is not Recompute.KEEP and options.get("past_key_values") is not None:
            options["past_key_values"] = None  # a recompute would append to the cache again
        return run_layer(
            self.own,
            self.how,
            hidden_states,
            *arguments,
            store=self.store,
            kept=self.kept,
            **options,
        )


class CheckpointHandle:
    """What `checkpoint_layers` put in place; `remove()` takes it off."""

    def __init__(self, layers: Iterable[torch.nn.Module], store: HostStore) -> None:
        self.store = store
        self._before = [(layer, layer.__dict__.get("forward")) for layer in layers]

    def remove(self) -> None:
        """Gives every layer the forward back that it had; a second call does nothing."""
        for layer, forward in self._before:
            set_forward(layer, forward)
        self._before = []


def checkpoint_layers(
    layers: Sequence[torch.nn.Module] | torch.nn.ModuleList,
    policies: Sequence[Recompute],
    *,
    kept: frozenset[str] | None = None,
    store: HostStore | None = None,
) -> CheckpointHandle:
    """Makes each layer, whose first argument is the hidden states, run as its policy says while it
    is training."""
    if len(layers) != len(policies):
        raise KernelInputError(
            "checkpoint_layers",
            f"{len(policies)} policies",
            f"{len(layers)}, one a layer",
            "full(len(layers))",
        )
    unknown = [how for how in policies if not isinstance(how, Recompute)]
    if unknown:
        names = ", ".join(f"Recompute.{how.name}" for how in Recompute)
        raise KernelInputError(
            "checkpoint_layers", f"policy {unknown[0]!r}", names, "full(len(layers))"
        )
    taken = [
        type(layer).__name__
        for layer in layers
        if isinstance(layer.__dict__.get("forward"), CheckpointedForward)
    ]
    if taken:
        raise KernelInputError(
            "checkpoint_layers",
            f"a {taken[0]} that is checkpointed",
            "layers not yet wrapped",
            "handle.remove() first",
        )
    store = store or HostStore()
    handle = CheckpointHandle(layers, store)
    for layer, how in zip(layers, policies, strict=True):
        set_forward(layer, CheckpointedForward(layer, layer.forward, how, store, kept))
    return handle


class OffloadCheckpoint(torch.nn.Module):
    """A layer whose input waits for the backward in host memory, which computes the rest again; in
    evaluation the layer itself.

    Give the layers of a model one `store`: it brings back the input of the layer before while the
    backward of this one runs.
    """

    def __init__(self, layer: torch.nn.Module, store: HostStore | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.store = store or HostStore()

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """layer(hidden_states, ...); see `run_layer`."""
        if not self.training:
            return self.layer(hidden_states, *arguments, **options)
        return run_layer(
            self.layer, Recompute.OFFLOAD, hidden_states, *arguments, store=self.store, **options
        )
