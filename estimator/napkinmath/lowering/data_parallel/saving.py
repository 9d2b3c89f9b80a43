"""Saving under sharding: every rank writes its shard, or whole parameters are gathered one after
the other for rank 0 to write.

Source: torch 2.13 distributed/checkpoint/state_dict.py get_model_state_dict (full_state_dict,
cpu_offload), one parameter at a time.
"""

from __future__ import annotations

from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.step import Run, Segment
from napkinmath.lowering.data_parallel.holders import collectives, split_bytes
from napkinmath.lowering.data_parallel.stored import stored_dtype
from napkinmath.lowering.lifecycle import save_segments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy


def save_sharded(runs: list[Run], owned: list[Run], policy: Policy) -> list[Segment]:
    """The segments of saving what was trained."""
    if not policy.config.parallel.full_state_dict:
        return save_segments(owned, policy)
    found: list[Segment] = []
    for run in runs:
        trained = [w for w in run.block.weights if w.trainable and not w.tied_to]
        events = [event for weight in trained for event in _gathered_to_host(weight, policy)]
        if events:
            found.append(run.segment(f"saving {run.name}", Phase.SAVE, events))
    return found


def _gathered_to_host(weight: Weight, policy: Policy) -> list[Event]:
    """A parameter gathered whole, copied to the host and dropped."""
    name, dtype = f"whole {weight.tensor.name}", stored_dtype(weight, policy)
    whole = Tensor(name, weight.axes, dtype, Role.WEIGHTS, weight.path)
    parallel = policy.config.parallel
    moved = split_bytes([whole], parallel)
    gathers = collectives("all-gather", moved, parallel, "shard", overlaps=False)
    copy = HostCopy(whole.nbytes, to_host=True, pinned=False)
    return [
        (ALLOC, whole),
        (RUN, Work(None, gathers, False)),
        (RUN, Work(None, (copy,), False)),
        (FREE, whole),
    ]
