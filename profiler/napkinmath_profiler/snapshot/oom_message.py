"""PyTorch's CUDA out-of-memory messages, read into figures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import GIB, KIB, MIB

UNITS = {
    "bytes": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": KIB * GIB,
    "tb": KIB * GIB,
    "kb": KIB,
    "mb": MIB,
    "gb": GIB,
}
SIZE = r"([\d.]+)\s*(bytes|[KMGT]i?B|B)"
# What each phrase of the message says; wordings of torch 1.x to 2.13, and of HIP builds.
PHRASES: dict[str, tuple[str, ...]] = {
    "tried": (rf"Tried to allocate {SIZE}", rf"failed to allocate {SIZE}"),
    "capacity": (rf"total capacity of {SIZE}", rf"{SIZE} total capacity"),
    "free": (rf"of which {SIZE} is free", rf"{SIZE} free"),
    "this_process": (rf"this process has {SIZE} memory in use",),
    "allocated": (
        rf"Of the allocated memory {SIZE} is allocated by PyTorch",
        rf"{SIZE} already allocated",
    ),
    "unallocated": (
        rf"{SIZE} is reserved by PyTorch but unallocated",
        rf"{SIZE} reserved but unallocated",
    ),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
    "limit": (rf"{SIZE} allowed",),
    "pools": (rf"with {SIZE} allocated in private pools",),
}
OTHER_PROCESS = re.compile(rf"Process (\d+) has {SIZE} memory in use", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OutOfMemoryMessage:
    """Figures of one message in bytes; None where it does not say."""

    tried: int
    capacity: int | None
    free: int | None
    this_process: int | None
    other_processes: int
    allocated: int | None
    unallocated: int | None
    limit: int | None

    @property
    def outside_pytorch(self) -> int | None:
        """What this process holds beside PyTorch's allocator: the CUDA context, NCCL, other
        libraries."""
        if None in (self.this_process, self.allocated, self.unallocated):
            return None
        return max(0, self.this_process - self.allocated - self.unallocated)  # type: ignore[operator]

    @property
    def room(self) -> int | None:
        """What PyTorch's allocator of this process could hold at most; None where the message names
        no capacity."""
        if self.capacity is None:
            return self.limit
        left = max(0, self.capacity - self.other_processes - (self.outside_pytorch or 0))
        return left if self.limit is None else min(left, self.limit)

    @property
    def missing(self) -> int | None:
        """Bytes short of the request if every cached byte could be used for it."""
        if self.free is None:
            return None
        return max(0, self.tried - self.free - (self.unallocated or 0))


def read_message(text: str) -> OutOfMemoryMessage:
    """The figures of a pasted message; raises InputError for text that is none."""
    found = {key: _first(patterns, text) for key, patterns in PHRASES.items()}
    if found["tried"] is None:
        raise InputError(
            f"{shown(' '.join(text.split()))} is no CUDA out-of-memory message (no 'Tried to"
            " allocate'); paste the whole error line"
        )
    unallocated = found["unallocated"]
    if unallocated is None and found["reserved"] is not None and found["allocated"] is not None:
        unallocated = max(0, found["reserved"] - found["allocated"])
    return OutOfMemoryMessage(
        tried=found["tried"],
        capacity=found["capacity"],
        free=found["free"],
        this_process=found["this_process"],
        other_processes=sum(_bytes(size, unit) for _, size, unit in OTHER_PROCESS.findall(text)),
        allocated=found["allocated"],
        unallocated=unallocated,
        limit=found["limit"],
    )


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            return _bytes(match.group(1), match.group(2))
    return None


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * UNITS[unit.lower()])
    except (ValueError, OverflowError):  # '1.2.3', and digits beyond what a float holds
        raise InputError(
            f"{shown(number)} {unit} is no size; paste the message as PyTorch printed it"
        ) from None
