"""One frozen linear with its LoRA adapter, as the fused QLoRA ops see it: plain functions below the
dispatcher.

    y = x W^T + bias + scaling * dropout(x) A^T B^T

W is decoded into the shared buffer just before the GEMM that needs it, so one decoded weight exists
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..backend import acts_as_gpu
from ..weight_buffer import SHARED_BUFFER
from .dropout import add_dropped, drop
from .nf4 import QuantizedWeight, decode_into

# : Integers that describe one stored weight: how many tensors it has, its shape (out, in), and its
# block sizes.
LAYOUT_WIDTH = 5


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x (..., n) as (rows, n), a view where strides allow."""
    return x.reshape(-1, x.shape[-1])


def weight_tensors(weight: QuantizedWeight | torch.Tensor) -> list[torch.Tensor]:
    """What a weight stores, in the order that `Branch.stored` expects; a dense weight is itself."""
    return weight.tensors() if isinstance(weight, QuantizedWeight) else [weight]


def weight_layout(weight: QuantizedWeight | torch.Tensor) -> list[int]:
    """The integers that go with `weight_tensors`."""
    if isinstance(weight, QuantizedWeight):
        return [len(weight.tensors()), *weight.shape, weight.blocksize, weight.nested_blocksize]
    return [1, *weight.shape, 0, 0]


def multiply_to(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, scaling: float = 1.0
) -> torch.Tensor:
    """scaling * a @ b in `dtype`, accumulated and kept in fp32 where `dtype` is fp32 and a is
    not."""
    if dtype is a.dtype:
        product = torch.mm(a, b)
    elif acts_as_gpu(a) and dtype is torch.float32:
        product = torch.mm(a, b, out_dtype=torch.float32)
    else:
        product = torch.mm(a.to(dtype), b.to(dtype))
    return product if scaling == 1.0 else product.mul_(scaling)


@dataclass(frozen=True)
class Branch:
    """A linear during one call. lora_a (r, in) and lora_b (out, r) are empty where there is no
    adapter, bias where there is none."""

    stored: Sequence[torch.Tensor]
    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    bias: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float
    probability: float
    seed: torch.Tensor | None
    stream: int

    @property
    def has_adapter(self) -> bool:
        """True if there is a LoRA adapter."""
        return self.lora_a.numel() > 0

    @property
    def drops(self) -> bool:
        """True if the adapter's input goes through dropout."""
        return self.probability > 0.0 and self.seed is not None and self.has_adapter

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """W (out, in) in `dtype`, valid until the next weight is decoded on this stream."""
        if len(self.stored) == 1:
            return self.stored[0].to(dtype)
        wide = torch.float32 if dtype is torch.float64 else dtype
        out = SHARED_BUFFER.take(self.shape, wide, self.stored[0].device)
        decode_into(self.stored, self.blocksize, self.nested_blocksize, out)
        return out.to(dtype)

    def adapter_input(self, x: torch.Tensor) -> torch.Tensor:
        """dropout(x), or x itself."""
        return (
            drop(x, self.seed, self.stream, self.probability)
            if self.drops and self.seed is not None
            else x
        )

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes y into `out` (rows, out_features); returns dropout(x) A^T (rows, r), empty without
        an adapter."""
        weight = self.weight(x.dtype).t()
        if self.bias.numel():
            torch.addmm(self.bias.to(x.dtype), x, weight, out=out)
        else:
            torch.mm(x, weight, out=out)
        if not self.has_adapter:
            return x.new_empty(0)
        projected = torch.mm(self.adapter_input(x), self.lora_a.to(x.dtype).t())
        out.addmm_(projected, self.lora_b.to(x.dtype).t(), alpha=self.scaling)
        return projected

    def input_gradient(
        self, dy: torch.Tensor, through_b: torch.Tensor, dx: torch.Tensor, *, add: bool
    ) -> None:
        """Writes dy W + the adapter's part into dx (rows, in), or adds it."""
        weight = self.weight(dy.dtype)
        if add:
            dx.addmm_(dy, weight)
        else:
            torch.mm(dy, weight, out=dx)
        if not self.has_adapter:
            return
        a = self.lora_a.to(dy.dtype)
        if self.drops and self.seed is not None:
            add_dropped(dx, torch.mm(through_b, a), self.seed, self.stream, self.probability)
        else:
            dx.addmm_(through_b, a)

    def through_b(self, dy: torch.Tensor) -> torch.Tensor:
        """scaling * dy B (rows, r), which both gradients of the adapter's input side start from;
        empty without an adapter."""
        if not self.has_adapter:
            return dy.new_empty(0)
        return torch.mm(dy, self.lora_b.to(dy.dtype)).mul_(self.scaling)

    def adapter_gradients(
        self, dy: torch.Tensor, x: torch.Tensor, projected: torch.Tensor, through_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(dA, dB) in the adapter's dtype."""
        d_a = multiply_to(through_b.t(), self.adapter_input(x), self.lora_a.dtype)
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
    probability: float,
    seed: torch.Tensor | None,
) -> list[Branch]:
    """The linears that an op's flat arguments describe; each drops by a stream of its own."""
    found: list[Branch] = []
    first = 0
    for i in range(len(lora_a)):
        count, rows, columns, blocksize, nested_blocksize = layout[
            i * LAYOUT_WIDTH : (i + 1) * LAYOUT_WIDTH
        ]
        part = stored[first : first + count]
        first += count
        shape = (rows, columns)
        found.append(
            Branch(
                part,
                shape,
                blocksize,
                nested_blocksize,
                biases[i],
                lora_a[i],
                lora_b[i],
                scalings[i],
                probability,
                seed,
                i,
            )
        )
    return found
