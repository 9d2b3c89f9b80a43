"""Flags over job files: what a file says gives way."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.job_keys import JobKeys, Origin
from napkinmath.inputs.method_options import ADAPTER_OPTIONS, QUANT_OPTIONS
from napkinmath.inputs.option_table import BY_KEY, MODEL_WAYS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def with_flags(merged: dict[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """The options; the origin of one that the command line gives is the command line."""
    keys = merged.get("job_keys")
    if isinstance(keys, JobKeys) and keys.origins:
        flags = (
            Origin(option=key, value=value, file="")
            for key, value in given.items()
            if key in BY_KEY
        )
        kept = (o for o in keys.origins if o.option not in given and o.option in merged)
        merged["job_keys"] = keys.replace(origins=(*flags, *kept))
    return merged


_STEP = ("grad_accum", "global_batch")


def make_way(from_file: dict[str, object], given: Mapping[str, object], notes: list[str]) -> None:
    """Drops what a file says where the command line says something else about the same thing."""
    dropped: list[str] = []
    if any(key in given for key in MODEL_WAYS):
        dropped += [key for key in MODEL_WAYS if key in from_file and key not in given]
    if "method" in given:
        methods = values.listed(given["method"])
        if "full" in methods:
            dropped += [
                key
                for key in (*ADAPTER_OPTIONS, "quant", *QUANT_OPTIONS)
                if key in from_file and key not in given
            ]
        elif "lora" in methods and "quant" not in given:
            dropped += [
                key for key in ("quant", *QUANT_OPTIONS) if key in from_file and key not in given
            ]
    if any(key in given for key in ("data_parallel", "zero")):
        dropped += [
            key for key in ("data_parallel", "zero") if key in from_file and key not in given
        ]
    for one, other in (_STEP, _STEP[::-1]):
        if one in given and other in from_file and other not in given:
            dropped.append(other)
    for key in dropped:
        del from_file[key]
    if dropped:
        notes.append(f"the command line replaces {', '.join(dropped)} of the job file")
