"""What the interactive timeline draws: the tensors, the distinct segments and their order, as the
Timeline has them; timeline_view.js spells them out itself."""

from __future__ import annotations

from napkinmath.report import drawn
from napkinmath.report.palette import COLORS, STACK
from napkinmath.report.picture import device_lines
from napkinmath.report.tensors import shape_text, tensor_axes, type_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.ledger import Role
    from napkinmath.ir.timeline import TensorInfo, Timeline, TimelineSegment
    from napkinmath.report.drawn import Shown

ACTIONS = {"+": 0, "-": 1, "=": 2, "!": 3}


def view_data(timeline: Timeline, estimate: Estimate | None) -> dict[str, Any]:
    """A timeline and the estimate's horizontal lines, as timeline_view.js takes them."""
    lines = [{"label": line.label, "bytes": line.nbytes} for line in device_lines(estimate)]
    found = drawn.shown(timeline)
    time = estimate.time if estimate is not None else None
    step = {} if time is None or found.left_out else {"step_seconds": time.seconds}
    return {"lines": lines, **step, **compact(found)}


def compact(found: Shown) -> dict[str, Any]:
    """Roles, tensors, distinct segments, their order, and what is alive before them; only what is
    drawn."""
    timeline = found.timeline
    used = _used(found)
    place = {tensor: number for number, tensor in enumerate(used)}
    roles = [role for role in STACK if any(timeline.tensors[t].role is role for t in used)]
    numbers: dict[int, int] = {}
    segments: list[dict[str, Any]] = []
    order: list[list[int]] = []
    for index in found.segments:
        segment = timeline.segments[index]
        number = numbers.get(id(segment))
        if number is None:
            number = numbers[id(segment)] = len(segments)
            segments.append(_segment(segment, place))
        order.append([number, segment.repeat])
    return {
        "roles": [{"name": role.value, "color": COLORS[role]} for role in roles],
        "tensors": [_tensor(timeline.tensors[t], roles) for t in used],
        "alive": [[place[t], n] for t, n in enumerate(found.counts) if n],
        "segments": segments,
        "order": order,
    }


def _used(found: Shown) -> list[int]:
    """Tensors that are alive before, or occur in, the segments drawn."""
    used = {t: None for t, n in enumerate(found.counts) if n}
    for segment in {
        id(s): s for s in (found.timeline.segments[i] for i in found.segments)
    }.values():
        for action, index in segment.events:
            if action in "+-":
                used[index] = None
            elif action == "=":
                used.update(dict.fromkeys(segment.pairs[index]))
    return list(used)


def _tensor(tensor: TensorInfo, roles: list[Role]) -> list[Any]:
    shape = shape_text(tensor) if tensor_axes(tensor) else ""
    name = tensor.name.removeprefix(
        f"{tensor.module}."
    )  # a traced parameter is named by its whole path
    return [
        name,
        roles.index(tensor.role),
        tensor.module,
        tensor.requested,
        shape,
        type_name(tensor),
        tensor.source,
    ]


def _segment(segment: TimelineSegment, place: dict[int, int]) -> dict[str, Any]:
    events: list[int] = []
    for action, index in segment.events:
        events += (ACTIONS[action], place[index] if action in "+-" else index)
    return {
        "name": segment.name,
        "phase": segment.phase.value,
        "copies": segment.repeat,
        "seconds": segment.seconds,
        "events": events,
        "pairs": [[place[old], place[new]] for old, new in segment.pairs],
        "kernels": [[k.name, k.module, k.seconds, k.bound] for k in segment.kernels],
    }
