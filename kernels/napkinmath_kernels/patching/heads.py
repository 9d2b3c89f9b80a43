"""Output heads of Hugging Face models as the losses without logits take them: a plain linear, a copy
that PEFT trains whole (`modules_to_save`), or a linear with PEFT's adapter on it.

Looked at in every call, as linears are: adapters are switched, merged and moved while a model lives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ops.head_chunks import ProjectedAdapter
from .linears import read_linear


@dataclass(frozen=True, eq=False)
class HeadInput:
    """Hidden states (..., h) on their way through a head (v, h), with an adapter's first product."""

    hidden: torch.Tensor
    weight: torch.Tensor
    adapter: ProjectedAdapter | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether the logits would have a gradient."""
        given = (self.hidden, self.weight, *self._thin())
        return any(x.requires_grad for x in given)

    def _thin(self) -> tuple[torch.Tensor, ...]:
        return () if self.adapter is None else (self.adapter.low, self.adapter.b)

    def at(self, index: Any) -> HeadInput:
        """Some of the rows."""
        adapter = self.adapter
        if adapter is not None:
            adapter = replace(adapter, low=adapter.low[index])
        return replace(self, hidden=self.hidden[index], adapter=adapter)

    def flat(self) -> HeadInput:
        """As rows (T, h)."""
        adapter = self.adapter
        if adapter is not None:
            adapter = replace(adapter, low=adapter.low.reshape(-1, adapter.low.shape[-1]))
        rows = self.hidden.reshape(-1, self.hidden.shape[-1])
        return replace(self, hidden=rows, adapter=adapter)

    def detached(self) -> HeadInput:
        """Without gradient."""
        thin = [x.detach() for x in self._thin()]
        adapter = ProjectedAdapter(*thin) if thin else None
        return HeadInput(self.hidden.detach(), self.weight.detach(), adapter)

    def logits(self) -> torch.Tensor:
        """The product."""
        found = torch.nn.functional.linear(self.hidden, self.weight.to(self.hidden.dtype))
        if self.adapter is not None:
            low = self.adapter.low.to(found.dtype)
            found = found + torch.nn.functional.linear(low, self.adapter.b.to(found.dtype))
        return found

    def mean(self) -> torch.Tensor:
        """Of all logits: the mean row times the mean row of the head."""
        wide = torch.float32 if self.hidden.dtype is not torch.float64 else torch.float64
        pairs = [(self.hidden, self.weight)]
        if self.adapter is not None:
            pairs.append((self.adapter.low, self.adapter.b))
        means = [
            torch.dot(x.reshape(-1, x.shape[-1]).mean(0, dtype=wide), w.mean(0, dtype=wide))
            for x, w in pairs
        ]
        return means[0] if len(means) == 1 else means[0] + means[1]


def trained_copy(head: Any) -> Any:
    """The module that computes in the place of a head which PEFT trains whole; the head itself where
    PEFT does not."""
    if not hasattr(head, "original_module") or not hasattr(head, "modules_to_save"):
        return head
    if head.disable_adapters or not head.active_adapters:
        return head.original_module
    return dict(head.modules_to_save.items()).get(head.active_adapters[0])


def plain_weight(head: Any) -> torch.Tensor | None:
    """The weight of a linear without bias or adapter, a trained copy included; None for others."""
    module = trained_copy(head)
    return module.weight if type(module) is torch.nn.Linear and module.bias is None else None


def reads_head(head: Any) -> bool:
    """Whether a head is of a kind that `read_head` may take."""
    return plain_weight(head) is not None or hasattr(head, "lora_A")


def read_head(head: Any, hidden: torch.Tensor) -> HeadInput | None:
    """What the losses take of a head that gets these hidden states; None for one that must run
    itself."""
    weight = plain_weight(head)
    if weight is not None:
        return HeadInput(hidden, weight)
    found = read_linear(head) if hasattr(head, "lora_A") else None
    if found is None:
        return None
    linear = found.linear
    if not isinstance(linear.weight, torch.Tensor) or linear.bias is not None:
        return None
    if linear.adapter is None:
        return HeadInput(hidden, linear.weight)
    a, b, scaling = linear.adapter.a, linear.adapter.b, linear.adapter.scaling
    x = torch.nn.functional.dropout(hidden, found.dropout) if found.dropout else hidden
    low = torch.nn.functional.linear(x, a.to(x.dtype)) * scaling
    return HeadInput(hidden, linear.weight, ProjectedAdapter(low, b))
