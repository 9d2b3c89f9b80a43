"""The host's side of a step: seconds to issue kernels one by one, by whom they are issued, and what
comes of it where the device waits."""

from __future__ import annotations

from napkinmath.ir.ledger import Phase
from napkinmath.timing import efficiency

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from napkinmath.ir.order import Order
    from napkinmath.ir.timeline import Kernel, TimelineSegment
    from napkinmath.timing.efficiency import Efficiency


def issue_s(phase: Phase, by_autograd: bool, speed: Efficiency) -> float:
    """Host seconds of one kernel: the model's Python in the forward and wherever it runs again,
    autograd's engine in the backward, a loop over parameters in the update."""
    python = phase in (Phase.FORWARD, Phase.LOSS, Phase.EVALUATE, Phase.ROLLOUT)
    if phase is Phase.BACKWARD:
        python = not by_autograd
    return efficiency.dispatch_s(1, not python, speed, update=phase is Phase.STEP)


def waited_s(queue: Sequence[tuple[Any, Any, bool]], larger: Callable[[Any, Any], Any]) -> Any:
    """Seconds that the host waits in one of many copies of a segment: two queues side by side, at
    their steady pace.

    `queue`: of each kernel its seconds, the host's seconds to issue it, and whether the host waits;
    `larger` is max, or numpy's for arrays of seconds.
    """
    host = device = waited = before = 0.0
    for _ in range(2):
        before = waited
        for seconds, issued, waits in queue:
            host = host + issued
            device = larger(device, host) + seconds
            if waits:
                waited = waited + (device - host)
                host = device
    return waited - before


def issued_s(phase: Phase, kernels: Sequence[Kernel], speed: Efficiency) -> float:
    """Host seconds until these kernels are issued."""
    if phase is not Phase.BACKWARD:
        return sum(k.launches for k in kernels) * issue_s(phase, False, speed)
    each = {own: issue_s(phase, own, speed) for own in (False, True)}
    return sum(k.launches * each[k.by_autograd] for k in kernels)


def _host_s(segment: TimelineSegment, speed: Efficiency) -> tuple[float, float]:
    """(seconds that the host needs to issue a segment, seconds that it waits for results in it)."""
    phase, kernels = segment.phase, segment.kernels
    issued = issued_s(phase, kernels, speed) * segment.repeat
    if not any(k.waits for k in kernels):
        return issued, 0.0
    queue = [(k.seconds, issued_s(phase, (k,), speed), k.waits) for k in kernels]
    return issued, waited_s(queue, max) * segment.repeat


def host_by_phase(
    segments: Order[TimelineSegment], speed: Efficiency
) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """(seconds of issuing, seconds of waiting for results) of the host by phase."""
    issued: dict[Phase, float] = {}
    waited: dict[Phase, float] = {}
    known: dict[int, tuple[float, float]] = {}  # a step repeats the same segments
    for times, segment in segments.counted():
        found = known.get(id(segment))
        if found is None:
            found = known[id(segment)] = _host_s(segment, speed)
        issued[segment.phase] = issued.get(segment.phase, 0.0) + times * found[0]
        waited[segment.phase] = waited.get(segment.phase, 0.0) + times * found[1]
    return issued, waited


def part_s(
    device: Sequence[Any], host: Sequence[Any], micro_steps: int, larger: Callable[[Any, Any], Any]
) -> Any:
    """Seconds of phases that come `micro_steps` times in this order, from a device that has nothing
    queued: a phase's last kernel ends after the host has issued it and after the kernels before it.

    `device`, `host`: seconds of all micro-steps by phase; `larger` is max, or numpy's for arrays.
    """
    done: Any = 0.0
    issued: Any = 0.0
    for busy, issuing in zip(device, host, strict=True):
        issued = issued + issuing
        done = larger(done + busy / micro_steps, issued / micro_steps)
    # the host runs ahead of the device through the ends of micro-steps: only the first finds nothing
    # queued
    return larger(sum(device), issued) * (micro_steps - 1) / micro_steps + done
