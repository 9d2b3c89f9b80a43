"""Single values as people write them, in a flag (text) or a job file (typed): each parser quotes
what it cannot understand."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.units import parse_bytes, parse_count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enum import Enum
    from typing import TypeVar

    Choice = TypeVar("Choice", bound=Enum)

_ON = ("true", "on", "yes", "1")
_OFF = ("false", "off", "no", "0", "none")


def count(value: object, what: str, *, low: int = 1, high: int = 1 << 40) -> int:
    """A whole number: 4, 4.0, '4', '2k' (= 2048)."""
    if isinstance(value, str):
        refuse_several(value, what)
        return parse_count(value, what=what, low=low, high=high)
    found = whole(value)
    if found is None:
        raise InputError(f"{what} {shown(value)} is not a whole number; write e.g. 2048 or 2k")
    if not low <= found <= high:
        raise InputError(
            f"{what} {shown(value)} is out of range; give a whole number from {low} to {high}"
        )
    return found


def whole(value: object) -> int | None:
    """4 and 4.0 as 4; None for what is no whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object, what: str, *, low: float = 0.0, high: float = 1.0) -> float:
    """A number in [low, high]."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        found = float(value)
    except (ValueError, OverflowError):
        raise InputError(
            f"{what} {shown(value)} is not a number; give one from {low:g} to {high:g}"
        ) from None
    if not low <= found <= high:
        raise InputError(
            f"{what} {shown(value)} is out of range; give a number from {low:g} to {high:g}"
        )
    return found


def draft(value: object, what: str) -> tuple[int, float]:
    """(tokens drafted at a time, the share of them that is accepted), written 3:0.7."""
    tokens, _, share = str(value).partition(":")
    if not share:
        raise InputError(
            f"{what} {shown(value)} says no share that is accepted; write e.g. 3:0.7, three tokens"
            " of which seven in ten are"
        )
    return count(tokens, what, high=64), number(share, what, low=0.0, high=0.99)


def price(value: object, what: str) -> float:
    """Money: a number, which a sign of a currency may precede."""
    given = value.strip().lstrip("$€£¥") if isinstance(value, str) else value
    return number(given, what, low=0.0, high=1e6)


def switch(value: object, what: str) -> bool:
    """True or false: a YAML boolean or on/off, true/false, yes/no."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _ON or text in _OFF:
        return text in _ON
    raise InputError(f"{what} {shown(value)} is neither on nor off; write true or false")


def text(value: object, what: str) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{what} {shown(value)} is not a name; write a word")
    return value.strip()


def listed(value: object) -> list[object]:
    """A list's or tuple's items; anything else as a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def is_mapping(value: object) -> bool:
    """Whether a value of a job file holds keys and values."""
    return isinstance(value, dict)


def mapping(value: object, what: str) -> dict[str, object]:
    """A mapping with its keys as text."""
    if not isinstance(value, dict):
        raise InputError(f"{what} {shown(value)} is not a mapping; write keys and values")
    return {str(key): item for key, item in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def names(value: object, what: str) -> tuple[str, ...]:
    """Names separated by commas, or a list of them."""
    items: list[object] = [*value.split(",")] if isinstance(value, str) else listed(value)
    found = tuple(
        text(item, what) for item in items if not (isinstance(item, str) and not item.strip())
    )
    if not found:
        raise InputError(f"{what} {shown(value)} names nothing; write e.g. q_proj,v_proj")
    return found


def size(value: object, what: str) -> int:
    """A memory size in bytes; a bare number is GiB."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InputError(
            f"{what} {shown(value)} is not a memory size; write e.g. 24, 24GiB, 80GB or 15360MiB"
        )
    return parse_bytes(str(value), what=what)


def choice(
    value: object, kinds: type[Choice], what: str, aliases: dict[str, str] | None = None
) -> Choice:
    """A member of an enumeration by its value; case, '_' and '-' do not matter."""
    given = text(value, what)
    refuse_several(given, what)
    key = given.lower().replace("_", "-")
    for member in kinds:
        if member.value == (aliases or {}).get(key, key):
            return member
    known = [str(member.value) for member in kinds]
    near = suggest(key, [*known, *(aliases or {})])
    raise InputError(f"{what} {shown(given)} is unknown; use one of {', '.join(known)}{near}")


def refuse_several(value: str, what: str) -> None:
    """Raises InputError for a list or a range, of which only a sweep takes each member."""
    if "," in value.strip(","):
        raise InputError(
            f"{what} {shown(value)} has several values; give one, or use `estimate sweep`"
        )
    first, *rest = value.split(":")
    if rest and all(part.isdecimal() for part in (first, *rest)):
        raise InputError(
            f"{what} {shown(value)} is a range; give one value, or {first}..{':'.join(rest)} to"
            " `estimate sweep`"
        )
