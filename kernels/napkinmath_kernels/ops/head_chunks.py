"""What the losses of a head without its logits share: chunks of rows, their buffer, and the products
that make logits and gradients of them, with or without an adapter on the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backend import acts_as_gpu
from .linear_group import LoraAdapter

DEFAULT_CHUNK_BYTES = 256 * 2**20
#: Chunks are whole multiples of this many rows, the tile of a large GEMM.
ROW_MULTIPLE = 128
# : Rows of the buffer are padded to a multiple of this, so that its kernel's accesses are 16 bytes
# wide for any vocabulary.
COLUMN_MULTIPLE = 64


def padded_columns(vocabulary: int) -> int:
    """Columns of the buffer that holds a chunk of logits."""
    return -(-vocabulary // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def rows_per_chunk(num_rows: int, vocabulary: int, itemsize: int, chunk_bytes: int) -> int:
    """Rows whose logits fit `chunk_bytes`: a multiple of 128 where that many fit, never less than
    one or more than there are."""
    rows = max(1, chunk_bytes // (padded_columns(vocabulary) * itemsize))
    if rows >= ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE
    return max(1, min(rows, num_rows))


def gradient_lift(
    hidden: torch.Tensor, weight: torch.Tensor, is_mean: bool, weight_gradient: bool
) -> float:
    """A power of two that the gradients of fp16 hidden states are held times, known from shapes and
    types alone; 1 for other types.

    A fourth of the rows at most, so that few valid targets among many ignored ones overflow
    nothing. None where a sum is not divided, or where d weight is fp16 too: of many tokens it would
    overflow.
    """
    if (
        hidden.dtype is not torch.float16
        or not is_mean
        or (weight_gradient and weight.dtype is torch.float16)
    ):
        return 1.0
    return float(2 ** max(0, hidden.shape[0].bit_length() - 3))


class WeightGradient:
    """Sums d weight over chunks, in fp32 where there is more than one: bf16 sums would round once a
    chunk."""

    def __init__(
        self, weight: torch.Tensor, dtype: torch.dtype, num_chunks: int, lift: float
    ) -> None:
        self._lift = lift
        wide = dtype in (torch.bfloat16, torch.float16) and (
            num_chunks > 1 or weight.dtype is torch.float32
        )
        self._sum = torch.empty(
            weight.shape, dtype=torch.float32 if wide else dtype, device=weight.device
        )
        self._is_empty = True
        self._dtype = weight.dtype

    def add(self, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        """sum += gradient^T hidden."""
        left, first = gradient.t(), self._is_empty
        self._is_empty = False
        if self._sum.dtype is gradient.dtype:
            self._sum.addmm_(left, hidden, beta=0 if first else 1)
        elif acts_as_gpu(gradient):
            torch.ops.aten.addmm.dtype_out(
                self._sum, left, hidden, torch.float32, beta=0 if first else 1, out=self._sum
            )
        else:
            self._sum.addmm_(left.float(), hidden.float(), beta=0 if first else 1)

    def result(self) -> torch.Tensor:
        """The sum in the weight's dtype."""
        if self._is_empty:
            self._sum.zero_()
        if self._lift != 1.0:
            self._sum.mul_(1.0 / self._lift)
        return self._sum.to(self._dtype)


def logits_buffer(like: torch.Tensor, rows: int, vocabulary: int) -> torch.Tensor:
    """Room for the logits of so many rows, in the type of `like`."""
    # oneDNN's bf16 GEMM reads the padding of an odd number of columns; the kernels write it
    allocate = torch.empty if acts_as_gpu(like) else torch.zeros
    shape = (rows, padded_columns(vocabulary))
    return allocate(shape, dtype=like.dtype, device=like.device)[:, :vocabulary]


@dataclass(frozen=True, eq=False)
class ProjectedAdapter:
    """An adapter on a head whose first product is made: `low` (..., r), scaled, and b (v, r)."""

    low: torch.Tensor
    b: torch.Tensor


def adapter_term(
    rows: torch.Tensor, adapter: LoraAdapter | ProjectedAdapter | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(low (T, r), b (v, r)) of hidden states (T, h), whose product is added to the logits; both
    empty without an adapter."""
    if adapter is None:
        return rows.new_empty(0, 0), rows.new_empty(0, 0)
    if isinstance(adapter, ProjectedAdapter):
        return adapter.low.reshape(rows.shape[0], -1).to(rows.dtype), adapter.b
    low = torch.nn.functional.linear(rows, adapter.a.to(rows.dtype)) * adapter.scaling
    return low, adapter.b


class HeadTerm:
    """Hidden states times a head, one addend of the logits, with its gradients; `kept` are the rows
    that count."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        kept: torch.Tensor | None,
        num_chunks: int,
        lift: float,
        has: tuple[bool, bool],
    ) -> None:
        self._shape, self._kept = hidden.shape, kept
        self.rows = hidden if kept is None else hidden.index_select(0, kept)
        self.head = weight.to(hidden.dtype)
        self._d_rows = (
            torch.empty(self.rows.shape, dtype=hidden.dtype, device=hidden.device)
            if has[0]
            else None
        )
        self._sums = WeightGradient(weight, hidden.dtype, num_chunks, lift) if has[1] else None

    def add(self, gradient: torch.Tensor, first: int, last: int) -> None:
        """Both gradients' part of a chunk whose logits have become their gradient."""
        if self._d_rows is not None:
            torch.mm(gradient, self.head, out=self._d_rows[first:last])
        if self._sums is not None:
            self._sums.add(gradient, self.rows[first:last])

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(d hidden, d weight), empty where not asked for."""
        nothing = self.rows.new_empty(0)
        d_hidden = nothing if self._d_rows is None else self._d_rows
        if self._d_rows is not None and self._kept is not None:
            zeros = torch.zeros(self._shape, dtype=d_hidden.dtype, device=d_hidden.device)
            d_hidden = zeros.index_copy_(0, self._kept, d_hidden)
        return d_hidden, nothing.clone() if self._sums is None else self._sums.result()


class HeadTerms:
    """The logits of chunks of rows: hidden states times the head and, with an adapter, its second
    product on top; and the four gradients."""

    def __init__(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        kept: torch.Tensor | None,
        num_chunks: int,
        lift: float,
        has: list[bool],
    ) -> None:
        hidden, weight, low, low_weight = tensors
        self._terms = [HeadTerm(hidden, weight, kept, num_chunks, lift, (has[0], has[1]))]
        if low.numel() or low_weight.numel():
            self._terms.append(HeadTerm(low, low_weight, kept, num_chunks, lift, (has[2], has[3])))

    def logits(self, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """Those of rows `first` to `last`, in `out`."""
        own, *others = self._terms
        logits = torch.mm(own.rows[first:last], own.head.t(), out=out)
        for term in others:
            logits.addmm_(term.rows[first:last], term.head.t())
        return logits

    def add(self, gradient: torch.Tensor, first: int, last: int) -> None:
        """All gradients' part of a chunk whose logits have become their gradient."""
        for term in self._terms:
            term.add(gradient, first, last)

    def results(self) -> list[torch.Tensor]:
        """[d hidden, d weight, d low, d low's weight], empty where not asked for."""
        found = [x for term in self._terms for x in term.results()]
        return found + [found[0].new_empty(0) for _ in range(4 - len(found))]


def fake_results(
    tensors: tuple[torch.Tensor, ...], has: list[bool], like: torch.Tensor
) -> list[torch.Tensor]:
    """Shapes of `HeadTerms.results`."""
    return [
        x.new_empty(x.shape if asked else (0,), dtype=x.dtype if asked else like.dtype)
        for x, asked in zip(tensors, has, strict=True)
    ]
