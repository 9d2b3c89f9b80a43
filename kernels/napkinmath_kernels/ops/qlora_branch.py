"""One frozen linear with its LoRA adapter, as the fused QLoRA ops see it: plain functions below the
dispatcher.

    y = x W^T + bias + scaling * dropout(x) A^T B^T

W is decoded into the shared buffer just before the GEMM that needs it, so one decoded weight exists
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..backend import acts_as_gpu
from ..weight_buffer import SHARED_BUFFER
from .dropout import add_dropped, drop
from .nf4 import decode_into
from .stored_weight import StoredWeight

# : Integers that describe one stored weight: how many tensors it has, its shape (out, in), and its
# block sizes.
LAYOUT_WIDTH = 5


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x (..., n) as (rows, n), a view where strides allow."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def weight_tensors(weight: StoredWeight | torch.Tensor) -> list[torch.Tensor]:
    """What a weight stores, in the order that `Branch.stored` expects; a dense weight is itself."""
    return weight.tensors() if isinstance(weight, StoredWeight) else [weight]


def weight_layout(weight: StoredWeight | torch.Tensor) -> list[int]:
    """The integers that go with `weight_tensors`."""
    if isinstance(weight, StoredWeight):
        return [len(weight.tensors()), *weight.shape, *weight.blocks()]
    return [1, *weight.shape, 0, 0]


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * a @ b, in one launch: `addmm` does not read its summand where beta is 0."""
    if scaling == 1.0 or not b.shape[0]:
        return torch.mm(a, b)
    return torch.addmm(b[0], a, b, beta=0, alpha=scaling)


def multiply_to(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, scaling: float = 1.0
) -> torch.Tensor:
    """scaling * a @ b in `dtype`, accumulated and kept in fp32 where `dtype` is fp32 and a is
    not."""
    if dtype is a.dtype:
        return _scaled_product(a, b, scaling)
    if acts_as_gpu(a) and dtype is torch.float32:
        product = torch.mm(a, b, out_dtype=torch.float32)
    else:
        product = torch.mm(a.to(dtype), b.to(dtype))
    return product if scaling == 1.0 else product.mul_(scaling)


class Dropout(NamedTuple):
    """What the adapters' inputs are dropped with during one call."""

    probability: float
    seed: torch.Tensor


def dropout_of(probability: float, seed: torch.Tensor | None) -> Dropout | None:
    """The dropout of an op's flat arguments; None where nothing drops."""
    return Dropout(float(probability), seed) if probability > 0.0 and seed is not None else None


@dataclass(frozen=True, slots=True)
class Branch:
    """A linear as one call sees it. lora_a (r, in) and lora_b (out, r) are empty where there is no
    adapter, bias where there is none; `stream` is its own among those of one seed."""

    stored: Sequence[torch.Tensor]
    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    bias: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float
    stream: int
    has_bias: bool
    has_adapter: bool

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """W (out, in) in `dtype`, valid until the next weight is decoded on this stream."""
        stored = self.stored
        if len(stored) == 1:
            return stored[0] if stored[0].dtype is dtype else stored[0].to(dtype)
        wide = torch.float32 if dtype is torch.float64 else dtype
        out = SHARED_BUFFER.take(self.shape, wide, stored[0].device)
        decode_into(stored, self.blocksize, self.nested_blocksize, out)
        return out if wide is dtype else out.to(dtype)

    def _adapter_input(self, x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
        """dropout(x), or x itself."""
        return x if dropout is None else drop(x, dropout.seed, self.stream, dropout.probability)

    def forward(
        self, x: torch.Tensor, dropout: Dropout | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y (rows, out_features), dropout(x) A^T (rows, r), empty without an adapter).

        The adapter's thin product comes first and the base's product adds to it: a thin product is
        bound by memory, and would read all of y, where the base's reads it behind its own work. What
        is rounded on the way is the small summand.
        """
        dtype = x.dtype
        if not self.has_adapter:
            weight = self.weight(dtype).t()
            if self.has_bias:
                return torch.addmm(_cast(self.bias, dtype), x, weight), x.new_empty(0)
            return torch.mm(x, weight), x.new_empty(0)
        projected = torch.mm(self._adapter_input(x, dropout), _cast(self.lora_a, dtype).t())
        b = _cast(self.lora_b, dtype).t()
        if self.has_bias:
            y = torch.addmm(_cast(self.bias, dtype), projected, b, alpha=self.scaling)
        else:
            y = _scaled_product(projected, b, self.scaling)
        del b
        return y.addmm_(x, self.weight(dtype).t()), projected

    def input_gradient(
        self,
        dy: torch.Tensor,
        through_b: torch.Tensor,
        dx: torch.Tensor | None,
        dropout: Dropout | None,
    ) -> torch.Tensor:
        """dy W + the adapter's part (rows, in), added to dx where there is one."""
        if self.has_adapter and dropout is None:  # the thin product first, as in the forward
            a = _cast(self.lora_a, dy.dtype)
            dx = torch.mm(through_b, a) if dx is None else dx.addmm_(through_b, a)
            del a
        weight = self.weight(dy.dtype)
        dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
        if self.has_adapter and dropout is not None:
            thin = torch.mm(through_b, _cast(self.lora_a, dy.dtype))
            add_dropped(dx, thin, dropout.seed, self.stream, dropout.probability)
        return dx

    def through_b(self, dy: torch.Tensor) -> torch.Tensor:
        """scaling * dy B (rows, r), which both gradients of the adapter's input side start from;
        empty without an adapter."""
        if not self.has_adapter:
            return dy.new_empty(0)
        return _scaled_product(dy, _cast(self.lora_b, dy.dtype), self.scaling)

    def adapter_gradients(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        projected: torch.Tensor,
        through_b: torch.Tensor,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(dA, dB) in the adapter's dtype."""
        d_a = multiply_to(through_b.t(), self._adapter_input(x, dropout), self.lora_a.dtype)
        return d_a, multiply_to(dy.t(), projected, self.lora_b.dtype, self.scaling)


def no_gradients(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What an op returns for an adapter that is absent or not trained."""
    return x.new_empty(0), x.new_empty(0)


def branches(
    stored: Sequence[torch.Tensor],
    layout: Sequence[int],
    biases: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    scalings: Sequence[float],
) -> list[Branch]:
    """The linears that an op's flat arguments describe; each drops by a stream of its own."""
    found: list[Branch] = []
    first = 0
    for i, (bias, a, b, scaling) in enumerate(zip(biases, lora_a, lora_b, scalings, strict=True)):
        count, rows, columns, blocksize, nested_blocksize = layout[
            i * LAYOUT_WIDTH : (i + 1) * LAYOUT_WIDTH
        ]
        part = stored[first : first + count]
        if count > 1:
            part = [tensor.contiguous() for tensor in part]
        first += count
        has = bias.numel() > 0, a.numel() > 0
        sizes = (rows, columns), blocksize, nested_blocksize
        found.append(Branch(part, *sizes, bias, a, b, scaling, i, *has))
    return found
