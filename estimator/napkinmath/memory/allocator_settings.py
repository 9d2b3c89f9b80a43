"""What PYTORCH_ALLOC_CONF can change of the caching allocator."""

from __future__ import annotations

from napkinmath.base.cuda import LARGE_SEGMENT
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.base.units import MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UNLIMITED = 1 << 150  # above any step of counts up to 2^40
# In place of bytes: what the small pool's events change between those of the large one; a rename.
BOOKED, CUT, RENAMED = -1, -2, -3


class AllocatorSettings(Record):
    """What PYTORCH_ALLOC_CONF (formerly PYTORCH_CUDA_ALLOC_CONF) can change, and the memory there
    is."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0
    """Share of the memory limit above which old cached segments are returned; acts only under a
    limit."""
    large_segment_bytes: int = LARGE_SEGMENT
    limit_bytes: int = UNLIMITED

    def validate(self) -> None:
        if self.max_split_bytes < LARGE_SEGMENT:
            raise InputError(
                f"max_split_size_mb:{self.max_split_bytes // MIB} is too small; PyTorch accepts"
                " values above 20"
            )
        if self.roundup_power2_divisions & (self.roundup_power2_divisions - 1):
            raise InputError(
                f"roundup_power2_divisions:{self.roundup_power2_divisions} is not a power of two;"
                " use 1, 2, 4, 8, ..."
            )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise InputError(
                f"garbage_collection_threshold:{self.garbage_collection_threshold} is not a share;"
                " use 0 < x < 1"
            )


def parse_settings(text: str, *, limit_bytes: int = UNLIMITED) -> AllocatorSettings:
    """'expandable_segments:True,max_split_size_mb:128' as settings; raises InputError quoting an
    unknown or malformed entry."""
    values: dict[str, Any] = {"limit_bytes": limit_bytes}
    for entry in filter(None, (e.strip() for e in text.split(","))):
        key, _, value = (part.strip() for part in entry.partition(":"))
        if (key, value) == ("backend", "native"):
            continue
        if key not in _ENTRIES:
            raise InputError(
                f"allocator setting {shown(entry)} is not modelled; known: expandable_segments,"
                " max_split_size_mb, roundup_power2_divisions, garbage_collection_threshold,"
                " large_segment_size_mb, backend:native"
            )
        field, read = _ENTRIES[key]
        try:
            values[field] = read(value)
        except (KeyError, ValueError):
            raise InputError(
                f"allocator setting {shown(entry)} has no valid value; write e.g."
                " expandable_segments:True or max_split_size_mb:128"
            ) from None
    return AllocatorSettings(**values)


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _mebibytes(text: str) -> int:
    return int(text) * MIB


# Name in PYTORCH_ALLOC_CONF -> (field, what reads its value).
_ENTRIES: dict[str, tuple[str, Callable[[str], object]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", int),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
}
