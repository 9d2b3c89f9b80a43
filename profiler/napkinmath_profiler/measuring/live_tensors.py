"""What a training holds at one moment beside its parameters, read off autograd's graph and the
running code: nothing is noted beforehand.

The graph is walked from the tensors that the frames of all threads hold. Saved tensors are read as
they are kept, so that no hook unpacks (a checkpoint would recompute, an offload copy back); what a
hook has packed counts where it is a tensor of the device. Nodes are made in the order the forward
ran: a node that saves a parameter belongs to the parameter's module, one between two such to what
both names have in common.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

OWN_FOLDER = os.path.dirname(__file__)
MOST_NODES = 500_000
MOST_ITEMS = 4096  # of a container that is looked into
RAW_SAVED = "_raw_saved_"
AddressOf = Callable[[torch.Tensor], int]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A storage that is alive: where it belongs, what made or holds it, and of which shape the
    tensor is."""

    module: str
    holder: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Live:
    """Storages kept for the backward, and others that variables of the running code hold."""

    saved: tuple[LiveTensor, ...]
    in_use: tuple[LiveTensor, ...]


@dataclass(slots=True)
class _Node:
    """An autograd node: its place in the order of execution, the module known of it, what it
    keeps."""

    name: str
    number: int
    module: str | None
    kept: list[torch.Tensor]


def live_tensors(
    model: nn.Module | None, known: Iterable[torch.Tensor], address_of: AddressOf
) -> Live:
    """The live storages that are none of the ``known`` tensors' (parameters, gradients, optimizer
    states).

    ``address_of`` names a storage by a number that no other has, and 0 for one that is not on the
    device (``DeviceMemory.address_of``).
    """
    counted = {address_of(tensor) for tensor in known} | {0}
    names = _names(model)
    held = [(place, tensor) for frame in _frames() for place, tensor in _tensors_of(frame, names)]
    homes = (
        {address_of(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
        if model is not None
        else {}
    )
    nodes = _nodes(
        [tensor for _, tensor in held], lambda tensor: homes.get(address_of(tensor) or -1)
    )

    def new(tensor: torch.Tensor, module: str, holder: str) -> Iterator[LiveTensor]:
        if (address := address_of(tensor)) not in counted:
            counted.add(address)
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield LiveTensor(
                module, holder, tensor.untyped_storage().nbytes(), tuple(tensor.shape), dtype
            )

    saved = [
        found
        for node, module in zip(nodes, _modules_in_order(nodes), strict=True)
        for tensor in node.kept
        for found in new(tensor, module, node.name)
    ]
    in_use = [found for (module, holder), tensor in held for found in new(tensor, module, holder)]
    return Live(tuple(saved), tuple(in_use))


def module_on_stack(model: nn.Module | None) -> str:
    """The innermost module of ``model`` whose forward this thread runs."""
    names = _names(model)
    frame: FrameType | None = sys._getframe()
    while frame is not None and names:
        with _variables(frame) as variables:
            found = names.get(id(variables.get("self")))
        if found:
            return found
        frame = frame.f_back
    return ""


def _names(model: nn.Module | None) -> dict[int, str]:
    return {} if model is None else {id(module): name for name, module in model.named_modules()}


# ---------------------------------------------------------------- the running code


def _frames() -> Iterator[FrameType]:
    """The frames of all threads, the innermost of each first: a GPU's backward runs on a thread of
    autograd's own."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def _tensors_of(
    frame: FrameType, names: Mapping[int, str]
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Tensors in a frame's variables, and in the containers there, with the module and the code
    that hold them."""
    if os.path.dirname(frame.f_code.co_filename) == OWN_FOLDER:
        return
    with _variables(frame) as variables:
        place = (
            names.get(id(variables.get("self")), ""),
            getattr(frame.f_code, "co_qualname", frame.f_code.co_name),
        )
        for value in list(variables.values()):
            for tensor in _tensors_in(value, depth=2):
                yield place, tensor


@contextmanager
def _variables(frame: FrameType) -> Generator[Mapping[str, Any]]:
    """A frame's variables. Up to Python 3.12 a function's frame keeps the dictionary it gives, and
    what is in it alive: it is emptied again."""
    variables = frame.f_locals
    try:
        yield variables
    finally:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            variables.clear()


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set)) and len(value) <= MOST_ITEMS:
        for item in list(value):
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict) and len(value) <= MOST_ITEMS:
        for item in list(value.values()):
            yield from _tensors_in(item, depth - 1)


# ---------------------------------------------------------------- autograd's graph


def _nodes(
    roots: Iterable[torch.Tensor], home_of: Callable[[torch.Tensor], str | None]
) -> list[_Node]:
    """Every node behind the roots, in the order in which the forward made them; ``home_of`` knows
    the module of a parameter."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    found: list[_Node] = []
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [next_node for next_node, _ in node.next_functions if next_node is not None]
        waiting += following
        if hasattr(node, "variable"):  # a parameter's end of the graph
            continue
        saved = list(_raw_saved(node))
        kept = [
            tensor for raw in saved for tensor in _tensors_in(getattr(raw, "data", None), depth=2)
        ]
        for raw in saved:
            for checkpoint in _checkpoints(raw):
                kept += _kept_by(checkpoint, raw.data)
                waiting += filter(
                    None, [getattr(getattr(checkpoint, "input_saver", None), "grad_fn", None)]
                )
        touched = map(home_of, [*kept, *_leaves(following)])
        found.append(
            _Node(
                node.name(),
                node._sequence_nr(),
                next((m for m in touched if m is not None), None),
                kept,
            )
        )
    return sorted(found, key=lambda node: node.number)


def _leaves(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The parameters at whose ends of the graph these nodes stand."""
    return (node.variable for node in nodes if hasattr(node, "variable"))


def _raw_saved(node: Any) -> Iterator[Any]:
    """What a node has saved and not yet given up, packed as it is."""
    for name in dir(node):
        if not name.startswith(RAW_SAVED):
            continue
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed: the backward has passed here
            continue
        yield from raw if isinstance(raw, (tuple, list)) else (raw,)


def _checkpoints(raw: Any) -> Iterator[Any]:
    """The checkpoint (one that does not re-enter) whose hook would recompute what was saved here:
    it alone knows its inputs.

    Source: torch/utils/checkpoint.py _CheckpointFrame: saved_args; before 2.13 the node of
    input_saver.
    """
    for cell in getattr(getattr(raw, "unpack_hook", None), "__closure__", None) or ():
        try:
            inside = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if hasattr(inside, "recompute_fn"):
            yield inside


def _kept_by(checkpoint: Any, holder: Any) -> Iterator[torch.Tensor]:
    """A checkpoint's inputs, and what it has recomputed in the place of ``holder``."""
    for raw in getattr(checkpoint, "saved_args", ()):
        yield from _tensors_in(getattr(raw, "data", raw), depth=2)
    handles = getattr(holder, "handles", {})
    for number, again in dict(getattr(checkpoint, "recomputed", {})).items():
        yield from _tensors_in(
            again.get(handles.get(number)) if handles.get(number) is not None else None, depth=1
        )


def _modules_in_order(nodes: list[_Node]) -> list[str]:
    """The module of each node: its own, or what the last one before and the first one after have in
    common."""
    before: list[str | None] = []
    last: str | None = None
    for node in nodes:
        last = node.module if node.module is not None else last
        before.append(last)
    after: list[str | None] = []
    last = None
    for node in reversed(nodes):
        last = node.module if node.module is not None else last
        after.append(last)
    after.reverse()
    return [
        node.module if node.module is not None else _common(b, a)
        for node, b, a in zip(nodes, before, after, strict=True)
    ]


def _common(one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return one or other or ""
    parts: list[str] = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)
