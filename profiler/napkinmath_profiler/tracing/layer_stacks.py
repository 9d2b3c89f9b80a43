"""The repeated layers of a model: where they are, of which kinds, and which of them a shorter model
must keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from napkinmath_profiler.tracing.meta_model import configs_of

WINDOW = 2  # a layer's events may depend on this many neighbours on either side
MIN_INTERIOR = 2  # two samples of a repeated context show whether it repeats
Context = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LayerStack:
    """A ``ModuleList`` of layers: its dotted path and the kind of each layer (equal kinds have
    equal code and shapes)."""

    path: str
    kinds: tuple[int, ...]


def find_stacks(model: nn.Module) -> list[LayerStack]:
    """The outermost ``ModuleList``s of ``model`` that hold modules with modules of their own,
    longest first."""
    stacks: list[LayerStack] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(
            path.startswith(f"{stack.path}.") for stack in stacks
        ):
            continue
        if len(module) > 1 and all(next(layer.children(), None) is not None for layer in module):
            stacks.append(LayerStack(path, _kinds(module)))
    return sorted(stacks, key=lambda stack: -len(stack.kinds))


def _kinds(layers: nn.ModuleList) -> tuple[int, ...]:
    numbers: dict[Context, int] = {}
    return tuple(numbers.setdefault(_signature(layer), len(numbers)) for layer in layers)


def _signature(layer: nn.Module) -> Context:
    """Everything about a layer that its code can depend on, but its index."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        parameters = tuple(
            (n, tuple(p.shape), p.dtype, p.requires_grad)
            for n, p in module.named_parameters(recurse=False)
        )
        buffers = tuple(
            (n, tuple(b.shape), b.dtype) for n, b in module.named_buffers(recurse=False)
        )
        parts.append((name, type(module), parameters, buffers, tuple(_plain_attributes(module))))
    return tuple(parts)


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if (
            "idx" not in name
            and "index" not in name
            and isinstance(value, (bool, int, float, str, type(None)))
        ):
            yield name, value


def contexts(kinds: Sequence[int]) -> list[Context]:
    """What each layer's events may depend on: the kinds around it, and whether it is the first or
    last of its kind."""
    first, last = {}, {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
        last[kind] = index
    found: list[Context] = []
    for index, kind in enumerate(kinds):
        around = tuple(
            kinds[i] if 0 <= i < len(kinds) else None
            for i in range(index - WINDOW, index + WINDOW + 1)
        )
        found.append((around, first[kind] == index, last[kind] == index))
    return found


def kept_layers(kinds: Sequence[int]) -> list[int]:
    """Fewest layers (a head and a tail of the stack) in which every context of the whole occurs;
    all, if none fewer do.

    A context that the whole repeats is kept twice, so that its two samples can be held against each
    other.
    """
    total = len(kinds)
    whole = contexts(kinds)
    wanted = {context: min(MIN_INTERIOR, whole.count(context)) for context in whole}
    for length in range(min(2 * WINDOW + 1, total), total):
        for head in range(
            length - WINDOW, WINDOW - 1, -1
        ):  # both ends stay, as what surrounds the stack refers to them
            kept = [*range(head), *range(total - (length - head), total)]
            have = contexts([kinds[i] for i in kept])
            if all(have.count(context) >= count for context, count in wanted.items()):
                return kept
    return list(range(total))


def shorten(model: nn.Module, stack: LayerStack, kept: Sequence[int]) -> None:
    """Take all but the ``kept`` layers out of ``stack``, in the module and in per-layer lists of
    its configs."""
    layers = model.get_submodule(stack.path)
    assert isinstance(layers, nn.ModuleList)
    parent = model.get_submodule(stack.path.rpartition(".")[0])
    setattr(parent, stack.path.rpartition(".")[2], nn.ModuleList([layers[i] for i in kept]))
    total = len(stack.kinds)
    for config in configs_of(model):
        for name, value in list(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == total:
                setattr(config, name, type(value)(value[i] for i in kept))
        if getattr(config, "num_hidden_layers", None) == total:
            config.num_hidden_layers = len(kept)
