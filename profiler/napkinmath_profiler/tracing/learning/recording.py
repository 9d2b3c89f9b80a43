"""A model's forward with what each operation keeps and makes for its backward, at one batch and
length."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from napkinmath.catalog.attention_support import FLASH_ATTENTION, FLEX_ATTENTION, SDPA
from torch import nn

from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.cuda_choices import AppliedChoices, cuda_choices
from napkinmath_profiler.tracing.learning.composites import Recorded, composites
from napkinmath_profiler.tracing.learning.forward_recorder import (
    ForwardRecorder,
    RecordedOp,
    RecordedValue,
)
from napkinmath_profiler.tracing.learning.image_fields import NAMES
from napkinmath_profiler.tracing.learning.probing import (
    Layout,
    Probed,
    choices_of_gradients,
    layout_of,
    probe,
)
from napkinmath_profiler.tracing.meta_model import example_inputs
from napkinmath_profiler.tracing.module_paths import ModulePaths
from napkinmath_profiler.tracing.trace_errors import TraceError
from napkinmath_profiler.tracing.training_step import features_of

_PROBED: dict[Any, Probed] = {}
"""Operations that were run alone: forms of one model share most of them."""
Incoming = dict[int, list[Layout | None]]


@dataclass(slots=True)
class RecordedForward:
    """`died`: after which operation Python lets go of a storage; absent: not before the forward is
    over. `probed` has None for composites and for operations that make nothing and differentiate
    nothing."""

    ops: list[RecordedOp]
    values: list[RecordedValue]
    died: dict[int, int]
    probed: list[Probed | None]
    result: int
    """The logits, the loss where the class computes it, or what the loss of a bare encoder is made
    of."""
    hidden: int | None = None
    """The last hidden states of a bare encoder."""


def record(
    model: nn.Module,
    *,
    batch: int,
    length: int,
    target: int = 0,
    autocast: torch.dtype | None = None,
    how: Recorded = Recorded(),
) -> RecordedForward:
    """Runs the model's forward twice, without and with gradients, and every operation alone;
    `target` is the length of what a decoder makes, where it is another."""
    with _as_on_cuda(autocast) as still:
        place = (batch, length, target)
        bare, _ = _forward(model, place, how, grad=False)
        graph, incoming = _forward(model, place, how, grad=True)
        if [op.name for op in bare.ops] != [op.name for op in graph.ops]:
            bare, _ = _forward(model, place, how, grad=False)  # the first may fill caches
        if [op.name for op in bare.ops] != [op.name for op in graph.ops]:
            with torch.autograd.graph.saved_tensors_hooks(lambda _: None, torch.empty):
                bare, _ = _forward(model, place, how, grad=True, backward=False)
        if [op.name for op in bare.ops] != [op.name for op in graph.ops]:
            raise TraceError("its forward runs other operations where gradients are recorded")
        if len(bare.values) != len(graph.values):
            raise TraceError("its forward makes other tensors where gradients are recorded")
        with still:
            probed = [_probed(op, graph.values, incoming) for op in graph.ops]
    result = graph.ops[-1].outputs[-1] if graph.result is None else graph.result
    return RecordedForward(graph.ops, graph.values, dict(bare.died), probed, result, graph.hidden)


def outline(
    model: nn.Module, *, batch: int, length: int, target: int = 0, how: Recorded
) -> list[Any]:
    """The operations of one forward, what they are called with and what they make: enough to see
    whether a model runs otherwise."""
    with _as_on_cuda(None):
        seen, _ = _forward(model, (batch, length, target), how, grad=False)
    found: list[Any] = []
    for op in seen.ops:
        shapes = [(seen.values[v].shape, str(seen.values[v].dtype)) for v in op.outputs]
        names = [seen.values[v].name for v in op.inputs]
        found.append((op.name, op.module, dict(op.facts), names, shapes))
    weights = [(v.name, v.shape, str(v.dtype)) for v in seen.values if v.name]
    return [found, weights]


@contextmanager
def _as_on_cuda(autocast: torch.dtype | None) -> Generator[Any]:
    """CUDA's choices, no cyclic collection; gives a context in which autocast is off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            warnings.simplefilter("ignore")
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(cuda_choices(AttentionBackend.AUTO, (8, 0), AppliedChoices()))
            if autocast is not None:
                stack.enter_context(torch.autocast("cuda", dtype=autocast))
            # without gradients nn.MultiheadAttention would take a path that no training takes
            stack.callback(
                torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
            )
            torch.backends.mha.set_fastpath_enabled(False)
            yield torch.autocast("cuda", enabled=False)
    finally:
        if was_enabled:
            gc.enable()


def _forward(
    model: nn.Module,
    place: tuple[int, int, int],
    how: Recorded,
    *,
    grad: bool,
    backward: bool = True,
) -> tuple[ForwardRecorder, Incoming]:
    torch.clear_autocast_cache()  # casts of weights that an earlier forward made
    paths = ModulePaths()
    paths.name_modules(model)
    recorder = ForwardRecorder(model, paths)
    given = _inputs(model, place, how)
    for name, x in given.items():
        recorder.name(x, NAMES.get(name, name))
    incoming: Incoming = {}
    torch.clear_autocast_cache()  # of the copies that the forward before has made
    with torch.set_grad_enabled(grad), paths.followed():
        with composites(recorder, model, how), recorder:
            out = model(**given)
            made = _result_of(out)
            if how.loss:
                recorder.result = recorder.value(made)
            if "last_hidden_state" in out and "loss" not in out:
                recorder.hidden = recorder.value(out["last_hidden_state"])
        if grad and backward:
            with recorder, recorder.composite():
                _backward(made, incoming)
    return recorder, incoming


def _result_of(out: Any) -> torch.Tensor:
    """The loss, else the logits, else what the loss of a bare encoder is made of."""
    found = next((out[name] for name in ("loss", "logits") if name in out), None)
    return features_of(out) if found is None else found


def _inputs(
    model: nn.Module, place: tuple[int, int, int], how: Recorded
) -> dict[str, torch.Tensor]:
    """What the forward is given: ids alone, or with the labels of the class's loss."""
    batch, length, target = place
    if not how.loss:
        return {"input_ids": torch.empty((batch, length), dtype=torch.long, device="meta")}
    given = example_inputs(model, model.config, micro_batch_size=batch, sequence_length=length)
    if target:
        made = example_inputs(model, model.config, micro_batch_size=batch, sequence_length=target)
        given["labels"] = made["labels"]
    return given


def _backward(logits: torch.Tensor, incoming: Incoming) -> None:
    """Runs the backward and notes how the gradients lie that each node is given."""
    nodes, waiting = dict[Any, None](), [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes[node] = None
        node.register_prehook(_noting(incoming, node._sequence_nr()))
        waiting += [following for following, _ in node.next_functions]
    logits.backward(torch.empty_like(logits, memory_format=torch.contiguous_format))


def _noting(incoming: Incoming, number: int) -> Any:
    def note(gradients: Any) -> None:
        incoming[number] = [
            None if g is None else (tuple(g.shape), tuple(g.stride()), g.dtype) for g in gradients
        ]

    return note


def _probed(op: RecordedOp, values: list[RecordedValue], incoming: Incoming) -> Probed | None:
    if op.func is None:
        return None
    layouts = [layout_of(values[i]) for i in op.inputs]
    needing = [values[i].needs_grad for i in op.inputs]
    choices = choices_of_gradients(op.inputs, needing)
    coming = incoming.get(op.node, []) if any(needing) else []
    places = {v: f"value={i})" for i, v in enumerate(dict.fromkeys(op.inputs))}
    written = repr((op.args, op.kwargs))
    for number, place in sorted(places.items(), reverse=True):
        written = written.replace(f"Ref(value={number})", f"Ref({place}")
    key = (op.name, written, tuple(layouts), tuple(choices), tuple(coming))
    if key not in _PROBED:
        try:
            _PROBED[key] = probe(op.func, op.args, op.kwargs, layouts, choices, coming)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{op.name} in {op.module or 'the model'} cannot be run alone:"
                f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
    return _PROBED[key]


def refused_attention(model: type | nn.Module) -> list[str]:
    """Words of `attn_implementation` at which a class of transformers raises, in alphabetical order
    (modeling_utils.py PreTrainedModel)."""
    supports = {
        FLASH_ATTENTION: "_supports_flash_attn",
        FLEX_ATTENTION: "_supports_flex_attn",
        SDPA: "_supports_sdpa",
    }
    return [word for word, switch in supports.items() if not getattr(model, switch)]
