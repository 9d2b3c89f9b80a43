"""Weights of the layers in host memory: each layer's are copied to the device for its forward and
again for its backward.

While one layer runs, `prefetch` others are on their way. Trained weights need the optimizer on the
host too. Sources: ZeRO-Infinity (arXiv 2104.07857); accelerate hooks.py AlignDevicesHook with
offload; diffusers' and torchao's streaming alike.
"""

from __future__ import annotations

from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def streamed_tensors(run: Run) -> list[Tensor]:
    """What of a run's block is streamed: everything stored but adapters, for layers; nothing for
    embeddings and head."""
    if not run.stage.checkpointed:
        return []
    return [
        t
        for w in run.block.weights
        if not w.tied_to and w.tensor.role is not Role.ADAPTERS
        for t in (w.tensor, *w.constants)
    ]


def load_on_host(load: list[Segment], runs: list[Run]) -> list[Segment]:
    """The loading segments with streamed weights in host memory."""
    moved = {
        t: Tensor(t.name, t.axes, t.dtype, t.role, t.module, t.source, host=True)
        for run in runs
        for t in streamed_tensors(run)
    }
    return [
        Segment(
            s.name,
            s.phase,
            [(a, moved.get(p, p)) if isinstance(p, Tensor) else (a, p) for a, p in s.events],
            s.repeat,
            s.symbols,
        )
        for s in load
    ]  # type: ignore[misc]


def stream(segments: list[Segment], runs: list[Run], policy: Policy) -> list[Segment]:
    """A micro-step's segments with every streamed layer's weights brought in before and dropped
    after it."""
    offload = policy.config.offload
    by_name = {run.name: streamed_tensors(run) for run in runs if streamed_tensors(run)}
    found: list[Segment] = []
    for segment in segments:
        tensors = by_name.get(segment.run)
        if tensors is None or segment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            found.append(segment)
            continue
        ahead = [
            Tensor(f"{t.name} on its way", t.axes, t.dtype, t.role, t.module, t.source)
            for t in tensors
            for _ in range(offload.prefetch)
        ]
        found += [
            _beside(segment, "prefetch", [(ALLOC, t) for t in ahead]),
            segment.copy(events=_around(segment, tensors, policy), repeat=segment.repeat),
            _beside(segment, "end of the prefetch", [(FREE, t) for t in ahead]),
        ]
    return found


def _beside(segment: Segment, what: str, events: list[Event]) -> Segment:
    return Segment(f"{what} of {segment.name}", segment.phase, events, 1, segment.symbols)


def _around(segment: Segment, tensors: list[Tensor], policy: Policy) -> list[Event]:
    """A layer's events between the arrival of its weights and their end."""
    pinned, backward = policy.config.offload.pinned, segment.phase is Phase.BACKWARD
    copies = (HostCopy(t.nbytes, to_host=False, pinned=pinned) for t in tensors)
    return [
        *((ALLOC, t) for t in tensors),
        *((RUN, Work(None, (copy,), backward)) for copy in copies),
        *segment.events,
        *((FREE, t) for t in tensors),
    ]
