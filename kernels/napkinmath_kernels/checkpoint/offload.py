"""Layer inputs that wait for the backward in host memory: copied out on a side stream, and back one
layer ahead of need."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KernelInputError


@dataclass(eq=False)
class _Parked:
    """A tensor in host memory, and on its way back once asked for."""

    host: torch.Tensor
    device: torch.device
    copied: torch.cuda.Event | None
    back: torch.Tensor | None = None
    ready: torch.cuda.Event | None = None


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """What has been done when the stream has come this far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class _Ticket:
    """What the graph keeps in place of a parked tensor; when it goes, with a backward or without
    one, so does the tensor."""

    def __init__(self, store: HostStore, number: int, requires_grad: bool) -> None:
        self.fetch = lambda: store.fetch(number).requires_grad_(requires_grad)
        weakref.finalize(self, store.forget, number).atexit = False


class HostStore:
    """Parks tensors in pinned host buffers, which are kept and reused from step to step.

    On CUDA the copies run on a stream of the store's own: out while the next layer computes, back
    for layer i - 1 when layer i asks for its own. On a CPU a copy is a copy, so that the same code
    can be tested. A store serves one model on one device.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._parked: dict[int, _Parked] = {}
        self._numbers = itertools.count()
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            HostStore,
            (),
        )  # a copy of a model starts with an empty store: streams, events and what is parked are of this one

    @property
    def num_parked(self) -> int:
        """Tensors that wait in host memory."""
        return len(self._parked)

    def num_bytes(self) -> int:
        """Bytes of host memory held, used and free."""
        held = [parked.host for parked in self._parked.values()] + [
            x for free in self._free.values() for x in free
        ]
        return sum(x.numel() * x.element_size() for x in held)

    def _buffer(self, x: torch.Tensor) -> torch.Tensor:
        free = self._free.get((x.shape, x.dtype))
        return (
            free.pop()
            if free
            else torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        )

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def park(self, x: torch.Tensor) -> int:
        """Copies x out; returns the number to fetch it by."""
        host = self._buffer(x)
        copied: torch.cuda.Event | None = None
        if x.is_cuda:
            stream = self._side_stream(x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                host.copy_(x, non_blocking=True)
                copied = _event(stream)
            x.record_stream(
                stream
            )  # the allocator must not hand x's memory out before the copy has read it
        else:
            host.copy_(x)
        number = next(self._numbers)
        self._parked[number] = _Parked(host, x.device, copied)
        return number

    def _start_back(self, parked: _Parked) -> None:
        if parked.back is not None:
            return
        if parked.device.type != "cuda":
            parked.back = parked.host.clone()
            return
        stream = self._side_stream(parked.device)
        with torch.cuda.stream(stream):
            if parked.copied is not None:
                stream.wait_event(parked.copied)
            parked.back = torch.empty(
                parked.host.shape, dtype=parked.host.dtype, device=parked.device
            )
            parked.back.copy_(parked.host, non_blocking=True)
            parked.ready = _event(stream)

    def fetch(self, number: int) -> torch.Tensor:
        """The parked tensor on its device; starts the copy of the one parked before it, which the
        backward asks for next."""
        parked = self._parked.get(number)
        if parked is None:
            raise KernelInputError(
                "HostStore",
                "a second backward over one forward",
                "one backward a forward",
                "Recompute.FULL",
            )
        self._start_back(parked)
        previous = max(
            (other for other in list(self._parked) if other < number), default=None
        )  # a copy: tickets go at any time
        if previous is not None:
            self._start_back(self._parked[previous])
        assert parked.back is not None
        if parked.ready is not None:
            current = torch.cuda.current_stream(parked.device)
            current.wait_event(parked.ready)
            parked.back.record_stream(current)
        self._release(number, parked)
        return parked.back

    def forget(self, number: int) -> None:
        """Gives the buffer of a tensor back that no backward asked for: a step that was broken off,
        a loss that was only looked at."""
        parked = self._parked.get(number)
        if parked is not None:
            self._release(number, parked)

    def _release(self, number: int, parked: _Parked) -> None:
        del self._parked[number]
        self._free.setdefault((parked.host.shape, parked.host.dtype), []).append(parked.host)

    def hooks(self, boundary: torch.Tensor) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks that park `boundary`, wherever it is saved inside, and leave every other tensor
        alone."""

        address, shape = (
            boundary.data_ptr(),
            boundary.shape,
        )  # not the tensor itself: these hooks live as long as the graph
        del boundary

        def pack(x: torch.Tensor) -> torch.Tensor | _Ticket:
            if x.data_ptr() != address or x.shape != shape or not x.numel():
                return x
            return _Ticket(self, self.park(x.detach()), x.requires_grad)

        def unpack(packed: Any) -> torch.Tensor:
            return packed.fetch() if isinstance(packed, _Ticket) else packed

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
