"""How a config says which kind each layer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from napkinmath.models.layers.learned_replay import CARRIED
from napkinmath.models.learned import layer_key

from napkinmath_profiler.tracing.learning.config_fields import full_config
from napkinmath_profiler.tracing.learning.layer_fields import (
    SIDES,
    decoders_field,
    index_fields,
    layers_field,
    per_layer_fields,
)

LEADS = ("first", "dense", "lead", "start")
PERIODS = ("every", "period", "freq", "step", "interval", "pattern")
"""What fields are called that count the first layers, or say that each n-th layer is another."""


def rules_of(
    whole: Mapping[str, Any], short: Mapping[str, Any], kinds: Sequence[int], num_encoders: int
) -> dict[str, Any]:
    """The rule of the layers; of an encoder and its decoder, one each."""
    if not num_encoders:
        return {"kinds": kinds_rule(whole, short, kinds, layers_field(short))}
    found = [kinds[:num_encoders], kinds[num_encoders:]]
    names = [layers_field(short), decoders_field(short)]
    rules = [
        kinds_rule(whole, _of_side(short, other), part, name)
        for part, name, other in zip(found, names, reversed(SIDES), strict=True)
    ]
    return {"kinds": rules[0], "decoder kinds": rules[1]}


def _of_side(short: Mapping[str, Any], other: str) -> dict[str, Any]:
    """The config without what is said of the other stack's layers alone."""
    counts = (layers_field(short), decoders_field(short))
    return {k: v for k, v in short.items() if k in counts or not k.startswith(other)}


def kinds_rule(
    whole: Mapping[str, Any], short: Mapping[str, Any], kinds: Sequence[int], name: str
) -> dict[str, Any]:
    """The rule by which layers have the kinds that were seen: by the entries of per-layer lists and
    of lists of layers' numbers (`indices`), by a count of first layers (`lead`), by each n-th layer
    (`every`). The last layer may be another (`ends`). `of` is the kind of each key
    (models/learned.py layer_key). Without `of`, the layers are these `kinds` alone."""
    if not name or short[name] != len(kinds):  # it counts something else, as stages do
        return {"count": "", "lead": "", "every": "", "kinds": list(kinds)}
    plain = full_config({"model_type": whole["model_type"]})
    several = len(set(kinds)) > 1
    fields = per_layer_fields(short, short[name]) if several else []
    indices = index_fields(short, short[name]) if several else []
    for lead, every, ends, starts in _counts(short, name, len(kinds)):
        columns = [short[field] for field in fields]
        columns += [[i in short[field] for i in range(len(kinds))] for field in indices]
        of: dict[str, int] = {}
        first, period = short.get(lead), short.get(every)
        last = len(kinds) - 1 if ends else None
        keys = [
            layer_key(columns, i, first, period, last, starts=starts) for i in range(len(kinds))
        ]
        if all(of.setdefault(key, kind) == kind for key, kind in zip(keys, kinds, strict=True)):
            return {
                "count": name,
                "lists": {field: _period(whole[field]) for field in fields},
                "indices": {field: plain.get(field) or [] for field in indices},
                "lead": lead,
                "every": every,
                "ends": ends,
                "starts": starts,
                "defaults": {field: plain.get(field) for field in (lead, every) if field},
                "of": of,
            }
    return {"count": name, "lead": "", "every": "", "kinds": list(kinds)}


def _counts(
    short: Mapping[str, Any], layers: str, count: int
) -> Iterator[tuple[str, str, bool, bool]]:
    """The fields that may count first layers and every n-th, and whether the last or the first layer
    is another, fewest first."""
    small = [k for k, v in short.items() if type(v) is int and 0 < v < count and k != layers]
    small = [k for k in small if not k.endswith("_token_id")]
    leads = [k for k in small if any(word in k for word in LEADS)]
    periods = [k for k in small if any(word in k for word in PERIODS) and short[k] > 1]
    for starts, ends in ((False, False), (False, True), (True, False), (True, True)):
        yield "", "", ends, starts
        yield from ((lead, "", ends, starts) for lead in leads)
        yield from (("", every, ends, starts) for every in periods)
        yield from ((lead, every, ends, starts) for lead in leads for every in periods)


def _period(values: Sequence[Any]) -> list[Any]:
    """The shortest beginning that repeats through a list."""
    for length in range(1, len(values) + 1):
        if all(values[i] == values[i % length] for i in range(len(values))):
            return list(values[:length])
    return list(values)


def carries(variants: Mapping[str, Any]) -> bool:
    """Whether layers read what earlier layers made beside the hidden states."""
    layers = [
        layer for modes in variants.values() for form in modes.values() for layer in form["layers"]
    ]
    return any(name.startswith(CARRIED) for layer in layers for name in layer["inputs"])


def by_kind(layers: Sequence[bool], kinds: Sequence[int]) -> bool | list[bool]:
    """Which kinds of layers are checkpointed, one answer where all are alike."""
    if len(set(layers)) == 1:
        return layers[0]
    return [layers[kinds.index(kind)] for kind in range(max(kinds) + 1)]
