"""One view of a device's allocator: its figures, its position in the sequence of events, its
history.

``CudaMemory`` asks PyTorch. ``CpuMemory`` keeps the books that the CUDA allocator would keep for
the same storages, so that every program that reads a GPU's allocator runs, and is tested, without
one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from napkinmath.memory.allocator import CachingAllocator, ReplayOutOfMemory
from napkinmath.memory.allocator_settings import AllocatorSettings
from napkinmath.memory.blocks import AllocatorBlock
from torch.utils._python_dispatch import TorchDispatchMode

MAX_HISTORY_ENTRIES = (
    4_000_000  # some 100 bytes each in the allocator; of more, the oldest are dropped
)
Frames = list[dict[str, Any]]


class BlockEvent(NamedTuple):
    """A block booked or returned by the allocator: its address, the bytes asked for, the Python
    stack where recorded."""

    is_allocation: bool
    address: int
    nbytes: int
    frames: Frames


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes now and at their peaks since the last reset; ``device_used`` is the whole GPU's, other
    processes included."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    device_used: int | None = None
    device_total: int | None = None
    num_retries: int = 0


class CudaMemory:
    """PyTorch's caching allocator on one GPU."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # before that the allocator has no figures
        number = cast("int | None", device.index)  # torch's stub says int
        self.device = (
            device if number is not None else torch.device("cuda", torch.cuda.current_device())
        )
        self._start = 0
        self._share_before = 1.0
        self.recorded: dict[str, Any] | None = None
        """PyTorch's own snapshot as the last history ended."""
        self.num_dropped = 0
        """Events of the last history that were too many to be kept, its oldest."""

    def __enter__(self) -> CudaMemory:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """The allocator knows every tensor already."""

    def address_of(self, tensor: torch.Tensor) -> int:
        """Where ``tensor``'s storage begins; 0 if it is not on this device."""
        return tensor.untyped_storage().data_ptr() if tensor.device == self.device else 0

    def figures(self) -> MemoryFigures:
        """Allocated, reserved, device; costs some tens of microseconds and no synchronization."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return MemoryFigures(
            allocated=allocated["current"],
            reserved=reserved["current"],
            peak_allocated=allocated["peak"],
            peak_reserved=reserved["peak"],
            device_used=total - free,
            device_total=total,
            num_retries=int(stats["num_alloc_retries"]),
        )

    def peaks(self) -> tuple[int, int]:
        """Peak allocated and reserved bytes since the last reset."""
        return self._both("peak")

    def current(self) -> tuple[int, int]:
        """Allocated and reserved bytes now."""
        return self._both("current")

    def _both(self, which: str) -> tuple[int, int]:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats["allocated_bytes"]["all"][which], stats["reserved_bytes"]["all"][which]

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def position(self) -> int:
        """How many events the history has recorded so far: allocations and frees, counted by the
        allocator itself."""
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)["allocation"]["all"]
        return counts["allocated"] + counts["freed"] - self._start

    @contextmanager
    def history(self, *, stacks: bool = False) -> Generator[list[BlockEvent]]:
        """Record every event inside the block; yields a list that is filled when the block ends."""
        events: list[BlockEvent] = []
        context = "all" if stacks else None
        torch.cuda.memory._record_memory_history(
            enabled="all",
            context=context,
            stacks="python",
            max_entries=MAX_HISTORY_ENTRIES,
            device=self.device,
        )
        self._start = 0
        self._start = self.position()
        try:
            yield events
        finally:
            self.recorded = snapshot = _snapshot(self.device)
            torch.cuda.memory._record_memory_history(enabled=None, device=self.device)
            events.extend(block_events(snapshot["device_traces"][self.device.index or 0]))
            self.num_dropped = max(0, self.position() - len(events))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def on_out_of_memory(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Have ``call`` receive the bytes asked for whenever memory runs out, before the error is
        raised; the result ends that."""
        _attach_observer()
        listener = (self.device.index, call)
        _exhaustion_listeners.append(listener)
        return lambda: _exhaustion_listeners.remove(listener)

    def release(self) -> None:
        """Give cached segments and cuBLAS workspaces back to the device."""
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def limit(self, share: float) -> None:
        """Never hold more than ``share`` of what is free now."""
        self._share_before = hold_to_bytes(
            self.device, share * torch.cuda.mem_get_info(self.device)[0]
        )

    def unlimit(self) -> None:
        """Take back what ``limit`` set: the share that was there before holds again."""
        _set_share(self.device, self._share_before)


_shares: dict[int | None, float] = {}


def hold_to_bytes(device: torch.device, nbytes: float) -> float:
    """Have torch refuse more than ``nbytes`` beyond what it holds of a GPU, and never more than it
    was allowed; the share that was there before."""
    before = _shares.get(device.index, 1.0)
    total = torch.cuda.mem_get_info(device)[1]
    _set_share(device, min(before, (torch.cuda.memory_reserved(device) + nbytes) / total))
    return before


def _set_share(device: torch.device, share: float) -> None:
    _shares[device.index] = share
    torch.cuda.set_per_process_memory_fraction(share, device)


_exhaustion_listeners: list[tuple[int, Callable[[int], None]]] = []


@cache
def _attach_observer() -> None:
    """PyTorch keeps an observer for good, and with it all that it knows: the one it is given knows
    a list."""

    def observe(device: int, nbytes: int, _limit: int, _free: int) -> None:
        for index, call in list(_exhaustion_listeners):
            if index == device:
                call(nbytes)

    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
    attach(observe)


def _snapshot(device: torch.device) -> dict[str, Any]:
    return dict(torch.cuda.memory._snapshot(device))


def block_events(trace: Iterable[dict[str, Any]]) -> list[BlockEvent]:
    """The allocator's bookings and returns among the entries of a snapshot's device trace, in
    order.

    A return counts when it is requested: then the allocator's count of allocations drops, whichever
    stream the block waits for.
    """
    return [
        BlockEvent(
            entry["action"] == "alloc", entry["addr"], entry["size"], entry.get("frames") or []
        )
        for entry in trace
        if entry["action"] in ("alloc", "free_requested")
    ]


class CpuMemory(TorchDispatchMode):
    """The books of a CUDA caching allocator over the storages of CPU tensors made inside the block,
    and those adopted.

    ``limit_bytes`` makes it raise ``torch.OutOfMemoryError`` as the CUDA allocator would.
    """

    kind = "cpu"

    def __init__(
        self, settings: AllocatorSettings | None = None, *, limit_bytes: int | None = None
    ) -> None:
        super().__init__()
        if limit_bytes is not None:
            settings = (settings or AllocatorSettings()).replace(limit_bytes=limit_bytes)
        self.device = torch.device("cpu")
        self._allocator = CachingAllocator(settings)
        self._blocks: dict[int, tuple[AllocatorBlock, int]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._recording: list[BlockEvent] | None = None
        self._num_events = self._start = 0
        self._is_closed = False
        self.num_dropped = 0
        self._observers: list[Callable[[int], None]] = []
        self.recorded: dict[str, Any] | None = None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self._references.clear()
        super().__exit__(exc_type, exc, trace)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and book the storages it made."""
        out = func(*args, **(kwargs or {}))
        self.adopt(_tensors(out))
        return out

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Book storages that are not in the books yet."""
        for tensor in tensors:
            if tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._references or not storage.nbytes():
                continue
            try:
                block = self._allocator.malloc(storage.nbytes())
            except ReplayOutOfMemory as full:
                for call in list(self._observers):
                    call(storage.nbytes())
                raise torch.OutOfMemoryError(
                    f"CPU stand-in for CUDA out of memory. {str(full).replace('tried', 'Tried', 1)}"
                ) from None
            self._blocks[key] = (block, storage.nbytes())
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._returned(key))
            self._note(True, block.address, storage.nbytes())

    def _returned(self, key: int) -> None:
        if self._is_closed:
            return
        self._references.pop(key, None)
        found = self._blocks.pop(key, None)
        if found is not None:
            block, nbytes = found
            self._note(False, block.address, nbytes)
            self._allocator.free(block)

    def _note(self, is_allocation: bool, address: int, nbytes: int) -> None:
        self._num_events += 1
        if self._recording is not None:
            self._recording.append(BlockEvent(is_allocation, address, nbytes, []))

    def on_out_of_memory(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Have ``call`` receive the bytes asked for whenever memory runs out, before the error is
        raised; the result ends that."""
        self._observers.append(call)
        return lambda: self._observers.remove(call)

    def address_of(self, tensor: torch.Tensor) -> int:
        """The address under which ``tensor``'s storage is booked; 0 if it is not."""
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        return found[0].address if found else 0

    def figures(self) -> MemoryFigures:
        """As the CUDA allocator would give them."""
        books = self._allocator
        return MemoryFigures(
            allocated=books.allocated,
            reserved=books.reserved,
            peak_allocated=books.peak_allocated,
            peak_reserved=books.peak_reserved,
        )

    def peaks(self) -> tuple[int, int]:
        """Peak allocated and reserved bytes since the last reset."""
        return self._allocator.peak_allocated, self._allocator.peak_reserved

    def current(self) -> tuple[int, int]:
        """Allocated and reserved bytes now."""
        return self._allocator.allocated, self._allocator.reserved

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        self._allocator.peak_allocated, self._allocator.peak_reserved = (
            self._allocator.allocated,
            self._allocator.reserved,
        )

    def position(self) -> int:
        """How many events the history has recorded so far."""
        return self._num_events - self._start

    @contextmanager
    def history(self, *, stacks: bool = False) -> Generator[list[BlockEvent]]:
        """Record every event inside the block."""
        self._recording, self._start = [], self._num_events
        events: list[BlockEvent] = []
        try:
            yield events
        finally:
            events.extend(self._recording)
            self._recording = None

    def synchronize(self) -> None:
        """A CPU has done its work when the call returns."""

    def release(self) -> None:
        """Nothing is cached."""

    def limit(self, share: float) -> None:
        """The books are limited when they are made."""

    def unlimit(self) -> None:
        """Books keep the limit that they were made with."""


def _tensors(out: Any) -> Iterable[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, (tuple, list)):
        return [t for item in out for t in _tensors(item)]
    return ()


DeviceMemory = CudaMemory | CpuMemory


def device_memory(device: torch.device) -> DeviceMemory:
    """The books of ``device``."""
    return CudaMemory(device) if device.type == "cuda" else CpuMemory()
