"""A recorded CUDA memory snapshot as a ``Timeline``: streamed, without running code from it.

Records what ``torch.cuda.memory._dump_snapshot`` wrote: the event trace, and the segments as they
were at the end. What was allocated before the recording began is known by its end only and comes
first, as a tensor of its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from typing import Any, BinaryIO

from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.errors import InputError, plain, shown
from napkinmath.base.units import round_up
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment

from napkinmath_profiler.snapshot.streamed_pickle import StreamedPickle

MAX_SIZE = 1 << 48  # bytes; more than any device addresses
NUMBERS = ("addr", "size", "device_free", "total_size", "requested_size", "address")
TRACE_KEYS = ("action", "addr", "size", "frames")
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
LIBRARY_FOLDERS = (
    "/torch/",
    "/site-packages/",
    "/dist-packages/",
    "<frozen",
    "??",
    ".cpp",
    ".cu",
    ".h",
)


@dataclass(slots=True)
class RecordedSnapshot:
    """What a snapshot holds: the timeline, how much was reserved as recorded, and the out-of-memory
    moments."""

    timeline: Timeline
    peak_reserved: int
    end_reserved: int
    settings: dict[str, Any]
    out_of_memory: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_events: int = 0


def read_snapshot(path: str | os.PathLike[str]) -> RecordedSnapshot:
    """Read a ``memory_snapshot.pickle``; raises InputError for what is none, truncated, corrupt or
    wants code run."""
    name = shown(os.fspath(path), limit=200)
    try:
        with _opened(path, name) as file:
            if not os.fstat(file.fileno()).st_size:
                raise InputError(f"{name} is empty; record the snapshot again")
            with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                return read_snapshot_bytes(data, name)
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}; check the path"
        ) from None


def _opened(path: str | os.PathLike[str], name: str) -> BinaryIO:
    """The file, where it is one: opening a pipe would wait for whoever writes into it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise InputError(f"{name} is a folder, a pipe or a device; name a file with a snapshot")
    return open(path, "rb")


def read_snapshot_bytes(data: bytes | mmap, name: str) -> RecordedSnapshot:
    """The same from bytes."""
    builder = _Builder(name)
    snapshot = StreamedPickle(data, name, builder.listen, TRACE_KEYS).load()
    if (
        not isinstance(snapshot, dict)
        or "segments" not in snapshot
        or "device_traces" not in snapshot
    ):
        raise InputError(
            f"{name} is a pickle, but no memory snapshot (no segments and device_traces); dump one"
            " with torch.cuda.memory._dump_snapshot"
        )
    return builder.finish(snapshot)


class _Builder:
    """Turns trace entries into events as they are read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: list[TensorInfo] = []
        self._events: list[tuple[bool, int, Phase]] = []
        self._live: dict[int, int] = {}  # address -> tensor
        self._before: list[int] = []  # tensors that were there before the recording
        self._labels: dict[int, tuple[str, Role, Phase, Any]] = {}
        self._reserved: list[int] = [0]
        self._out_of_memory: list[dict[str, Any]] = []
        self._phase = Phase.FORWARD

    def listen(self, entry: dict[Any, Any]) -> bool:
        """Take a trace entry; leave every other dict."""
        action = entry.get("action")
        if action is None or "size" not in entry:
            return False
        self._require_numbers(entry)
        address = entry.get("addr", 0)
        if action == "alloc":
            self._allocate(address, entry["size"], self._frames(entry))
        elif action in ("free_completed", "free"):
            self._free(address, entry["size"])
        elif action in GROWS:
            self._reserved.append(self._reserved[-1] + entry["size"])
        elif action in SHRINKS:
            self._reserved.append(self._reserved[-1] - entry["size"])
        elif action == "oom":
            self._out_of_memory.append(dict(entry))
        return True

    def _allocate(self, address: int, size: int, frames: list[Any]) -> None:
        label, role, self._phase = self._read_frames(frames)
        if address in self._live:  # the buffer wrapped and lost the free
            self._events.append((False, self._live.pop(address), self._phase))
        self._live[address] = len(self._tensors)
        self._events.append((True, len(self._tensors), self._phase))
        self._tensors.append(_tensor(label, role, size))

    def _free(self, address: int, size: int) -> None:
        index = self._live.pop(address, None)
        if index is None:
            index = len(self._tensors)
            self._tensors.append(_tensor("allocated before the recording", Role.UNEXPLAINED, size))
            self._before.append(index)
        self._events.append((False, index, self._phase))

    def _read_frames(self, frames: list[Any]) -> tuple[str, Role, Phase]:
        found = self._labels.get(id(frames))
        if found is None or found[3] is not frames:
            found = self._labels[id(frames)] = (*_meaning(frames), frames)
        return found[:3]

    def _require_numbers(self, entry: dict[Any, Any]) -> None:
        """Sizes and addresses are whole numbers, and a size is one that memory can have."""
        for key in NUMBERS:
            value = entry.get(key, 0)
            limit = 1 << 64 if key.startswith("addr") else MAX_SIZE
            if type(value) is not int or not 0 <= value < limit:
                raise self._refusal(key, value)

    def _refusal(self, key: str, value: object) -> InputError:
        given = shown(value) if isinstance(value, (str, int, float)) else type(value).__name__
        return InputError(
            f"{self._name} is corrupt: {key} is {given}, which no memory snapshot has; record it"
            " again"
        )

    def _frames(self, entry: dict[Any, Any]) -> list[Any]:
        return self._listed(entry, "frames") if entry.get("frames") else []

    def _listed(self, owner: dict[Any, Any], key: str) -> list[Any]:
        value = owner.get(key, [])
        if type(value) not in (list, tuple):
            raise self._refusal(key, value)
        return value

    def _records(self, owner: dict[Any, Any], key: str) -> list[dict[Any, Any]]:
        """A list of dicts whose numbers are sound."""
        for record in (found := self._listed(owner, key)):
            if type(record) is not dict:
                raise self._refusal(key, record)
            self._require_numbers(record)
        return found

    def _active_blocks(self, segments: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        lists: set[int] = set()  # one list in many segments would be read for ever
        for segment in segments:
            address = segment.get("address", 0)
            blocks = self._records(segment, "blocks")
            if blocks and id(blocks) in lists:
                raise self._refusal("blocks", "shared by segments")
            lists.add(id(blocks))
            for block in blocks:
                if block.get("state") == "active_allocated":
                    yield {"address": address, **block}
                address += block.get("size", 0)

    def finish(self, snapshot: dict[str, Any]) -> RecordedSnapshot:
        """The timeline, with what the segments say was there all along."""
        self._listed(snapshot, "device_traces")
        segments = self._records(snapshot, "segments")
        for block in self._active_blocks(segments):
            if block.get("address") not in self._live:
                size = block.get("requested_size", block.get("size", 0))
                self._before.append(len(self._tensors))
                frames = self._frames(block)
                label, role = (
                    self._read_frames(frames)[:2]
                    if frames
                    else ("allocated before the recording", Role.UNEXPLAINED)
                )
                self._tensors.append(_tensor(label, role, size))
        if not self._tensors and not self._out_of_memory:
            raise InputError(
                f"{self._name}: nothing was recorded; call"
                " torch.cuda.memory._record_memory_history() before the step"
            )
        end_reserved = sum(segment.get("total_size", 0) for segment in segments)
        start = end_reserved - self._reserved[-1]
        settings = snapshot.get("allocator_settings")
        return RecordedSnapshot(
            timeline=Timeline(self._tensors, self._segments(), Stamp(origin="measured")),
            peak_reserved=start + max(self._reserved),
            end_reserved=end_reserved,
            settings=settings if isinstance(settings, dict) else {},
            out_of_memory=self._out_of_memory,
            num_events=len(self._events),
        )

    def _segments(self) -> list[TimelineSegment]:
        found = (
            [
                TimelineSegment(
                    "before the recording",
                    Phase.LOAD,
                    1,
                    [("+", index) for index in self._before],
                    [],
                )
            ]
            if self._before
            else []
        )
        current: Phase | None = None
        for is_birth, index, phase in self._events:
            if phase is not current:
                current = phase
                found.append(TimelineSegment(phase.value, phase, 1, [], []))
            found[-1].events.append(("+" if is_birth else "-", index))
        return found


def _tensor(label: str, role: Role, size: int) -> TensorInfo:
    return TensorInfo(
        label, role, label.partition(" ")[0], size, round_up(size, ALLOCATION_GRANULE)
    )


def _meaning(frames: list[Any]) -> tuple[str, Role, Phase]:
    """What a call stack says: the user's innermost line, and the role and phase of what is
    allocated there."""
    texts = [
        (_text(f, "name"), _text(f, "filename"), f["line"] if type(f.get("line")) is int else 0)
        for f in frames
        if isinstance(f, dict)
    ]
    if texts and texts[0][1] == "napkinmath" and len(texts) > 1:  # a predicted step written by us
        role = next((r for r in Role if r.value == texts[1][0]), Role.UNEXPLAINED)
        return f"{texts[-1][0]} {texts[0][0]}", role, Phase.FORWARD
    own = [frame for frame in texts if not _is_library(frame[1])]
    lines = (f"{file.rpartition('/')[2]}:{line} {name}" for name, file, line in own or texts)
    label = next(lines, "no call stack")
    joined = " ".join(f"{file} {name}" for name, file, _ in texts)
    if "/torch/optim/" in joined or "optimizer" in joined.lower():
        return label, Role.OPTIMIZER, Phase.STEP
    if "_engine_run_backward" in joined or "autograd/engine" in joined or "Engine::" in joined:
        return label, Role.ACTIVATION_GRADIENTS, Phase.BACKWARD
    if "/nn/modules/" in joined or "modeling_" in joined or "forward" in joined:
        return label, Role.ACTIVATIONS, Phase.FORWARD
    return label, Role.UNEXPLAINED, Phase.FORWARD


def _text(frame: dict[str, Any], key: str) -> str:
    value = frame.get(key, "")
    if not isinstance(value, str):
        return ""
    return plain(value)


def _is_library(file: str) -> bool:
    return not file or any(mark in file for mark in LIBRARY_FOLDERS)
