"""Which short models to run: of how many layers and kinds, so that what each kind costs can be kept
apart."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from napkinmath.base.errors import InputError

from napkinmath_profiler.trace import TraceOptions, build
from napkinmath_profiler.tracing.layer_stacks import find_stacks


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Where a model's layers are, the kind of each, and the layers that each short model keeps."""

    stack_path: str
    order: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]

    def counts(self, run: Sequence[int]) -> list[int]:
        """How many layers of each kind a run has."""
        return [
            sum(self.order[layer] == kind for layer in run) for kind in range(len(set(self.order)))
        ]


def plan_layers(config: Any, options: TraceOptions) -> LayerPlan:
    """Runs of one, two and three layers; of models with several kinds of layer, up to three of
    each, and one fewer of each in turn.

    The first and the last of a kind can differ from those between: one makes, the other frees what
    they share (a mask, a rotary table).
    """
    stacks = find_stacks(build(copy.deepcopy(config), options))
    if not stacks:
        raise InputError(
            "the model has no stack of layers, so there is nothing to repeat; measure it whole with"
            " `estimate measure`"
        )
    stack = stacks[0]
    numbers = range(len(set(stack.kinds)))
    places = [[layer for layer, kind in enumerate(stack.kinds) if kind == n] for n in numbers]
    between = {layers[1] for layers in places if len(layers) > 2}
    full = between | {layers[0] for layers in places} | {layers[-1] for layers in places}
    runs = [tuple(sorted(full - {layer})) for layer in sorted(between)] + [tuple(sorted(full))]
    if len(places) == 1:
        runs.insert(0, (0,))
    return LayerPlan(stack.path, stack.kinds, tuple(dict.fromkeys(runs)))


def short_config(config: Any, kept: Sequence[int], total: int) -> Any:
    """A copy of a config with only the ``kept`` of its ``total`` layers: their number, and every
    list with an entry a layer."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    for one in {id(c): c for c in (short, text)}.values():
        for name, value in list(vars(one).items()):
            if isinstance(value, (list, tuple)) and len(value) == total:
                setattr(one, name, type(value)(value[layer] for layer in kept))
    text.num_hidden_layers = len(kept)
    return short
