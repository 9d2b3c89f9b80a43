"""What is off about a traced step: each finding in one sentence, with the bytes that a second trace
says it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from napkinmath.base.units import format_bytes

from napkinmath_profiler.tracing.meta_model import TrainMethod
from napkinmath_profiler.tracing.storage_events import StorageRecord, StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.trace_result import TraceResult

LEAST_SHARE = 0.01  # of the peak, below which a saving is not worth a line
TraceAgain = Callable[[TraceOptions], TraceResult]


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """One sentence, and the bytes of the peak that it is about."""

    text: str
    num_bytes: int


def findings(
    result: TraceResult, options: TraceOptions, again: TraceAgain, *, vocabulary: int
) -> list[TraceFinding]:
    """Everything found, dearest first; ``again`` traces the same model under other options."""
    peak = result.peak_bytes
    found = [
        _eval_mode(result, options, again),
        _optimizer_peak(result, options, again),
        _math_attention(result, options, again),
    ]
    found += [_adapter_type(result, options, again), _held_logits(result, options, vocabulary)]
    worth = [
        finding
        for finding in found
        if finding is not None and finding.num_bytes >= LEAST_SHARE * peak
    ]
    return sorted(worth, key=lambda finding: -finding.num_bytes)


def _saving(result: TraceResult, changed: TraceResult) -> int:
    return result.peak_bytes - changed.peak_bytes


def _eval_mode(
    result: TraceResult, options: TraceOptions, again: TraceAgain
) -> TraceFinding | None:
    if options.training or not options.checkpointing:
        return None
    saving = _saving(result, again(replace(options, training=True)))
    return TraceFinding(
        "checkpointing is requested but the model is in eval mode, so it does nothing:"
        f" +{format_bytes(saving)}; call model.train()",
        saving,
    )


def _optimizer_peak(
    result: TraceResult, options: TraceOptions, again: TraceAgain
) -> TraceFinding | None:
    if result.peak.phase is not TracePhase.OPTIMIZER or options.optimizer not in (
        "adamw",
        "adamw-foreach",
    ):
        return None
    saving = _saving(result, again(replace(options, optimizer="adamw-fused")))
    return TraceFinding(
        "the optimizer step, not the backward, sets the peak: fused=True saves"
        f" {format_bytes(saving)}",
        saving,
    )


def _math_attention(
    result: TraceResult, options: TraceOptions, again: TraceAgain
) -> TraceFinding | None:
    if not result.attention.get("math") or options.loop.autocast_dtype is not None:
        return None

    changed = again(replace(options, loop=replace(options.loop, autocast_dtype=torch.bfloat16)))
    if changed.attention.get("math"):
        return None
    saving = _saving(result, changed)
    return TraceFinding(
        "q, k and v are of a type that only SDPA's math path takes, which holds the scores:"
        f" autocast saves {format_bytes(saving)}",
        saving,
    )


def _adapter_type(
    result: TraceResult, options: TraceOptions, again: TraceAgain
) -> TraceFinding | None:
    adapters = options.adapters
    if (
        options.method is TrainMethod.FULL
        or adapters.adapter_dtype is not None
        or options.dtype == "fp32"
        or options.loop.autocast_dtype is torch.float16  # whose scaler takes fp32 gradients alone
    ):
        return None
    layers = Counter(_layer_of(record) for record in result.saved_records() if _is_widened(record))
    del layers[""]
    narrow = replace(options, adapters=replace(adapters, adapter_dtype=options.dtype))
    saving = _saving(result, again(narrow))
    times = f" and x is saved {max(layers.values())} times a layer" if layers else ""
    return TraceFinding(
        f"LoRA adapters are float32{times}: {options.dtype} adapters would save"
        f" {format_bytes(saving)}",
        saving,
    )


def _is_widened(record: StorageRecord) -> bool:
    """Whether a saved activation is a float32 copy of another."""
    return (
        record.dtype == "float32"
        and record.op == "aten._to_copy.default"
        and record.role is StorageRole.SAVED_ACTIVATIONS
    )


def _layer_of(record: StorageRecord) -> str:
    parts = record.module.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdecimal()), "")


def _held_logits(
    result: TraceResult, options: TraceOptions, vocabulary: int
) -> TraceFinding | None:
    elements = options.micro_batch_size * options.sequence_length * vocabulary
    near = (
        elements - options.micro_batch_size * vocabulary
    )  # a shifted copy lacks the last position
    held = [
        r
        for r in result.live_at(result.peak.event_index)
        if vocabulary and near <= prod(r.shape) <= elements and r.shape[-1:] == (vocabulary,)
    ]
    if len(held) < 2:
        return None
    total = sum(r.rounded_bytes for r in held)
    return TraceFinding(
        f"logits are held {_times(len(held))} at the peak, {format_bytes(total)}: a chunked or"
        " fused loss holds none",
        total,
    )


def _times(count: int) -> str:
    return {2: "twice", 3: "three times", 4: "four times", 5: "five times"}.get(
        count, f"{count} times"
    )
