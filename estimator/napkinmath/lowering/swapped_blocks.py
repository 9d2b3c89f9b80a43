"""Blocks that wait on the host: their linears are copied into the place of other blocks' once those
have run, which go to the host. As many blocks as stay are on the device at any time.

Weights of other modules, biases and adapters stay. Source: kohya-ss/musubi-tuner
modules/custom_offloading_utils.py ModelOffloader (prepare_block_devices_before_forward,
submit_move_blocks_forward, create_backward_hook).
"""

from __future__ import annotations

from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def swapped_tensors(run: Run) -> list[Tensor]:
    """What of a run's block is swapped."""
    if not run.stage.swapped:
        return []
    return [
        w.tensor
        for w in run.block.weights
        if w.kind == "linear" and not w.tied_to and w.tensor.role is not Role.ADAPTERS
    ]


def hold_on_host(load: list[Segment], runs: list[Run]) -> list[Segment]:
    """The loading segments with swapped weights in host memory."""
    by_segment = {f"weights of {run.name}": set(swapped_tensors(run)) for run in runs}

    def moved(segment: Segment, event: Event) -> Event:
        action, tensor = event
        if action != ALLOC or tensor not in by_segment.get(segment.name, ()):
            return event
        t: Tensor = tensor  # type: ignore[assignment]
        return action, Tensor(t.name, t.axes, t.dtype, t.role, t.module, t.source, host=True)

    return [s.copy(events=[moved(s, event) for event in s.events], repeat=s.repeat) for s in load]


def swap(segments: list[Segment], runs: list[Run], policy: Policy) -> list[Segment]:
    """A micro-step's segments: with each swapped block another one goes to the host, forward and
    backward, beside what the device computes."""
    by_name = {run.name: swapped_tensors(run) for run in runs if run.stage.swapped}
    pinned, found = policy.config.offload.pinned, list[Segment]()
    for segment in segments:
        tensors = by_name.get(segment.run)
        if not tensors or segment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            found.append(segment)
            continue
        backward = segment.phase is Phase.BACKWARD
        copies: list[Event] = [
            (RUN, Work(None, (HostCopy(t.nbytes, to_host=way, pinned=pinned),), backward))
            for t in tensors
            for way in (True, False)
        ]
        found.append(segment.copy(events=[*copies, *segment.events], repeat=segment.repeat))
    return found
