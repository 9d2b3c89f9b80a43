"""Units: GiB = 2**30 for memory everywhere, GB = 10**9 only for datasheet bandwidth and where a
user's input says so."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KB, MB, GB = 10**3, 10**6, 10**9

_BYTE_SUFFIXES = {
    "": GIB,
    "g": GIB,
    "gib": GIB,
    "gb": GB,
    "m": MIB,
    "mib": MIB,
    "mb": MB,
    "k": KIB,
    "kib": KIB,
    "kb": KB,
    "b": 1,
    "t": GIB << 10,
    "tib": GIB << 10,
    "tb": 10**12,
}
_COUNT_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20}


def _split(text: str) -> tuple[str, str]:
    """'24GiB' -> ('24', 'gib')."""
    text = text.strip().replace("_", "").replace(",", "")
    cut = len(text)
    while cut and not (text[cut - 1].isdecimal() or text[cut - 1] == "."):
        cut -= 1
    return text[:cut], text[cut:].strip().lower()


def parse_bytes(text: str, *, what: str = "size") -> int:
    """'24', '24GiB', '80 GB', '15360MiB' as bytes; a bare number is GiB."""
    number, suffix = _split(text)
    try:
        value = float(number) * _BYTE_SUFFIXES[suffix]
        if not 0 < value < 1 << 60:
            raise ValueError
    except (KeyError, ValueError, OverflowError):
        raise InputError(
            f"{what} {shown(text)} is not a memory size; write e.g. 24, 24GiB, 80GB or 15360MiB"
        ) from None
    return int(value)


def parse_count(text: str, *, what: str, low: int = 1, high: int = 1 << 40) -> int:
    """'2048', '2k' (= 2048) or '1m' as an int within [low, high]."""
    number, suffix = _split(text)
    try:
        value = float(number) * _COUNT_SUFFIXES[suffix]
        if value != int(value):
            raise ValueError
    except (KeyError, ValueError, OverflowError):
        raise InputError(
            f"{what} {shown(text)} is not a whole number; write e.g. 2048 or 2k"
        ) from None
    if not low <= value <= high:
        raise InputError(
            f"{what} {shown(text)} is out of range; give a whole number from {low} to {high}"
        )
    return int(value)


def format_bytes(value: float) -> str:
    """A memory size with a unit that keeps three figures: '172 MiB', '6.42 GiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:,.{_decimals(value / size)}f} {unit}"
    return f"{value:.0f} B"


def format_count(value: float) -> str:
    """6738415616 -> '6.74B'."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(value) >= size:
            return f"{value / size:.{_decimals(value / size)}f}{unit}"
    return f"{value:.0f}"


def format_seconds(value: float) -> str:
    """0.0123 -> '12.3 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:,.{_decimals(value / size)}f} {unit}"
    return f"{value / 1e-6:.2f} us"


def format_hours(seconds: float) -> str:
    """5400 -> '1.50 h', in minutes below an hour, in days from four on."""
    for unit, size, least in (("days", 86400.0, 4 * 86400.0), ("h", 3600.0, 3600.0)):
        if seconds >= least:
            return f"{seconds / size:.{_decimals(seconds / size)}f} {unit}"
    return f"{seconds / 60:.{_decimals(seconds / 60)}f} min"


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return -(-value // multiple) * multiple


def pinned_block(nbytes: int) -> int:
    """What so many bytes of pinned memory take in torch: blocks are powers of two (aten/src/ATen/core
    CachingHostAllocator.h allocate)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
