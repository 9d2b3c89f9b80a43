"""JSON without `import json`, whose modules bring `re` along: 10 of the 80 ms that the cold command
takes.

CPython's own accelerators do the work, as they do for `json` itself; where another interpreter has
none, `json` does.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SEPARATORS = (": ", ", ")


class _Scanning:
    """What the accelerated scanner reads its settings from: those of json.JSONDecoder()."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def loads(text: str) -> Any:
    """The value of a JSON text, as json.loads gives it; ValueError where it is none."""
    try:
        from _json import make_scanner
    except ImportError:
        import json

        return json.loads(text)
    text = text.strip(" \t\n\r")
    try:
        value, end = make_scanner(_Scanning)(text, 0)  # type: ignore[arg-type]  # typeshed asks for the scanner itself
    except StopIteration:
        raise ValueError(f"JSON text expects a value: {text[:40]!r}") from None
    if end != len(text):
        raise ValueError(f"JSON text has extra data at {end}: {text[end : end + 40]!r}")
    return value


def dumps(value: object) -> str:
    """The value as ASCII JSON, as json.dumps(value, allow_nan=False) writes it; TypeError or
    ValueError where it cannot."""
    try:
        from _json import encode_basestring_ascii, make_encoder
    except ImportError:
        import json

        return json.dumps(value, allow_nan=False)
    encoder = make_encoder(
        {}, _refuse, encode_basestring_ascii, None, *SEPARATORS, False, False, False
    )
    return "".join(encoder(value, 0))


def _refuse(value: object) -> object:
    raise TypeError(f"Object of type {value.__class__.__name__} is not JSON serializable")
