"""In which layer each operation of a recorded forward runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from napkinmath_profiler.tracing.learning.forward_recorder import RecordedOp


def places(ops: Sequence[RecordedOp], stacks: Sequence[str], model: nn.Module) -> list[int | None]:
    """The number of each operation's layer in the lists of these paths, counted through all of them;
    None outside. A module that layers share (an activation) has the first one's name: it is renamed
    to the layer under way."""
    first = {name for name, _ in model.named_modules()}
    others = {name for name, _ in model.named_modules(remove_duplicate=False)} - first
    found: list[int | None] = [None] * len(ops)
    before = 0
    for layers in stacks:
        under_way = 0
        for index, op in enumerate(ops):
            place = _number(op.module, layers)
            if place is not None and place < under_way:
                own = f"{layers}.{under_way}{op.module[len(f'{layers}.{place}') :]}"
                if own in others:
                    place, op.module = under_way, own
            if place is not None:
                under_way, found[index] = place, before + place
        before += len(model.get_submodule(layers))  # type: ignore[arg-type]
    return found


def prefixes(stacks: Sequence[str], model: nn.Module) -> list[str]:
    """The path of each layer, counted as `places` counts them."""
    return [
        f"{layers}.{n}."
        for layers in stacks
        for n in range(len(model.get_submodule(layers)))  # type: ignore[arg-type]
    ]


def _number(module: str, layers: str) -> int | None:
    if not module.startswith(f"{layers}."):
        return None
    return int(module[len(layers) + 1 :].partition(".")[0])
