"""Weights that several layers share: the first layer's own, tied in the others."""

from __future__ import annotations

from napkinmath.ir.ledger import Value, Weight
from napkinmath.ir.tape import Tape

CAST = "cast of "


def share_casts(t: Tape, shared: dict[str, Value], weights: list[Weight]) -> None:
    """Publishes autocast's copies of the weights, which it keeps until the forward is over
    (ATen/autocast_mode.cpp cached_cast); a recomputation makes its own."""
    if t.policy.autocast is None or t.policy.recomputes:
        return
    for weight in weights:
        cast = t.casts.get((id(weight.value), t.policy.autocast))
        if cast is not None:
            shared[f"{CAST}{weight.kind} {weight.tied_to or weight.path}"] = cast


def take_casts(t: Tape, shared: dict[str, Value], owner: str) -> None:
    """Declares the weights of which an earlier layer has made autocast's copies."""
    path, dtype = t.module, t.policy.autocast
    if dtype is None or not owner:
        return
    for name, cast in list(shared.items()):
        kind, _, weight_path = name.removeprefix(CAST).rpartition(" ")
        leaf = weight_path.removeprefix(f"{owner}.")
        if not name.startswith(CAST) or leaf == weight_path:
            continue
        module, _, last = f"{path}.{leaf}".rpartition(".")
        with t.scope(module.removeprefix(path).removeprefix(".")):
            weight = t.weight(last, cast.axes, kind=kind)
        t.casts[id(weight.value), dtype] = cast


def tie(weight: Weight, path: str, owner: str) -> None:
    """Makes a weight of the module at `path` the owner's."""
    weight.tied_to = owner + weight.path.removeprefix(path)
