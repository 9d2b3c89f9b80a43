"""One buffer a stream that every frozen weight is decoded into, in turn, so that a step never holds
two decoded weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


class WeightBuffer:
    """Grows to the largest weight asked of it and is handed out again and again.

    Keyed by device, dtype and stream: work on one stream is ordered, so a GEMM that reads the
    buffer is over before the next decode writes it. What is handed out is valid until the next
    `take` on that stream. While a CUDA graph is captured a buffer is made for that one decode
    instead, in the graph's own memory: replays would go on writing to a buffer that has been let go
    of.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
        self._views: dict[Any, torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of `shape` that shares the buffer; its content is undefined."""
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return torch.empty(tuple(shape), dtype=dtype, device=device)
            stream = torch.cuda.current_stream(device).cuda_stream
        place = (tuple(shape), dtype, device, stream)
        view = self._views.get(place)
        if view is not None:
            return view
        key = (device, dtype, stream)
        length = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < length:
            buffer = None
            self._views.clear()
            self._buffers.pop(key, None)  # free the smaller one before making the larger
            buffer = self._buffers[key] = torch.empty((length,), dtype=dtype, device=device)
        self._views[place] = buffer[:length].view(tuple(shape))
        return self._views[place]

    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def release(self) -> None:
        """Lets go of every buffer."""
        self._views.clear()
        self._buffers.clear()


#: The buffer that the ops of this package use.
SHARED_BUFFER = WeightBuffer()
