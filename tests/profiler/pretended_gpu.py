"""A pretended GPU: torch.cuda's functions answered over the books of CPU tensors, and every tensor
for "cuda" made on the CPU.

The parts of the programs that only a GPU reaches run on it: events, histories, limits, out of
memory, several GPUs, a MIG slice. Its clock is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from napkinmath.memory.allocator import CachingAllocator
from napkinmath_profiler.measuring import device_memory
from napkinmath_profiler.measuring.device_memory import CpuMemory, CudaMemory
from torch.overrides import TorchFunctionMode

GIB = 1 << 30


class OnCpu(TorchFunctionMode):
    """Calls that name a CUDA device name the CPU instead; nothing is pinned."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device or name in ("device", "__get__"):
            return func(*args, **given)
        if name in ("cuda", "pin_memory"):
            return args[0]
        given = {key: _on_cpu(value) for key, value in given.items() if key != "pin_memory"}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class Event:
    """torch.cuda.Event by the host's clock."""

    def __init__(self, *, enable_timing: bool = False, **_: Any) -> None:
        self.at: float | None = None

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at is not None

    def wait(self, *_: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        assert self.at is not None and other.at is not None
        return (other.at - self.at) * 1e3


class Stream:
    """A stream of which there is only one."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Stream) -> None: ...

    def wait_event(self, _: Event) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    """A captured graph that does nothing when replayed."""

    def replay(self) -> None:
        return None

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What is pretended: so many GPUs alike, of whose memory other processes hold some; torch fails
    beyond ``limit_bytes``."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_bytes: int = 80 * GIB
    busy_bytes: int = GIB // 2
    count: int = 1
    capability: tuple[int, int] = (9, 0)
    limit_bytes: int | None = None


class PretendedGpu:
    """torch.cuda over the books of CPU tensors."""

    def __init__(self, card: Card) -> None:
        self.card, self.books, self.current, self.fraction = (
            card,
            CpuMemory(limit_bytes=card.limit_bytes),
            0,
            1.0,
        )
        self.trace: list[dict[str, Any]] = []
        self.recording = False
        self.num_events = {True: 0, False: 0}
        self._note = self.books._note
        self.books._note = self._noted  # type: ignore[method-assign]

    def _noted(self, is_allocation: bool, address: int, nbytes: int) -> None:
        self._note(is_allocation, address, nbytes)
        self.num_events[is_allocation] += 1
        if self.recording:
            at = time.time_ns() // 1000
            actions = ("alloc",) if is_allocation else ("free_requested", "free_completed")
            self.trace += [
                {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": at}
                for action in actions
            ]

    def stats(self, *_: Any) -> dict[str, Any]:
        books = self.books._allocator
        return {
            "allocation": {
                "all": {"allocated": self.num_events[True], "freed": self.num_events[False]}
            },
            "allocated_bytes": {"all": {"current": books.allocated, "peak": books.peak_allocated}},
            "reserved_bytes": {"all": {"current": books.reserved, "peak": books.peak_reserved}},
            "num_alloc_retries": 0,
        }

    def memory(self, *_: Any) -> tuple[int, int]:
        return (
            self.card.total_bytes - self.card.busy_bytes - self.books._allocator.reserved,
            self.card.total_bytes,
        )

    def properties(self, *_: Any) -> Any:
        major, minor = self.card.capability
        sizes = {
            "total_memory": self.card.total_bytes,
            "multi_processor_count": 132,
            "L2_cache_size": 50 << 20,
            "clock_rate": 1_980_000,
        }
        return SimpleNamespace(name=self.card.name, major=major, minor=minor, uuid="0-0-0", **sizes)

    def record(self, enabled: Any = "all", **_: Any) -> None:
        self.recording = enabled is not None
        if not self.recording:
            self.trace = []

    def snapshot(self, *_: Any) -> dict[str, Any]:
        traces = [
            list(self.trace) if index == self.current else [] for index in range(self.card.count)
        ]
        return {
            "device_traces": traces,
            "segments": list(_segments(self.books._allocator)),
            "allocator_settings": {},
        }

    def choose(self, device: Any) -> None:
        self.current = getattr(device, "index", device) or 0

    @contextmanager
    def chosen(self, device: Any) -> Iterator[None]:
        before = self.current
        self.choose(device)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def in_place(self) -> Iterator[PretendedGpu]:
        with ExitStack() as stack:
            for owner, name, answer in self._answers():
                stack.enter_context(mock.patch.object(owner, name, answer, create=True))
            stack.enter_context(mock.patch.object(device_memory, "_shares", {}))
            device_memory._attach_observer.cache_clear()
            stack.callback(device_memory._attach_observer.cache_clear)
            stack.enter_context(self.books)
            stack.enter_context(OnCpu())
            yield self

    def _answers(self) -> Iterator[tuple[Any, str, Any]]:
        card, books = self.card, self.books._allocator
        values = {
            "is_available": True,
            "device_count": card.count,
            "get_device_name": card.name,
            "get_device_capability": card.capability,
            "init": None,
            "_lazy_init": None,
            "is_initialized": True,
            "synchronize": None,
            "is_current_stream_capturing": False,
            "is_bf16_supported": True,
            "manual_seed": None,
            "manual_seed_all": None,
            "reset_accumulated_memory_stats": None,
        }
        calls = {
            "get_device_properties": self.properties,
            "current_device": lambda: self.current,
            "set_device": self.choose,
            "device": self.chosen,
            "empty_cache": lambda: books.empty_cache() and None,
            "mem_get_info": self.memory,
            "memory_stats_as_nested_dict": self.stats,
            "memory_allocated": lambda *_: books.allocated,
            "memory_reserved": lambda *_: books.reserved,
            "max_memory_allocated": lambda *_: books.peak_allocated,
            "max_memory_reserved": lambda *_: books.peak_reserved,
            "reset_peak_memory_stats": lambda *_: self.books.reset_peaks(),
            "set_per_process_memory_fraction": lambda share, *_: setattr(self, "fraction", share),
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "graph": lambda *_, **__: nullcontext(),
            "stream": lambda _: nullcontext(),
            "current_stream": Stream,
        }
        yield from (
            (torch.cuda, name, lambda *_, value=value, **__: value)
            for name, value in values.items()
        )
        yield from ((torch.cuda, name, call) for name, call in calls.items())
        yield torch.cuda.memory, "_record_memory_history", self.record
        yield torch.cuda.memory, "_snapshot", self.snapshot
        yield torch._C, "_cuda_clearCublasWorkspaces", lambda: None
        yield torch._C, "_cuda_attach_out_of_memory_observer", self._attach
        yield torch.version, "cuda", "13.0"
        yield CudaMemory, "address_of", lambda _, tensor: self.books.address_of(tensor)

    def _attach(self, observe: Any) -> None:
        self.books.on_out_of_memory(
            lambda asked: observe(self.current, asked, self.card.total_bytes, 0)
        )


def _segments(books: CachingAllocator) -> Iterator[dict[str, Any]]:
    for segment in books.segments.values():
        block, blocks = segment.last, []
        while block is not None:
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.size,
                    "state": "inactive" if block.free else "active_allocated",
                    "frames": [],
                }
            )
            block = block.before
        blocks.reverse()
        yield {
            "address": segment.address,
            "device": 0,
            "total_size": segment.size,
            "allocated_size": 0,
            "active_size": 0,
            "requested_size": 0,
            "segment_type": "small" if segment.small else "large",
            "stream": 0,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


@contextmanager
def pretended_gpu(**card: Any) -> Iterator[PretendedGpu]:
    """``torch.cuda`` as if there were what ``Card`` says. Libraries that look for a GPU as they are
    loaded are loaded before."""
    import bitsandbytes
    import peft
    import transformers

    assert bitsandbytes and peft and transformers
    with PretendedGpu(Card(**card)).in_place() as gpu:
        yield gpu
