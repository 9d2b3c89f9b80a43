"""Logits that are not computed until somebody looks: what the patched head returns, and what the
patched loss understands.

A Hugging Face causal model computes `logits = lm_head(hidden)`, may soft-cap them, and hands them
to `self.loss_function`. The head then returns this object in their place while training with
labels; the loss takes hidden states and weight out of it and never makes the logits. They stay
unmade through what trainers do to logits on the way to a loss of their own: a shift (slices), a
flattening, a cast to fp32, `cross_entropy`, the mean of a metric. Anything else that is done to it
(indexing, a torch function, an attribute) makes the real ones, with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ..autocast import to_autocast_dtype
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.divergence import linear_divergence
from ..ops.log_probabilities import linear_log_probabilities
from . import trl_head
from .heads import HeadInput, read_head


class DeferredLogits:
    """softcap(hidden @ weight.T), not computed. Soft-capping is followed through `x / cap`,
    `torch.tanh`, `x * cap`."""

    # ModelOutput asks whether its first field can be iterated; logits are a tensor there, and so is
    # this
    __iter__ = None

    def __init__(
        self,
        given: HeadInput,
        softcap: float = 0.0,
        divided_by: float = 0.0,
        bent: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._input = given
        self._softcap = softcap
        self._divided_by = divided_by
        self._bent = bent
        # Asked by those who only look whether a cast is due (accelerate's convert_to_fp32): plain
        # attributes, which make nothing.
        hidden = given.hidden
        self.dtype = dtype or hidden.dtype
        self.device = hidden.device
        self.shape = torch.Size((*hidden.shape[:-1], given.weight.shape[0]))
        self.ndim = hidden.ndim
        self.requires_grad = given.requires_grad

    def _step(
        self, *, softcap: float = 0.0, divided_by: float = 0.0, bent: bool = False
    ) -> DeferredLogits:
        return DeferredLogits(self._input, softcap, divided_by, bent, self.dtype)

    def _of(self, given: HeadInput, dtype: Any = None) -> DeferredLogits:
        """The same of other rows, of a head without gradient, or in another type."""
        state = (self._softcap, self._divided_by, self._bent)
        return DeferredLogits(given, *state, dtype or self.dtype)

    @property
    def _is_plain(self) -> bool:
        return not (self._softcap or self._divided_by)

    @property
    def _is_whole(self) -> bool:
        """Capped or not, and not in the middle of it."""
        return not self._divided_by

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
        if function is torch.nn.functional.cross_entropy and isinstance(first, cls):
            loss = first._cross_entropy(*args[1:], **(kwargs or {}))
            if loss is not None:
                return loss
        made = pytree.tree_map_only(cls, lambda x: x.materialize(), (args, kwargs or {}))
        return function(*made[0], **made[1])

    def _cross_entropy(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor | None:
        """torch's loss of flat logits; None for a kind of it that needs them."""
        plain = weight is None and size_average is None and reduce is None and self._is_whole
        flat = self.ndim == 2 and target.dtype is torch.int64 and reduction in ("mean", "sum")
        if not plain or not flat:
            return None
        return linear_cross_entropy(
            self._input.hidden,
            self._input.weight,
            target,
            adapter=self._input.adapter,
            ignore_index=ignore_index,
            reduction="mean" if reduction == "mean" else "sum",
            softcap=self._softcap,
            label_smoothing=label_smoothing,
        )

    def log_probabilities(self, targets: torch.Tensor, temperature: float) -> torch.Tensor | None:
        """Of each target, of hidden's leading shape; None for logits in the middle of a cap, or of a
        head with an adapter."""
        given = self._input
        if not self._is_whole or targets.shape != self.shape[:-1] or given.adapter is not None:
            return None
        return linear_log_probabilities(
            given.hidden,
            given.weight,
            targets,
            ignore_index=None,
            temperature=temperature,
            softcap=self._softcap,
        ).log_probs

    def divergence(
        self,
        teacher: Any,
        mask: torch.Tensor | None,
        beta: float,
        temperature: float,
        reduction: Literal["mean", "sum"],
        num_items: Any,
    ) -> torch.Tensor | None:
        """From a teacher's, which are not made either; None where that one's are, or for logits in
        the middle of a cap."""
        if not isinstance(teacher, DeferredLogits) or not (self._is_whole and teacher._is_whole):
            return None
        if teacher._input.adapter is not None:
            return None
        return linear_divergence(
            self._input.hidden,
            self._input.weight,
            teacher._input.hidden,
            teacher._input.weight,
            adapter=self._input.adapter,
            mask=mask,
            beta=beta,
            temperature=temperature,
            reduction=reduction,
            num_items=num_items,
            softcap=self._softcap,
            teacher_softcap=teacher._softcap,
        ).loss

    def materialize(self) -> torch.Tensor:
        """The logits."""
        logits = self._input.logits()
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        elif self._divided_by:
            logits = logits / self._divided_by
            logits = torch.tanh(logits) if self._bent else logits
        return logits.to(self.dtype)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def float(self) -> DeferredLogits:
        """In fp32."""
        return self._of(self._input, torch.float32)

    def contiguous(self) -> DeferredLogits:
        """As it is: made at once or not at all."""
        return self

    def detach(self) -> DeferredLogits:
        """Without gradient."""
        return self._of(self._input.detached())

    def view(self, *shape: Any) -> Any:
        """Flattened rows stay unmade; other shapes are of the logits."""
        if shape == (-1, self.shape[-1]):
            return self._of(self._input.flat())
        return self.materialize().view(*shape)

    reshape = view

    def mean(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Of all logits: the mean hidden state times the mean row of the head."""
        if arguments or options or self.requires_grad or not self._is_plain:
            return self.materialize().mean(*arguments, **options)
        return self._input.mean().to(self.dtype)

    def loss(
        self, targets: torch.Tensor, ignore_index: int, num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Their cross-entropy against targets of hidden's leading shape; without them."""
        if not self._is_whole:
            raise AssertionError("a loss was asked of half-capped logits")
        return linear_cross_entropy(
            self._input.hidden,
            self._input.weight,
            targets.to(self.device),
            adapter=self._input.adapter,
            ignore_index=ignore_index,
            num_items=num_items,
            softcap=self._softcap,
        )

    def __getitem__(self, index: Any) -> Any:
        """Slices that leave the vocabulary whole stay unmade; others are of the logits."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
            return self.materialize()[index]
        after = parts[parts.index(Ellipsis) + 1 :] if Ellipsis in parts else parts
        reaches = len(after) if Ellipsis in parts else len(after) - self.ndim + 1
        if reaches > 0 and after[-1] != slice(None):
            return self.materialize()[index]
        return self._of(self._input.at(index))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)


@dataclass(eq=False)
class LabelWatch:
    """A hook in front of a model's forward that remembers whether a loss will be made of the call's
    logits: it has labels, or one of TRL's trainers makes its own of them. A teacher's are a
    student's loss: those of a model that has not been trained so far."""

    makes_loss: bool = False
    teaches: bool = False
    trains: bool = False

    def __call__(
        self, module: torch.nn.Module, _arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.makes_loss = options.get("labels") is not None or trl_head.scores_logits(options)
        self.trains |= module.training and torch.is_grad_enabled()
        self.teaches = not self.trains and trl_head.teaches(options)


@dataclass(eq=False)
class HeadForward:
    """The output head's forward: deferred logits in training towards a loss and of a teacher, else
    the logits. A head that cannot be read right now runs itself."""

    model: torch.nn.Module
    head: torch.nn.Module
    own: Callable[..., Any]
    watch: LabelWatch

    def __call__(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        trains = self.model.training and torch.is_grad_enabled()
        wanted = (self.watch.makes_loss and trains) or self.watch.teaches
        if wanted and not arguments and not options:
            # a trainer's own loss is computed where autocast has ended
            given = read_head(self.head, to_autocast_dtype(hidden))
            if given is not None:
                return DeferredLogits(given)
        return self.own(hidden, *arguments, **options)


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
