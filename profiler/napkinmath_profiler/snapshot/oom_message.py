"""PyTorch's out-of-memory messages, read into figures: those of CUDA, HIP, XPU, MPS and NPU builds, of
the native allocator and of cudaMallocAsync, from torch 1.0 to 2.14."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import GIB, KIB, MIB, format_bytes

from napkinmath_profiler.snapshot.oom_text import as_plain_text, foreign_kind

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
SIZE = r"([\d.]+)\s*(bytes|[KMGT]i?B|B)\b"
# Where a message begins, and which backend says so.
BEGINS = re.compile(
    r"(?P<backend>CUDA|HIP|XPU|MPS|NPU)\s+(?:backend\s+)?out\s+of\s+memory"
    r"|(?P<asynchronous>Allocation\s+on\s+device)"
    r"|(?P<piece>can\s+NOT\s+allocate\s+memory\s+block)",
    re.IGNORECASE,
)
# What each phrase of the message says.
PHRASES: dict[str, tuple[str, ...]] = {
    "tried": (
        rf"Tried to allocate {SIZE}",
        rf"failed to allocate {SIZE}",
        rf"Requested\s*: {SIZE}",
    ),
    "capacity": (
        rf"total capaci?ty of {SIZE}",
        rf"{SIZE} total capacity",
        rf"Device limit\s*: {SIZE}",
    ),
    "free": (
        rf"of which {SIZE} is free",
        rf"Free \(according to CUDA\)\s*: {SIZE}",
        rf"{SIZE} free",
    ),
    "this_process": (rf"this process has {SIZE} memory in use",),
    "allocated": (
        rf"{SIZE} is allocated by PyTorch",
        rf"{SIZE} already allocated",
        rf"Currently allocated\s*: {SIZE}",
        rf"MPS allocated: {SIZE}",
    ),
    # Free blocks of pools that only a CUDA graph or a MemPool may use; torch counts them among what
    # is allocated (c10/cuda/CUDACachingAllocator.cpp, since 2.4: pytorch PR 124673).
    "private_pools": (rf"with {SIZE} allocated in private pools",),
    # "cached" of torch 1.0 to 1.3 is what the allocator holds beside tensors (pytorch PR 13751)
    "unallocated": (
        rf"{SIZE} is reserved by PyTorch but unallocated",
        rf"{SIZE} reserved but unallocated",
        rf"{SIZE} cached",
    ),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
    "limit": (
        rf"{SIZE} allowed",
        rf"max allowed: {SIZE}",
        rf"PyTorch limit \(set by user-supplied memory fraction\)\s*: {SIZE}",
    ),
    "beside": (rf"other allocations: {SIZE}",),
}
PROCESS = re.compile(rf"Process (\d+) has {SIZE} memory in use", re.IGNORECASE)
GPU = re.compile(r"\b(?:[GN]PU|device)\s+(\d+)", re.IGNORECASE)
RANK = re.compile(r"\[rank(\d+)\]", re.IGNORECASE)
NOT_KNOWN = 1 << 63  # NVML's "not available", and "no limit", print as 2**64 bytes
LONGEST = 4000  # characters of one message; what comes after is another line of the log
ROUNDING = 0.002  # sizes have two decimals, so a sum of five errs by less than this share
MOST_BESIDE = 4 * GIB  # CUDA context, NCCL and libraries of one process; more is another's


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryMessage:
    """Figures of one message in bytes; None where it does not say."""

    tried: int
    capacity: int | None = None
    free: int | None = None
    this_process: int | None = None
    other_processes: int = 0
    allocated: int | None = None
    unallocated: int | None = None
    private_pools: int | None = None
    """Of what is allocated: cached for CUDA graphs or a MemPool, and for no other request."""
    limit: int | None = None
    beside: int | None = None
    """What this process holds outside PyTorch's allocator, where the message says it."""
    kind: str = "cuda"
    """cuda, cuda-async, hip, xpu, mps or npu (Ascend)."""
    rank: int | None = None
    gpu: int | None = None

    @property
    def reserved(self) -> int | None:
        """What PyTorch's allocator holds: tensors and cache."""
        if self.allocated is None or self.unallocated is None:
            return None
        return self.allocated + self.unallocated

    @property
    def outside_pytorch(self) -> int | None:
        """What this process holds beside PyTorch's allocator: the CUDA context, NCCL, other
        libraries."""
        if self.beside is not None:
            return self.beside
        if self.this_process is None or self.reserved is None:
            return None
        return max(0, self.this_process - self.reserved)

    @property
    def paged_to_host(self) -> int:
        """Bytes held above the GPU's capacity, which only the host's memory can back."""
        held = self.reserved if self.reserved is not None else self.allocated
        if held is None or self.capacity is None or held <= self.capacity * (1 + ROUNDING):
            return 0
        return held - self.capacity

    @property
    def room(self) -> int | None:
        """What PyTorch's allocator of this process could hold at most; None where the message names
        no capacity."""
        outside = self.outside_pytorch or 0
        if self.capacity is None:
            return None if self.limit is None else max(0, self.limit - outside)
        left = max(0, self.capacity - self.other_processes - outside)
        return left if self.limit is None else min(left, self.limit)

    @property
    def missing(self) -> int | None:
        """Bytes short of the request if every cached byte could be used for it."""
        free = self.free
        if free is None and self.kind == "mps" and None not in (self.limit, self.allocated):
            free = max(0, self.limit - self.allocated - (self.beside or 0))  # type: ignore[operator]
        if free is None:
            return None
        return max(0, self.tried - free - (self.unallocated or 0))


def read_message(text: str) -> OutOfMemoryMessage:
    """The figures of the first message in a pasted text; raises InputError as `read_messages`."""
    return read_messages(text)[0]


def read_messages(text: str) -> list[OutOfMemoryMessage]:
    """The messages in a pasted text or log, each once, by rank.

    Raises InputError for a text without one, and for figures that contradict one another.
    """
    plain = as_plain_text(text)
    begins = list(BEGINS.finditer(plain))
    ends = [match.start() for match in begins[1:]] + [len(plain)] * bool(begins)
    found = [
        _read(plain[match.start() : min(end, match.start() + LONGEST)], match, plain)
        for match, end in zip(begins, ends, strict=True)
    ]
    if not begins and foreign_kind(plain) is None:
        found = [_read(plain, None, plain)]
    messages = list(dict.fromkeys(message for message in found if message is not None))
    if not messages:
        raise InputError(_no_message(text, plain))
    for message in messages:
        _check(message)
    return sorted(messages, key=lambda message: -1 if message.rank is None else message.rank)


def _no_message(text: str, plain: str) -> str:
    quoted = shown(" ".join(text.split()))
    foreign = foreign_kind(plain)
    if foreign is not None:
        return f"{quoted} is {foreign}"
    return (
        f"{quoted} is no CUDA out-of-memory message with its figures (no 'Tried to allocate'"
        " with a size); paste the whole error line"
    )


def _read(part: str, begin: re.Match[str] | None, whole: str) -> OutOfMemoryMessage | None:
    """The figures of one message; None where it names no request."""
    found = {key: _first(patterns, part) for key, patterns in PHRASES.items()}
    tried = found["tried"]
    if tried is None:
        return None
    allocated, reserved = found["allocated"], found["reserved"]
    if found["unallocated"] is None and reserved is not None and allocated is not None:
        if allocated > reserved * (1 + ROUNDING):
            raise _contradiction("PyTorch allocated", allocated, "PyTorch reserved", reserved)
        found["unallocated"] = max(0, reserved - allocated)
    line = "" if begin is None else whole[whole.rfind("\n", 0, begin.start()) + 1 : begin.start()]
    ranks, gpu = RANK.findall(line), GPU.search(part)
    processes = [_bytes(size, unit) for _, size, unit in PROCESS.findall(part)]
    message = OutOfMemoryMessage(
        tried=tried,
        capacity=found["capacity"],
        free=found["free"],
        this_process=found["this_process"],
        allocated=allocated,
        unallocated=found["unallocated"],
        private_pools=found["private_pools"],
        limit=found["limit"],
        beside=found["beside"],
        kind=_kind(begin),
        rank=int(ranks[-1]) if ranks else None,
        gpu=int(gpu.group(1)) if gpu else None,
    )
    return _by_process(message, [size for size in processes if size < NOT_KNOWN])


def _kind(begin: re.Match[str] | None) -> str:
    if begin is None:
        return "cuda"
    if begin["asynchronous"]:
        return "cuda-async"
    return "xpu" if begin["piece"] else begin["backend"].lower()


def _by_process(message: OutOfMemoryMessage, processes: list[int]) -> OutOfMemoryMessage:
    """The processes, kept apart: in a container the driver's ids are not the ones the run knows, so
    that PyTorch lists the run itself as "Process N"."""
    own, reserved = message.this_process, message.reserved
    if own is not None and (own == 0 or (reserved is not None and own < reserved / 2)):
        message, own = replace(message, this_process=None), 0  # NVML gave no figure; it is in there
    if own is None and reserved is not None:
        least = reserved * (1 - ROUNDING)
        fitting = [size for size in processes if least <= size <= reserved + MOST_BESIDE]
        if fitting:
            processes.remove(min(fitting))
            message = replace(message, this_process=min(fitting))
    return replace(message, other_processes=sum(processes))


def _check(message: OutOfMemoryMessage) -> None:
    """Raises InputError for figures that cannot all be true.

    More than the capacity may be held where nothing is free: Windows' driver then pages to the
    host's memory, and so does managed memory.
    """
    capacity, free = message.capacity, message.free or 0
    if capacity is None:
        return
    if not capacity:
        raise InputError(
            "the message gives the GPU a capacity of 0 bytes; paste the line as PyTorch printed it"
        )
    if free > capacity * (1 + ROUNDING):
        raise _contradiction("free", free, "the capacity", capacity)
    held = message.this_process or message.reserved or message.allocated or 0
    used = held + message.other_processes
    if free > ROUNDING * capacity and used + free > capacity * (1 + ROUNDING):
        raise _contradiction("in use and free", used + free, "the capacity", capacity)


def _contradiction(what: str, value: int, than: str, most: int) -> InputError:
    return InputError(
        f"the message contradicts itself: {what} {format_bytes(value)} is more than {than},"
        f" {format_bytes(most)}; paste it as PyTorch printed it"
    )


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern.replace(" ", r"\s+"), text, re.IGNORECASE)
        if match:
            size = _bytes(match.group(1), match.group(2))
            return size if size < NOT_KNOWN else None
    return None


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * UNITS[unit.lower()])
    except (ValueError, OverflowError):  # '1.2.3', and digits beyond what a float holds
        raise InputError(
            f"{shown(number)} {unit} is no size; paste the message as PyTorch printed it"
        ) from None
