"""A trace as the core's ``Timeline``: the same type as the analytic and the measured path give."""

from __future__ import annotations

from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Stamp, TensorInfo, Timeline, TimelineSegment

from napkinmath_profiler.tracing.module_paths import repeated_module
from napkinmath_profiler.tracing.storage_events import StorageEvent, StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult

ROLES: dict[StorageRole, Role] = {
    StorageRole.WEIGHTS: Role.WEIGHTS,
    StorageRole.ADAPTER_WEIGHTS: Role.ADAPTERS,
    StorageRole.QUANTIZATION_CONSTANTS: Role.QUANTIZATION,
    StorageRole.BUFFERS: Role.WEIGHTS,
    StorageRole.INPUTS: Role.ACTIVATIONS,
    StorageRole.GRADIENTS: Role.GRADIENTS,
    StorageRole.OPTIMIZER_STATES: Role.OPTIMIZER,
    StorageRole.SAVED_ACTIVATIONS: Role.ACTIVATIONS,
    StorageRole.ACTIVATION_GRADIENTS: Role.ACTIVATION_GRADIENTS,
    StorageRole.LOGITS: Role.LOGITS,
    StorageRole.TEMPORARIES: Role.WORKSPACE,
    StorageRole.WORKSPACE: Role.WORKSPACE,
    StorageRole.UNATTRIBUTED: Role.UNEXPLAINED,
}
PHASES: dict[TracePhase, Phase] = {
    TracePhase.SETUP: Phase.LOAD,
    TracePhase.FORWARD: Phase.FORWARD,
    TracePhase.LOSS: Phase.LOSS,
    TracePhase.BACKWARD: Phase.BACKWARD,
    TracePhase.RECOMPUTE: Phase.BACKWARD,
    TracePhase.CLIP: Phase.CLIP,
    TracePhase.OPTIMIZER: Phase.STEP,
    TracePhase.ZERO_GRAD: Phase.STEP,
    TracePhase.BETWEEN: Phase.BACKWARD,
}


def timeline_of(result: TraceResult, *, origin: str = "traced") -> Timeline:
    """Every storage a row of the tensor table, every stretch of one phase and layer a segment that
    happens once."""
    tensors = [
        TensorInfo(
            record.name or record.op,
            ROLES[record.role or StorageRole.UNATTRIBUTED],
            record.module or record.name.rpartition(".")[0],
            record.requested_bytes,
            record.rounded_bytes,
            record.dtype,
            record.shape,
            record.op,
            host_bytes=record.managed_bytes,
            managed=record.managed_bytes > 0,
        )
        for record in result.records
    ]
    details = tuple(sorted(result.versions.items())) + tuple(
        (f"cuda choice: {name}", str(n)) for name, n in sorted(result.choices.items())
    )
    segments, step_starts = _segments(result.events)
    return Timeline(tensors, segments, Stamp(origin=origin, details=details), step_starts)


def _segments(events: list[StorageEvent]) -> tuple[list[TimelineSegment], tuple[int, ...]]:
    segments: list[TimelineSegment] = []
    step_starts: dict[int, int] = {}
    current: tuple[object, ...] = ()
    for event in events:
        layer = repeated_module(event.module)
        key = (event.phase, event.step, event.micro_step, layer)
        if key != current:
            current = key
            name = f"{event.phase.value} {layer}" if layer else event.phase.value
            if event.phase is TracePhase.FORWARD:
                step_starts.setdefault(event.step, len(segments))
            segments.append(TimelineSegment(name, PHASES[event.phase], 1, [], []))
        segments[-1].events.append(("+" if event.is_allocation else "-", event.storage_id))
    return segments, tuple(step_starts.values())
