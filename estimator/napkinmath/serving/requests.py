"""What a request may ask: the flags of the command line that name no file, each of a known kind;
everything else is refused."""

from __future__ import annotations

import json

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BODY_BYTES = 16 * 1024
MAX_TEXT = 200
MAX_GPUS = 4
MAX_TOKENS = 1 << 24  # batch, context: beyond it a page has no use for the answer
MAX_MICRO_STEPS = 1024  # each is replayed

SWITCHES = frozenset(
    (
        "double_quant",
        "kbit",
        "clip",
        "reentrant",
        "eval",
        "compile",
        "packing",
        "pinned",
        "rslora",
        "optimizer_in_backward",
        "reference",
        "train_mode",
    )
)
ON_ONLY = frozenset(("eval", "train_mode"))  # switched off they are not given
NUMBERS = frozenset(
    (
        "bs",
        "ctx",
        "grad_accum",
        "rank",
        "nodes",
        "zero",
        "tp",
        "pp",
        "cp",
        "ep",
        "virtual_tokens",
        "adapters",
        "group_size",
        "completion",
        "eval_bs",
        "generate",
        "alpha",
        "global_batch",
    )
)
WORDS = frozenset(
    (
        "arch",
        "method",
        "gpus",
        "data_parallel",
        "targets",
        "adapter_dtype",
        "quant",
        "precision",
        "optimizer",
        "checkpointing",
        "attention",
        "loss",
        "kernels",
        "stack",
        "offload",
        "vram",
        "mig",
        "dropout",
        "workload",
        "teacher",
        "train_modules",
        "freeze",
        "display",
        "allocator",
        "pp_schedule",
    )
)
KNOWN = frozenset(("model", "gpu")) | SWITCHES | NUMBERS | WORDS


def options_of(body: bytes, *, more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The options that a JSON body asks for, `more` being words that this answer takes besides;
    raises InputError for anything else."""
    if len(body) > MAX_BODY_BYTES:
        raise InputError(f"a request of {len(body)} bytes is too large; at most {MAX_BODY_BYTES}")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON ({str(error)[:80]})") from error
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
            f"option {shown(name)} is not one of the page's{suggest(str(name), sorted(KNOWN))}"
        )
    if name == "model":
        return _catalogued(value)
    if name == "gpu":
        return _gpus(value)
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise InputError(f"{name} {shown(value)} is not true or false")
        return value
    if name in NUMBERS:
        most = MAX_MICRO_STEPS if name == "grad_accum" else MAX_TOKENS
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputError(f"{name} {shown(value)} is not a whole number from 1 to {most}")
        return str(value)
    return _text(name, value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise InputError(f"{name} {shown(value)} is not a short text")
    return value


def _catalogued(value: object) -> str:
    """A model by its catalogued name only: a path or a hub id would be a way from a request to the
    file system or the network."""
    from napkinmath.catalog.models import find_row

    row = find_row(_text("model", value))
    if row is None:
        raise InputError(
            f"model {shown(value)} is not in the catalogue; the page takes catalogued names, or"
            " bare numbers: --arch among the further options"
        )
    return str(row["name"])


def _gpus(value: Any) -> list[str]:
    names = values.listed(value)
    if len(names) > MAX_GPUS:
        raise InputError(f"{len(names)} GPUs are too many to compare; at most {MAX_GPUS}")
    return [_text("gpu", name) for name in names]
