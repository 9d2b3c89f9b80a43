"""What a frozen weight is stored as: what every packed format of the fused ops has in common."""

from __future__ import annotations

import torch


class StoredWeight:
    """A frozen weight of `shape` in fewer bits; `dtype` is what it is decoded to by default. A
    format's tensors are known by their number."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensors(self) -> list[torch.Tensor]:
        """What is stored, in a fixed order."""
        raise NotImplementedError

    def blocks(self) -> tuple[int, int]:
        """The two sizes of blocks that the decoder needs beside the tensors."""
        raise NotImplementedError

    def num_bytes(self) -> int:
        """Bytes of everything stored."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
