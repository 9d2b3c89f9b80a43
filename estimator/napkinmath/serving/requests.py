"""What a request may ask: the flags of the command line that name no file, each of a known kind;
everything else is refused."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.base.json_input import NotJson, loads
from napkinmath.inputs.option_table import BY_KEY, OPTIONS, keys_at, nearest
from napkinmath.inputs.option_table.option import COUNT, ON, PAGE, SWITCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.inputs.option_table.option import Option

MAX_BODY_BYTES = 64 * 1024  # of a config.json most
MAX_TEXT = 200
MAX_GPUS = 4
MAX_TOKENS = 1 << 24  # batch, context: beyond it a page has no use for the answer
KNOWN = keys_at(PAGE)
_OPTIONS = tuple(option for option in OPTIONS if option.key in KNOWN)
ON_ONLY = frozenset(option.key for option in _OPTIONS if option.kind == ON)
"""Switches that are not given where they are off."""
SWITCHES = frozenset(option.key for option in _OPTIONS if option.kind == SWITCH) | ON_ONLY
NUMBERS = frozenset(option.key for option in _OPTIONS if option.kind == COUNT)
WORDS = KNOWN - SWITCHES - NUMBERS - {"model", "gpu"}


def options_of(body: bytes, *, more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The options that a JSON body asks for, `more` being words that this answer takes besides;
    raises InputError for anything else."""
    if len(body) > MAX_BODY_BYTES:
        raise InputError(f"a request of {len(body)} bytes is too large; at most {MAX_BODY_BYTES}")
    try:
        given = loads(body)
    except NotJson as error:
        raise InputError(f"the request {str(error)[:120]}") from error
    if not values.is_mapping(given):
        raise InputError("the request is not a JSON object of options")
    asked = values.mapping(given, "request").items()
    found = {
        name: value
        for name, value in asked
        if value not in (None, "") and (value is not False or name in SWITCHES - ON_ONLY)
    }
    return {
        name: _text(name, value) if name in more else _value(name, value)
        for name, value in found.items()
    }


def _value(name: str, value: Any) -> Any:
    if name not in KNOWN:
        raise InputError(
            f"option {shown(name)} is not one of the page's{nearest(str(name), PAGE)}; leave it out"
        )
    if name == "config":
        if not values.is_mapping(value):
            raise InputError(f"config {shown(value)} is not an object; give a model's config.json")
        return value
    if name == "model":
        return _catalogued(value)
    if name == "gpu":
        return _gpus(value)
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise InputError(f"{name} {shown(value)} is not true or false")
        return value
    if name in NUMBERS:
        return _count(BY_KEY[name], value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _text(name, f"{value}" if is_number else value)


def _count(option: Option, value: Any) -> str:
    """A whole number, or the text of one, within what a page has a use for."""
    low, most = int(option.low), option.page_high or min(MAX_TOKENS, int(option.high))
    if isinstance(value, str):
        value = values.count(_text(option.key, value), option.key, low=low, high=most)
    found = values.whole(value)
    if found is None or not low <= found <= most:
        raise InputError(f"{option.key} {shown(value)} is not a whole number from {low} to {most}")
    return str(found)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InputError(f"{name} {shown(value)} is not a short text")
    return value


def _catalogued(value: object) -> str:
    """A model by its catalogued name only: a path or a hub id would be a way from a request to the
    file system or the network."""
    from napkinmath.catalog.models import find_row, unknown_model

    row = find_row(_text("model", value))
    if row is None:
        said = str(unknown_model(str(value))).partition(" (a config.json")[0]
        said = said.partition("; see `")[0].replace(" is unknown", " is not in the catalogue")
        raise InputError(
            f"{said}; the page takes catalogued names, your own config.json, or bare"
            " numbers (--arch among the further options)"
        )
    return str(row["name"])


def _gpus(value: Any) -> list[str]:
    names = values.listed(value)
    if len(names) > MAX_GPUS:
        raise InputError(f"{len(names)} GPUs are too many to compare; at most {MAX_GPUS}")
    return [_text("gpu", name) for name in names]
