"""Components: what the device figure is made of at one moment, read off a Timeline.

Every tensor belongs to exactly one row, so the rows sum to the moment's bytes; with allocator slack
and device context they sum to the device figure.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.base.units import format_bytes
from napkinmath.ir.ledger import Role
from napkinmath.report.origins import NO_FACTS, Facts, facts_of, origin_of
from napkinmath.report.parts import LABELS, component_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.timeline import Point, Timeline
    from napkinmath.report.origins import Held


class Component(Record):
    """A row: bytes at a moment, how many tensors hold them, and where they come from in one
    phrase."""

    key: str
    label: str
    role: Role
    nbytes: int
    num_tensors: int
    origin: str


def held_by_component(timeline: Timeline, point: Point) -> dict[str, Held]:
    """(tensor, copies alive on the device) at a moment, by row, in the order of the table."""
    held: dict[str, Held] = {}
    for tensor, count in zip(timeline.tensors, timeline.live_counts(point), strict=True):
        if count and (tensor.requested or not tensor.host_bytes):
            held.setdefault(component_key(tensor), []).append((tensor, count))
    return {key: held[key] for key in LABELS if key in held}


def held_on_host(timeline: Timeline, point: Point) -> Held:
    """(tensor, copies alive in host or unified memory) at a moment."""
    return [
        (t, n)
        for t, n in zip(timeline.tensors, timeline.live_counts(point), strict=True)
        if n and t.host_bytes
    ]


def components_at(
    timeline: Timeline, point: Point, facts: Facts = NO_FACTS
) -> tuple[Component, ...]:
    """The rows of a moment; their bytes sum to the point's."""
    rows: list[Component] = []
    for key, held in held_by_component(timeline, point).items():
        nbytes = sum(t.requested * n for t, n in held)
        rows.append(
            Component(
                key=key,
                label=LABELS[key],
                role=held[0][0].role,
                nbytes=nbytes,
                num_tensors=sum(n for _, n in held),
                origin=origin_of(key, held, nbytes, facts),
            )
        )
    return tuple(rows)


RETURNED = ", after the full device made the allocator return its cache"


def components_of(estimate: Estimate) -> tuple[Component, ...]:
    """The rows of an estimate's peak with allocator slack and device context; they sum to the
    device figure."""
    rows = list(components_at(estimate.timeline, estimate.peak, facts_of(estimate)))
    memory, hardware = estimate.memory, estimate.hardware
    requested = sum(r.nbytes for r in rows)
    allocated, device = int(memory.allocated.value), int(memory.device.value)
    held, where = int(memory.reserved.value), "no GPU named"
    outside = context = device - held
    if hardware is not None:
        held = min(held, device - hardware.context_bytes)  # a full device holds less than it did
        outside, where = device - held, hardware.gpu.name
        context = min(outside, hardware.context_bytes)
    rounding, cache = format_bytes(allocated - requested), format_bytes(held - allocated)
    slack = f"rounding {rounding} + cache {cache}"
    rows.append(_extra("slack", Role.SLACK, held - requested, slack))
    if outside > context:
        paged = "unified memory, on the device while there is room"
        rows.append(_extra("managed", Role.OPTIMIZER, outside - context, paged))
    rows.append(_extra("context", Role.CONTEXT, context, f"CUDA context, kernels: {where}"))
    return tuple(rows)


def _extra(key: str, role: Role, nbytes: int, origin: str) -> Component:
    return Component(
        key=key, label=LABELS[key], role=role, nbytes=nbytes, num_tensors=0, origin=origin
    )
