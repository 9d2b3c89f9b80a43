"""loads: the one reader of JSON that a user gives. A key given twice is an error: the reader of the
standard library would keep its last value and say nothing."""

from __future__ import annotations

from napkinmath.base.errors import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MAX_LEVELS = 64  # as of YAML; how deep Python's own reader goes differs between its releases


class NotJson(ValueError):
    """What is wrong with a text, as the end of a sentence about it, and the way out."""

    def __init__(self, said: str, way_out: str) -> None:
        super().__init__(f"{said}; {way_out}")


def loads(text: str | bytes) -> Any:
    """The value of a JSON text; raises NotJson for a text that is none, that gives a key twice, is
    nested too deeply, or holds a number that cannot be read."""
    import json

    try:
        value = json.loads(text, object_pairs_hook=_without_twins)
        _measure(value)
        return value
    except NotJson:
        raise
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise NotJson(f"is not valid JSON: {error.msg} at {place}", "repair it") from None
    except UnicodeDecodeError as error:
        raise NotJson(f"is not text in UTF-8 (byte {error.start})", "write it anew") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise NotJson(f"holds a number that cannot be read ({reason})", "repair it") from None


def _measure(value: object) -> None:
    """Raises NotJson for a value of more levels than MAX_LEVELS."""
    levels, level = 0, [value]
    while level := [
        held
        for one in level
        if isinstance(one, (dict, list))
        for held in (one.values() if isinstance(one, dict) else one)
        if isinstance(held, (dict, list))
    ]:
        levels += 1
        if levels >= MAX_LEVELS:
            raise _too_deep()


def _too_deep() -> NotJson:
    return NotJson("is nested too deeply", "write plain keys and values")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotJson(f"gives the key {shown(twice)} twice", "keep one")
    return found
