"""The words of ``watch``: a summary of the steps, and what was there when memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from napkinmath.base.units import format_bytes
from napkinmath.estimate import Estimate
from torch import nn

from napkinmath_profiler.measuring.device_memory import MemoryFigures
from napkinmath_profiler.measuring.drift import DriftWarning, StepRecord
from napkinmath_profiler.measuring.held import held_by_role
from napkinmath_profiler.measuring.live_tensors import Live, LiveTensor

WITHOUT_A_MODEL = (
    "  a smaller micro-batch with more gradient accumulation, or activation checkpointing;"
    " `estimate --model ...` prices each"
)
MOST_MODULES = 12
MOST_CHANGES = 6
MOST_STEPS = 5
MOST_TENSORS = 8
FORWARD, BACKWARD, OPTIMIZER, BETWEEN = PHASES = (
    "forward",
    "backward",
    "optimizer step",
    "between steps",
)


def summary_lines(
    records: Sequence[StepRecord],
    warnings: Sequence[DriftWarning],
    predicted: Estimate | int | None,
    seconds_spent: float,
) -> list[str]:
    """Peaks by phase, beside the prediction."""
    if not records:
        return ["no training step was seen: no optimizer has stepped"]
    phases = {name: size for name in PHASES if (size := max(r.peaks.get(name, 0) for r in records))}
    first, steady = records[0], records[len(records) // 2 :]
    lines = [
        f"{len(records):,} steps, allocated at most {format_bytes(max(phases.values()))}, reserved"
        f" at most {format_bytes(max(r.peak_reserved for r in records))}"
    ]
    lines += [f"  {name:16} {format_bytes(size)}" for name, size in phases.items()]
    lines.append(
        f"  first step {format_bytes(first.peak)}, later ones"
        f" {format_bytes(min(r.peak for r in steady))} to"
        f" {format_bytes(max(r.peak for r in steady))}"
    )
    bytes_predicted = predicted_bytes(predicted)
    if bytes_predicted:
        peak = max(phases.values())
        lines.append(
            f"  predicted        {format_bytes(bytes_predicted)}; measured is"
            f" {peak / bytes_predicted - 1:+.1%}"
        )
    lines += [f"  {w.kind} at step {w.step}: {w.text}" for w in warnings]
    lines.append(f"  watching took {seconds_spent / len(records) * 1e6:.0f} us a step")
    return lines


def predicted_bytes(predicted: Estimate | int | None) -> int | None:
    """The predicted peak of allocated bytes."""
    return round(predicted.memory.allocated.value) if isinstance(predicted, Estimate) else predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """What was going on when memory ran out: the bytes asked for, the step and phase, what is alive,
    what was predicted."""

    asked: int | None
    figures: MemoryFigures
    phase: str
    record: StepRecord
    records: Sequence[StepRecord]
    warnings: Sequence[DriftWarning]
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    predicted: Estimate | int | None
    limit: int | None
    module: str
    live: Live | None = None


def out_of_memory_lines(found: OutOfMemory) -> list[str]:
    """The report: the request, what was there by role and module, what was predicted, what went
    before, what to change."""
    live = found.live
    lines = _request(found)
    lines += ["", "what was there, by role"]
    lines += _roles(found.figures, found.model, found.optimizer, live)
    if live is not None and live.saved:
        lines += ["", "what is kept for the backward, by module", *_kept(live.saved)]
    if live is not None and live.in_use:
        lines += ["", "what the running code holds", *_in_use(live.in_use)]
    if found.model is not None:
        lines += ["", "what the model holds, by module", *_modules(found.model)]
    lines += _prediction(found.predicted, found.phase)
    if found.records:
        lines += ["", "the steps before"]
        lines += [
            f"  step {r.step}: {r.tokens:,} tokens, peak {format_bytes(r.peak)},"
            f" {format_bytes(r.end_allocated)} left, {format_bytes(r.peak_reserved)} reserved"
            for r in found.records[-MOST_STEPS:]
        ]
    lines += [f"  warned at step {w.step}: {w.kind}: {w.text}" for w in found.warnings]
    return [*lines, "", "what to change", *_changes(found)]


def _request(found: OutOfMemory) -> list[str]:
    """What was asked for and when, what is allocated and what the device has."""
    figures = found.figures
    asked = f"asked for {format_bytes(found.asked)} " if found.asked is not None else "ran out "
    module = f", {found.module}" if found.module else ""
    limit = f", may take {format_bytes(found.limit)}" if found.limit else ""
    lines = [
        f"{asked}in step {found.record.step}, {found.phase}{module}",
        f"allocated {format_bytes(figures.allocated)}, reserved {format_bytes(figures.reserved)}"
        + limit,
    ]
    if figures.device_total is not None and figures.device_used is not None:
        others = figures.device_used - figures.reserved
        lines.append(
            f"the device has {format_bytes(figures.device_total)}; {format_bytes(others)} of it are"
            " the context's and other processes'"
        )
    return lines


def _roles(
    figures: MemoryFigures,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    live: Live | None,
) -> list[str]:
    rows = list(held_by_role(model, optimizer).items())
    rest = figures.allocated - sum(size for _, size in rows)
    if live is None:
        rows.append(("activations, temporaries and what else the program holds", max(0, rest)))
    else:
        saved, in_use = (
            sum(tensor.nbytes for tensor in found) for found in (live.saved, live.in_use)
        )
        rows += [
            ("activations, kept for the backward", saved),
            ("tensors that the running code holds", in_use),
        ]
        rows.append(("temporaries, and what else the program holds", max(0, rest - saved - in_use)))
    rows.append(("cached by the allocator, in no tensor", figures.reserved - figures.allocated))
    return [f"  {format_bytes(size):>12}  {name}" for name, size in rows]


def _kept(saved: Sequence[LiveTensor]) -> list[str]:
    """Activations by module, layers of a stack as one, each with its largest tensor."""
    groups: dict[str, list[LiveTensor]] = {}
    for tensor in saved:
        groups.setdefault(_starred(tensor.module), []).append(tensor)
    ranked = sorted(groups.items(), key=lambda item: -sum(t.nbytes for t in item[1]))
    lines: list[str] = []
    for place, group in ranked[:MOST_MODULES]:
        largest = max(group, key=lambda tensor: tensor.nbytes)
        what = (
            f"the largest {format_bytes(largest.nbytes)}, {list(largest.shape)} {largest.dtype} of"
            f" {largest.holder}"
        )
        lines.append(
            f"  {format_bytes(sum(t.nbytes for t in group)):>12}  {place}: {len(group):,}"
            f" tensor{'s' * (len(group) > 1)}, {what}"
        )
    others = sum(tensor.nbytes for _, group in ranked[MOST_MODULES:] for tensor in group)
    return lines + (
        [f"  {format_bytes(others):>12}  {len(ranked) - MOST_MODULES} others"] if others else []
    )


def _in_use(found: Sequence[LiveTensor]) -> list[str]:
    ranked = sorted(found, key=lambda tensor: -tensor.nbytes)[:MOST_TENSORS]
    return [
        f"  {format_bytes(t.nbytes):>12}  {list(t.shape)} {t.dtype} in {t.holder}"
        + (f" of {t.module}" if t.module else "")
        for t in ranked
    ]


def _starred(module: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in module.split(".")) or "(root)"


def _modules(model: nn.Module) -> list[str]:
    """Parameters and gradients by module, layers of a stack as one."""
    groups: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        place = _starred(name.rpartition(".")[0])
        group = groups.setdefault(place, [0, 0])
        group[0] += parameter.nbytes
        group[1] += parameter.grad.nbytes if parameter.grad is not None else 0
    ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))[:MOST_MODULES]
    return [
        f"  {format_bytes(sum(sizes)):>12}  {name}"
        + (f", {format_bytes(sizes[1])} of it gradients" if sizes[1] else "")
        for name, sizes in ranked
    ]


def _prediction(predicted: Estimate | int | None, phase: str) -> list[str]:
    if predicted is None:
        return []
    if not isinstance(predicted, Estimate):
        return ["", f"predicted: {format_bytes(predicted)} allocated at the peak"]
    peaks = ", ".join(
        f"{p.value} {format_bytes(point.nbytes)}" for p, point in predicted.phase_peaks.items()
    )
    lines = [
        "",
        (
            f"predicted: {format_bytes(round(predicted.memory.allocated.value))} allocated at the"
            f" peak; by phase {peaks}"
        ),
    ]
    return lines + [
        f"  {format_bytes(size):>12}  {role.value}" for role, size in predicted.breakdown.items()
    ]


def _changes(found: OutOfMemory) -> list[str]:
    lines: list[str] = []
    cached = found.figures.reserved - found.figures.allocated
    if cached > 0.05 * max(1, found.figures.reserved):
        lines.append(
            f"  {format_bytes(cached)} are cached but in pieces:"
            " PYTORCH_ALLOC_CONF=expandable_segments:True lets pieces grow together"
        )
    longest, here = max((r.largest for r in found.records), default=0), found.record.largest
    if longest and here > longest:
        lines.append(
            f"  this batch had {here:,} tokens, {here / longest:.1f} times the longest before: cap"
            " the length, or sort and pack"
        )
    if isinstance(found.predicted, Estimate):
        lines += [
            f"  {change.flag}: {change.meaning}, saves {format_bytes(change.saved_bytes)}"
            for change in found.predicted.changes[:MOST_CHANGES]
        ]
    return lines or [WITHOUT_A_MODEL]
