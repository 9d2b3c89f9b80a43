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
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def save_sharded(runs: list[Run], owned: list[Run], policy: Policy) -> list[Segment]:
    """The segments of saving what was trained."""
    if not policy.config.parallel.full_state_dict:
        return save_segments(owned, policy)
    parallel = policy.config.parallel
    found: list[Segment] = []
    for run in runs:
        events: list[Event] = []
        for weight in run.block.weights:
            if not weight.trainable or weight.tied_to:
                continue
            whole = Tensor(
                f"whole {weight.tensor.name}",
                weight.axes,
                stored_dtype(weight, policy),
                Role.WEIGHTS,
                weight.path,
            )
            gathers = collectives(
                "all-gather", split_bytes([whole], parallel), parallel, "shard", overlaps=False
            )
            copy = Work(None, (HostCopy(whole.nbytes, to_host=True, pinned=False),), False)
            events += [
                (ALLOC, whole),
                (RUN, Work(None, gathers, False)),
                (RUN, copy),
                (FREE, whole),
            ]
        if events:
            found.append(
                Segment(f"saving {run.name}", Phase.SAVE, events, run.count, run.stage.symbols)
            )
    return found
