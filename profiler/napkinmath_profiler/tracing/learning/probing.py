"""What one operation keeps and makes for its backward, given which of its inputs need a gradient:
run alone on meta tensors laid out as the model's were."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from napkinmath_profiler.tracing.kernel_workspaces import WORKSPACES
from napkinmath_profiler.tracing.learning.forward_recorder import RecordedValue, Ref
from napkinmath_profiler.tracing.op_handlers import OpHandlers
from napkinmath_profiler.tracing.storage_events import TracePhase
from napkinmath_profiler.tracing.trace_errors import TraceError

MOST_MASKED_INPUTS = 4
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class MadeStorage:
    """A storage that an operation made: extents and type of the tensor that it was made for."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class GradientChoice:
    """Forward and backward of an operation under one choice of inputs that need a gradient.

    Steps are (action, number of a storage in `made`). `saves` are ("i", input), ("o", output) or
    ("m", storage). `gradients` are (input, storage in `backward_made`, or -1 - output for the
    incoming gradient itself).
    """

    saves: list[tuple[str, int]] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)
    backward_made: list[MadeStorage] = field(default_factory=list)
    backward: list[tuple[str, int]] = field(default_factory=list)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    kernels: int = 0
    kept: list[MadeStorage] = field(default_factory=list)
    """MadeStorage in the forward for the backward alone: ("k", number) in `saves`."""


@dataclass(slots=True)
class Probed:
    """An operation alone: the storage of each output (("i", input) or ("m", number in `made`)), and
    its branches by which inputs need a gradient."""

    made: list[MadeStorage] = field(default_factory=list)
    forward: list[tuple[str, int]] = field(default_factory=list)
    outputs: list[tuple[str, int]] = field(default_factory=list)
    branches: dict[str, GradientChoice] = field(default_factory=dict)


class _Births(TorchDispatchMode):
    """Storages born and gone while an operation, or its backward, runs."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers = OpHandlers(Counter()).table(cuda=True)
        self.phase = TracePhase.FORWARD
        self.made: list[MadeStorage] = []
        self.steps: list[tuple[str, int]] = []
        self.number: dict[int, int] = {}
        self.kernels = 0
        self._known: set[int] = set()
        self._references: list[Any] = []

    def know(self, tensor: torch.Tensor) -> None:
        """A storage that was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage if it was made here."""
        return self.number.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self.handlers.get(func)
        out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        before = len(self.made)
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.device.type == "meta":
                self._note(item)
        self.kernels += len(self.made) > before
        workspace = WORKSPACES.get(func)
        for _, num_bytes in workspace(args, out) if workspace is not None else ():
            if num_bytes:
                self.made.append(MadeStorage((num_bytes,), torch.uint8))
                number = len(self.made) - 1
                self.steps += [("+", number), ("-", number)]
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self.number:
            return
        shape = tuple(tensor.shape)
        if storage.nbytes() != tensor.numel() * tensor.element_size():
            shape = (storage.nbytes() // tensor.element_size(),)
        self.made.append(MadeStorage(shape, tensor.dtype))
        number = self.number[key] = len(self.made) - 1
        self.steps.append(("+", number))

        def gone(_: Any, key: int = key, number: int = number) -> None:
            if self.number.get(key) == number:
                del self.number[key]
            self.steps.append(("-", number))

        self._references.append(weakref.ref(storage, gone))


class _Fresh(torch.autograd.Function):
    """A tensor that is no leaf, so that it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
        return _empty(layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _empty(layout: Layout) -> torch.Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def layout_of(value: RecordedValue) -> Layout:
    """How a value lies in memory."""
    return value.shape, value.stride, value.dtype


def choices_of_gradients(inputs: Sequence[int], needing: Sequence[bool]) -> list[str]:
    """Which inputs may need a gradient: every choice of those that do where all is trained; inputs
    that are one value go together; all or none of more than four."""
    values = list(dict.fromkeys(v for v, needs in zip(inputs, needing, strict=True) if needs))
    if len(values) > MOST_MASKED_INPUTS:
        chosen = [set[int](), set(values)]
    else:
        chosen = [
            {v for v, bit in zip(values, bits, strict=True) if bit}
            for bits in itertools.product((False, True), repeat=len(values))
        ]
    return [
        "".join(
            "1" if needs and v in some else "0" for v, needs in zip(inputs, needing, strict=True)
        )
        for some in chosen
    ]


def probe(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[Layout],
    choices: Sequence[str],
    incoming: Sequence[Layout | None],
) -> Probed:
    """Runs an operation once for each choice; `incoming` are the layouts of its outputs'
    gradients."""
    found = Probed()
    for choice in choices:
        _branch(found, func, args, kwargs, inputs, choice, incoming)
    return found


def _branch(
    found: Probed,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[Layout],
    choice: str,
    incoming: Sequence[Layout | None],
) -> None:
    given: list[torch.Tensor] = []
    for layout, needs in zip(inputs, choice, strict=True):
        if needs == "1":
            leaf = torch.empty((), dtype=layout[2], device="meta", requires_grad=True)
            given.append(_Fresh.apply(leaf, layout))
        else:
            given.append(_empty(layout))
    originals = [x.untyped_storage()._cdata for x in given]
    order = iter(given)

    def put(item: Any) -> Any:
        return next(order) if isinstance(item, Ref) else item

    real_args, real_kwargs = tree_map(put, args), tree_map(put, kwargs)
    births, saved = _Births(), list[torch.Tensor]()
    for x in given:
        births.know(x)

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    grad = "1" in choice
    with torch.set_grad_enabled(grad), births:
        if grad:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = func(*real_args, **real_kwargs)
        else:
            out = func(*real_args, **real_kwargs)
    outs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if _is_meta(x)]

    def where(x: torch.Tensor) -> tuple[str, int]:
        key = x.untyped_storage()._cdata
        if key in originals:
            return "i", originals.index(key)
        number = births.number_of(x)
        if number is None:
            raise TraceError(f"{func} gives a tensor that it did not make")
        return "m", number

    places = [where(x) for x in outs]
    if not found.branches:
        found.made, found.forward, found.outputs = births.made, list(births.steps), places
    branch = found.branches[choice] = GradientChoice()
    if not grad:
        return
    branch.saves = [where(x) for x in saved if _is_meta(x)]
    if len(births.made) != len(found.made):
        if found.made:
            raise TraceError(f"{func} makes other tensors where gradients are recorded")
        branch.kept = births.made
        branch.saves = [("k" if kind == "m" else kind, number) for kind, number in branch.saves]
    branch.differentiable = [x.requires_grad for x in outs]
    _run_backward(branch, given, choice, outs, incoming)


def _run_backward(
    branch: GradientChoice,
    given: list[torch.Tensor],
    choice: str,
    outs: list[torch.Tensor],
    incoming: Sequence[Layout | None],
) -> None:
    reached = [x for x in outs if x.requires_grad]
    if not reached:
        return
    layouts = [
        _incoming(x, incoming[i] if i < len(incoming) else None)
        for i, x in enumerate(outs)
        if x.requires_grad
    ]
    coming = [_empty(layout) for layout in layouts]
    positions = [i for i, bit in enumerate(choice) if bit == "1"]
    births = _Births()
    births.phase = TracePhase.BACKWARD
    for x in (*coming, *given, *outs):
        births.know(x)
    numbers = [i for i, x in enumerate(outs) if x.requires_grad]
    with births:
        made = torch.autograd.grad(
            reached, [given[i] for i in positions], coming, allow_unused=True
        )
    branch.backward_made, branch.kernels = births.made, births.kernels
    kept: set[int] = set()
    for position, gradient in zip(positions, made, strict=True):
        if gradient is None:  # type: ignore[reportUnnecessaryComparison] - allow_unused
            continue
        number = births.number_of(gradient)
        if number is None:
            same = gradient.untyped_storage()._cdata
            source = [x.untyped_storage()._cdata for x in coming]
            if same not in source:
                raise TraceError("a gradient that is neither new nor the incoming one")
            number = -1 - numbers[source.index(same)]
        else:
            kept.add(number)
        branch.gradients.append((position, number))
    branch.backward = [step for step in births.steps if step[0] == "+" or step[1] not in kept]


def _incoming(x: torch.Tensor, seen: Layout | None) -> Layout:
    """The layout of an output's gradient: as it was seen, else contiguous."""
    if seen is not None and seen[0] == tuple(x.shape):
        return seen
    return tuple(x.shape), torch.empty(x.shape, device="meta").stride(), x.dtype


def _is_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "meta"
