"""Recorded allocator histories, replayed: peaks and segments of the recording beside those of the
allocator's rules.

Two recorders write `events.jsonl.gz`. Rows of this campaign (`measured.save_events`) hold
attributed events; rows of the other recorder (`foreign_rows`) hold PyTorch's own entries with
addresses and microseconds, the segments that were there before, and the figures at each phase's
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napkinmath.memory.allocator import CachingAllocator
from napkinmath.memory.allocator_settings import parse_settings
from napkinmath.memory.blocks import AllocatorBlock
from napkinmath_profiler.tracing.storage_events import TracePhase

from campaign_parts.foreign_rows import case_name
from campaign_parts.ledger import Row, compressed_rows

EVENTS = "events.jsonl.gz"
FREED = (
    "free_completed",
    "free",
)  # a block can be taken again from here on, not from where its return was requested
BUILDING = "building"
SETUP = TracePhase.SETUP.value


@dataclass(frozen=True, slots=True)
class Booking:
    """A block booked or returned: whose it is, the bytes asked for, and in which part of the
    recording."""

    is_allocation: bool
    key: int
    nbytes: int
    part: int


@dataclass(frozen=True, slots=True)
class History:
    """A recorded case: its bookings in order, its parts (phases, in their order), what was recorded
    of them."""

    case: str
    bookings: tuple[Booking, ...]
    parts: tuple[str, ...]
    peaks: tuple[tuple[int, int] | None, ...]
    """Peak allocated and reserved bytes of each part where the recorder noted them."""
    segments: tuple[int, ...] = ()
    """Sizes of the segments that the allocator asked the device for, in order, where they were
    recorded."""
    held_before: tuple[int, ...] = ()
    """Bytes asked for by the blocks that were booked before the recording began."""
    emptied: frozenset[int] = frozenset()
    """Numbers of the bookings before which segments went back to the device: the cache was
    emptied."""
    attributed_only: frozenset[int] = frozenset()
    """Parts of which blocks are known and segments are not: they came before the allocator's own
    history was switched on."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The same under the allocator's rules."""

    allocated: int
    reserved: int
    peaks: tuple[tuple[int, int], ...]
    segments: tuple[int, ...]

    def first_other_segment(self, recorded: Sequence[int]) -> int | None:
        """The place of the first segment that is of another size than the recorded one; None where
        all are the same."""
        for place, (ours, theirs) in enumerate(zip(self.segments, recorded, strict=False)):
            if ours != theirs:
                return place
        return (
            None if len(self.segments) == len(recorded) else min(len(self.segments), len(recorded))
        )


def read_histories(folder: Path) -> Iterator[History]:
    """The histories of a folder of results, of either recorder; of a case recorded twice the later
    one."""
    found: dict[str, History] = {}
    for row in compressed_rows(folder / EVENTS):
        history = (
            _of_the_other_recorder(row) if "segments_at_start" in row else _of_the_campaign(row)
        )
        found[history.case] = history
    yield from found.values()


def replayed(history: History, settings: str = "") -> Replayed:
    """What the allocator's rules book and hold over the history, under the settings of
    PYTORCH_ALLOC_CONF."""
    books = CachingAllocator(parse_settings(settings))
    segments: list[int] = []
    blocks: dict[int, AllocatorBlock] = {}
    for nbytes in history.held_before:
        books.malloc(nbytes)
    peaks = [(0, 0)] * len(history.parts)
    part = history.bookings[0].part if history.bookings else 0
    allocated = reserved = 0
    for number, booking in enumerate(history.bookings):
        if number in history.emptied:
            books.empty_cache()
        if booking.part != part:
            peaks[part] = _higher(peaks[part], (books.peak_allocated, books.peak_reserved))
            books.peak_allocated, books.peak_reserved, part = (
                books.allocated,
                books.reserved,
                booking.part,
            )
        if booking.is_allocation:
            before = books.reserved
            blocks[booking.key] = books.malloc(booking.nbytes)
            if books.reserved != before and booking.part not in history.attributed_only:
                segments.append(blocks[booking.key].segment.size)
        elif booking.key in blocks:
            books.free(blocks.pop(booking.key))
    if peaks:
        peaks[part] = _higher(peaks[part], (books.peak_allocated, books.peak_reserved))
    steps = [peak for name, peak in zip(history.parts, peaks, strict=True) if name != BUILDING]
    for peak in steps:
        allocated, reserved = _higher((allocated, reserved), peak)
    return Replayed(allocated, reserved, tuple(peaks), tuple(segments))


def _higher(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


def _of_the_campaign(row: Row) -> History:
    bookings = tuple(
        Booking(storage >= 0, storage if storage >= 0 else -1 - storage, nbytes, phase)
        for storage, nbytes, phase, *_ in row["events"]
        if nbytes
    )
    grown = tuple(entry[2] for entry in row.get("allocator", ()) if entry[0] == "segment_alloc")
    parts = tuple(row["phases"])
    built = frozenset(number for number, name in enumerate(parts) if name == SETUP)
    return History(row["case"], bookings, parts, (None,) * len(parts), grown, attributed_only=built)


def _of_the_other_recorder(row: Row) -> History:
    """Parts are what went before the first step, and the phases of each step by the microsecond at
    which they ended."""
    ended: list[tuple[int, str, tuple[int, int]]] = []
    for number, name in enumerate(("step0", "step1")):
        for phase in row[name]:
            ended.append(
                (
                    phase["unix_us"],
                    f"{phase['phase']} {number}",
                    (phase["peak_allocated"], phase["peak_reserved"]),
                )
            )
    first = row["step0"][0]
    begun = first["unix_us"] - round(first["seconds"] * 1e6)
    borders = [begun, *(at for at, _, _ in ended)]
    bookings: list[Booking] = []
    emptied: set[int] = set()
    part = 0
    for action, address, nbytes, _stream, at in row["events"]:
        while part < len(ended) and at is not None and at > borders[part]:
            part += 1
        if action == "alloc" or action in FREED:
            bookings.append(Booking(action == "alloc", address, nbytes, part))
        elif action == "segment_free":
            emptied.add(len(bookings))
    grown = tuple(entry[2] for entry in row["events"] if entry[0] == "segment_alloc")
    return History(
        case_name(row["case"]),
        tuple(bookings),
        (BUILDING, *(name for _, name, _ in ended)),
        (None, *(peaks for _, _, peaks in ended)),
        grown,
        tuple(_booked(row["segments_at_start"])),
        frozenset(emptied),
    )


def _booked(segments: Sequence[dict[str, Any]]) -> Iterator[int]:
    for segment in segments:
        for _address, size, requested, state in segment["blocks"]:
            if state == "active_allocated":
                yield requested or size
