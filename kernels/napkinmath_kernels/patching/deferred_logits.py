"""Logits that are not computed until somebody looks: what the patched head returns, and what the
patched loss understands.

A Hugging Face causal model computes `logits = lm_head(hidden)`, may soft-cap them, and hands them
to `self.loss_function`. The head then returns this object in their place while training with
labels; the loss takes hidden states and weight out of it and never makes the logits. Anything else
that is done to it (indexing, a torch function, an attribute) makes the real ones, with their
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ops.cross_entropy import linear_cross_entropy


class DeferredLogits:
    """softcap(hidden @ weight.T), not computed. Soft-capping is followed through `x / cap`,
    `torch.tanh`, `x * cap`."""

    # ModelOutput asks whether its first field can be iterated; logits are a tensor there, and so is
    # this
    __iter__ = None

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        softcap: float = 0.0,
        divided_by: float = 0.0,
        bent: bool = False,
    ) -> None:
        self._hidden = hidden
        self._weight = weight
        self._softcap = softcap
        self._divided_by = divided_by
        self._bent = bent

    def _step(
        self, *, softcap: float = 0.0, divided_by: float = 0.0, bent: bool = False
    ) -> DeferredLogits:
        return DeferredLogits(self._hidden, self._weight, softcap, divided_by, bent)

    @property
    def _is_plain(self) -> bool:
        return not (self._softcap or self._divided_by)

    def __truediv__(self, divisor: Any) -> Any:
        if self._is_plain and isinstance(divisor, int | float) and divisor > 0:
            return self._step(divided_by=float(divisor))
        return self.materialize() / divisor

    def __mul__(self, factor: Any) -> Any:
        if self._bent and factor == self._divided_by:
            return self._step(softcap=float(factor))
        return self.materialize() * factor

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        first = args[0] if args else None
        if (
            function in (torch.tanh, torch.Tensor.tanh)
            and isinstance(first, cls)
            and first._divided_by
            and not first._bent
        ):
            return first._step(divided_by=first._divided_by, bent=True)
        made = pytree.tree_map_only(cls, lambda x: x.materialize(), (args, kwargs or {}))
        return function(*made[0], **made[1])

    def materialize(self) -> torch.Tensor:
        """The logits."""
        logits = torch.nn.functional.linear(self._hidden, self._weight)
        if self._softcap:
            return self._softcap * torch.tanh(logits / self._softcap)
        if self._divided_by:
            logits = logits / self._divided_by
        return torch.tanh(logits) if self._bent else logits

    def loss(
        self, targets: torch.Tensor, ignore_index: int, num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Their cross-entropy against targets of hidden's leading shape; without them."""
        if not self._is_plain and not self._softcap:
            raise AssertionError("a loss was asked of half-capped logits")
        return linear_cross_entropy(
            self._hidden,
            self._weight,
            targets.to(self._hidden.device),
            ignore_index=ignore_index,
            num_items=num_items,
            softcap=self._softcap,
        )

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.materialize()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)


@dataclass(eq=False)
class LabelWatch:
    """A hook in front of a model's forward that remembers whether the call has labels."""

    has_labels: bool = False

    def __call__(
        self, _module: torch.nn.Module, _arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.has_labels = options.get("labels") is not None


@dataclass(eq=False)
class HeadForward:
    """The output head's forward: deferred logits in training with labels, else the logits."""

    model: torch.nn.Module
    head: torch.nn.Linear
    watch: LabelWatch

    def __call__(self, hidden: torch.Tensor) -> Any:
        if self.watch.has_labels and self.model.training and torch.is_grad_enabled():
            return DeferredLogits(hidden, self.head.weight)
        return torch.nn.functional.linear(hidden, self.head.weight)


@dataclass(eq=False)
class CausalLmLoss:
    """A loss function as transformers calls it, which takes deferred logits and leaves others to
    `fallback`."""

    fallback: Callable[..., torch.Tensor]

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(logits, DeferredLogits):
            return self.fallback(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return logits.loss(shift_labels, ignore_index, num_items_in_batch)
