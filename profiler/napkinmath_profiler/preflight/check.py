"""``preflight``: the live objects read, priced and judged; raises ``DoesNotFit`` where even the
optimistic end cannot fit."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, SupportsInt, cast

import torch
from napkinmath.answers.figures import Finding
from napkinmath.answers.ranges import headroom_bytes
from napkinmath.base.errors import DoesNotFit, InputError
from napkinmath.base.units import GIB, MIB, format_bytes
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import (
    Loss,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import WorkloadKind
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.ir.ledger import Role
from napkinmath.memory.allocator_settings import parse_settings
from torch import nn

from napkinmath_profiler.measuring.environment import ALLOCATOR_VARIABLES
from napkinmath_profiler.preflight.batch_shape import BatchShape, longest_of, shape_of
from napkinmath_profiler.preflight.live_findings import live_findings
from napkinmath_profiler.preflight.live_model import LiveModel, read_model, settled
from napkinmath_profiler.preflight.live_optimizer import optimizer_name, state_bytes
from napkinmath_profiler.preflight.python_words import Caller, in_python
from napkinmath_profiler.preflight.random_states import random_states_kept

OTHERS_WORTH_SAYING = 256 * MIB
COUNTS_AGREE = (
    0.001  # share of the parameters by which a model may differ from its config before that is said
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The answer: the estimate of what was found, the verdict, and what to look at."""

    estimate: Estimate
    live: LiveModel
    shape: BatchShape
    findings: tuple[Finding, ...]
    held_by_others: int = 0
    held_here: int = 0
    """Bytes that this process holds on the device and that are neither the model's nor its
    optimizer's."""
    caller: Caller = Caller.PYTHON

    @property
    def headroom_bytes(self) -> int | None:
        """What the step leaves of the device, as `estimate check` has it; None without one."""
        return headroom_bytes(self.estimate)

    @property
    def ways(self) -> tuple[str, ...]:
        """Changes that would save most at the peak, in the caller's Python, best first."""
        return tuple(
            f"{in_python(change.flag, self.caller)} (-{format_bytes(change.saved_bytes)})"
            for change in self.estimate.changes
        )

    @property
    def verdict(self) -> Verdict:
        """Fits, does not, cannot tell, or no device was named."""
        return self.estimate.verdict

    def __str__(self) -> str:
        memory, machine = self.estimate.memory, self.estimate.hardware
        left = self.headroom_bytes
        lines = [
            f"{self.live.name}: {self.verdict.value}"
            + (f" on {machine.gpu.name}, {format_bytes(machine.memory_bytes)}" if machine else ""),
            (
                f"  batch {self.shape.micro_batch_size} x {self.shape.sequence_length},"
                f" {self.live.num_trained:,} of {self.live.num_parameters:,} parameters trained"
            ),
            (
                f"  allocated {_span(memory.allocated)}   reserved {_span(memory.reserved)}  "
                f" device {_span(memory.device)} GiB"
                + ("" if left is None else f"   headroom {left / GIB:.2f} GiB")
            ),
        ]
        return "\n".join([*lines, *(f"  - {finding.text}" for finding in self.findings)])


def _span(span: Any) -> str:
    return f"{span.value / GIB:.2f} ({span.low / GIB:.2f}-{span.high / GIB:.2f})"


def preflight(
    model: nn.Module,
    optimizer: Any = None,
    batch: Any = None,
    *,
    dataset: Any = None,
    max_length: int = 0,
    hardware: str | Hardware | None = None,
    autocast_dtype: torch.dtype | None = None,
    train_config: TrainConfig | None = None,
    training: bool | None = None,
    requested_checkpointing: bool | None = None,
    raises: bool = True,
    caller: Caller = Caller.PYTHON,
) -> Preflight:
    """Prices the training step that live objects are about to take, without running, changing or
    allocating anything.

    ``optimizer``: a torch optimizer (or a name of the catalogue's); ``batch``: a batch, a tensor
    (b, s) or (b, s) itself; with ``dataset`` (tokenized) its longest row is what must fit, cut to
    ``max_length``. ``hardware``: a GPU by name; the current CUDA device where there is one.
    ``autocast_dtype``: of the region that the loop will open (None: the one that is open now).
    ``training``: the mode that the loop will set (None: the one the model is in). ``train_config``
    gives what no object knows: accumulation, clipping, loss, stack, workload. `PYTORCH_ALLOC_CONF`
    of this process counts. Random states are left as they are, whatever a dataset's rows draw.
    Raises DoesNotFit where even the optimistic end of the range does not fit, unless ``raises`` is
    False; TraceError where an object cannot be read. ``caller``: whose Python the findings and ways
    out are in.
    """
    config = train_config or TrainConfig(stack="hf-bare")
    live = read_model(
        model, autocast_dtype=autocast_dtype or _open_autocast(), shards=_world_size()
    )
    with random_states_kept():
        shape = _shape(batch, dataset, max_length, config)
    config = settled(live, config).replace(
        micro_batch_size=shape.micro_batch_size,
        sequence_length=shape.sequence_length,
        optimizer=_optimizer(optimizer, config),
    )
    if training is not None:
        config = config.replace(training_mode=training)
    asked = (
        live.requested_checkpointing if requested_checkpointing is None else requested_checkpointing
    )
    machine, others, own = _machine(hardware, live, optimizer, config)
    allocator, unpriced = _own_allocator()
    priced = estimate(live.config, config, hardware=machine, allocator=allocator)
    findings = [
        *unpriced,
        *live_findings(model, optimizer, priced.config),
        *_findings(priced, live, shape, others, asked=asked, caller=caller),
        *_held_here(own),
    ]
    found = Preflight(
        estimate=priced,
        live=live,
        shape=shape,
        held_by_others=others,
        held_here=own,
        findings=tuple(
            finding.replace(text=in_python(finding.text, caller)) for finding in findings
        ),
        caller=caller,
    )
    if priced.verdict is not Verdict.DOES_NOT_FIT:
        return found
    if raises:
        raise DoesNotFit(_refusal(found))
    return replace(found, findings=(Finding(text=_refusal(found)), *found.findings))


def _shape(batch: Any, dataset: Any, max_length: int, config: TrainConfig) -> BatchShape:
    given = None if batch is None else shape_of(batch)
    if dataset is None:
        return given or shape_of((config.micro_batch_size, config.sequence_length))
    rows = given.micro_batch_size if given is not None else config.micro_batch_size
    return longest_of(dataset, int(cast(SupportsInt, rows)), at_most=max_length)


def _optimizer(optimizer: Any, config: TrainConfig) -> str:
    if optimizer is None:
        return config.optimizer
    return optimizer if isinstance(optimizer, str) else optimizer_name(optimizer)


def _open_autocast() -> torch.dtype | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _world_size() -> int:
    distributed = torch.distributed
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def _machine(
    hardware: str | Hardware | None, live: LiveModel, optimizer: Any, config: TrainConfig
) -> tuple[Hardware | None, int, int]:
    """(the device, what other processes hold of it, what this one holds beside the model and its
    optimizer)."""
    if isinstance(hardware, Hardware):
        return hardware, hardware.others_bytes[0], 0
    if hardware is not None or not torch.cuda.is_available():
        return (None if hardware is None else find_hardware(hardware)), 0, 0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    try:
        machine = find_hardware(properties.name, vram=total)
    except InputError:
        machine = find_hardware(vram=total)
    others = max(0, total - free - torch.cuda.memory_reserved() - machine.context_bytes)
    ours = _num_copies(config) * live.device_bytes + state_bytes(optimizer)
    own = max(0, torch.cuda.memory_allocated() - ours)
    gone = others + own
    return machine.replace(display=(gone, gone, gone)), others, own


def _own_allocator() -> tuple[str, tuple[Finding, ...]]:
    """This process's allocator settings, as torch will read them; what has no rule is a finding."""
    name = next((name for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    settings = os.environ.get(name, "")
    try:
        parse_settings(settings)
    except InputError as refused:
        text = f"{name} is not priced, torch's defaults are: {refused}"
        return "", (Finding(text=text),)
    return settings, ()


def _num_copies(config: TrainConfig) -> int:
    """The model, and DPO's reference where that is not the model without its adapters."""
    workload = config.workload
    has_reference = workload.kind is WorkloadKind.DPO and workload.reference
    return 2 if has_reference and config.adapter is None else 1


# ---------------------------------------------------------------- what is found


def _findings(
    e: Estimate, live: LiveModel, shape: BatchShape, others: int, *, asked: bool, caller: Caller
) -> tuple[Finding, ...]:
    found = [
        _unlike_its_config(e, live),
        _others(e, others),
        _first_step(e),
        _cache(e, live),
        _longest(e, shape),
        _upcast(e),
    ]
    if asked and e.config.recompute.kind is RecomputeKind.NONE:
        found.append(_never_enabled(e, caller))
    return tuple(f for f in (*e.findings, *found) if f is not None)


def _saves(e: Estimate, changed: TrainConfig) -> int:
    return e.peak.nbytes - estimate(e.spec, changed).peak.nbytes


def _never_enabled(e: Estimate, caller: Caller) -> Finding:
    cost = _saves(e, e.config.replace(recompute=RecomputeConfig(kind=RecomputeKind.FULL)))
    text = (
        f"checkpointing was asked for, but no layer has it on: {format_bytes(cost)} more; use"
        f" {in_python('--checkpointing full', caller)}"
    )
    return Finding(text=text, nbytes=cost)


def _unlike_its_config(e: Estimate, live: LiveModel) -> Finding | None:
    for what, has, priced in (
        ("", live.num_parameters, e.num_parameters),
        (" trained", live.num_trained, e.num_trained),
    ):
        if abs(has - priced) > COUNTS_AGREE * priced:
            return Finding(
                text=(
                    f"the live model has {has:,}{what} parameters and {priced:,} were priced: what"
                    " was added, cut or frozen is not"
                )
            )
    return None


def _others(e: Estimate, others: int) -> Finding | None:
    if others < OTHERS_WORTH_SAYING or e.hardware is None:
        return None
    return Finding(
        text=(
            f"other processes hold {format_bytes(others)} of the GPU: end them, or count on"
            f" {format_bytes(e.hardware.usable_bytes)}"
        ),
        nbytes=others,
    )


def _held_here(own: int) -> tuple[Finding, ...]:
    if own < OTHERS_WORTH_SAYING:
        return ()
    text = (
        f"this process holds {format_bytes(own)} on the GPU beside the model and its optimizer: let"
        " go of it before training"
    )
    return (Finding(text=text, nbytes=own),)


def _first_step(e: Estimate) -> Finding | None:
    states = e.timeline.breakdown(e.peak).get(Role.OPTIMIZER, 0)
    if states < e.peak.nbytes // 10:
        return None
    return Finding(
        text=(
            f"the optimizer's states, {format_bytes(states)}, are made in the first step: memory"
            " after loading does not show them yet"
        ),
        nbytes=0,
    )


def _cache(e: Estimate, live: LiveModel) -> Finding | None:
    if not live.uses_cache or e.config.recompute.kind is not RecomputeKind.NONE:
        return None
    return Finding(
        text=(
            "config.use_cache is on: training keeps a key/value cache that nothing reads; set"
            " model.config.use_cache = False"
        )
    )


def _longest(e: Estimate, shape: BatchShape) -> Finding | None:
    if not shape.rows_seen or shape.sequence_length < 2 * shape.usual_length:
        return None
    usual = estimate(e.spec, e.config.replace(sequence_length=shape.usual_length)).peak.nbytes
    seen = (
        f"{shape.rows_seen:,} rows"
        if shape.rows_seen >= shape.num_rows
        else f"{shape.rows_seen:,} rows looked at, of {shape.num_rows:,},"
    )
    text = (
        f"the longest of {seen} has {shape.sequence_length:,} tokens, the median"
        f" {shape.usual_length:,}: that one batch needs {format_bytes(e.peak.nbytes - usual)} more"
        " than a usual one"
    )
    return Finding(text=text, nbytes=e.peak.nbytes - usual)


def _upcast(e: Estimate) -> Finding | None:
    """Logits in fp32 of a model in 16 bits, where they are part of the peak."""
    held = e.breakdown.get(Role.LOGITS, 0)
    if e.config.precision in (Precision.FP32, Precision.TF32):
        return None  # no 16-bit copy is made
    if e.config.loss is not Loss.HF or not 0.1 * e.peak.nbytes <= held < 0.25 * e.peak.nbytes:
        return None
    return Finding(
        text=(
            f"logits are held in fp32 beside their 16-bit copy, {format_bytes(held)} at the peak: a"
            " chunked or fused loss holds none"
        ),
        nbytes=held,
    )


def _refusal(found: Preflight) -> str:
    e = found.estimate
    machine = e.hardware
    assert machine is not None
    ways = ", ".join(found.ways[:2])
    way = f"; try {ways}" if ways else "; take a larger GPU or shard the model"
    return (
        f"{found.live.name}, batch {found.shape.micro_batch_size} x {found.shape.sequence_length},"
        f" needs {format_bytes(int(e.memory.device.low))} at least and {machine.gpu.name} has"
        f" {format_bytes(machine.memory_bytes)}{way}"
    )
