"""Flat copies that older releases of DeepSpeed made to reduce and to gather.

Until 0.12.7 stage 1 had no contiguous buckets: after the last backward, gradients were reduced from
flat copies of `reduce_bucket_size` elements at most. Until 0.12.4 new parameters were gathered as a
list of parts, `allgather_bucket_size` elements at a time, of which torch makes one flat tensor and
copies it out. One block serves them one after another: torch before 2.2 records them on NCCL's
stream, but side by side they would add 20 GB to BLOOM's trials. Sources: DeepSpeed runtime/engine.py
_configure_zero_optimizer (af033831f), runtime/zero/stage_1_and_2.py buffered_reduce_fallback, step,
runtime/utils.py all_gather_dp_groups (fd0a52c1a); torch distributed/c10d/ProcessGroupNCCL.cpp
allgather (newLikeFlat).
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP16
from napkinmath.base.expr import Bindings, Size
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Role, Tensor
from napkinmath.ir.step import Segment
from napkinmath.lowering.data_parallel.flat import SOURCE, elements_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.step import Run
    from napkinmath.lowering.policy import Policy

_CONTIGUOUS_IN_STAGE_1 = (0, 13)
_GATHERS_IN_PLACE = (0, 13)


def reduces_copies(policy: Policy) -> bool:
    """Whether gradients are reduced from flat copies that are made when they are."""
    first = policy.config.parallel.data_parallel is DataParallel.ZERO1
    return first and policy.stack.engine.deepspeed < _CONTIGUOUS_IN_STAGE_1


def copies_to_reduce(
    runs: list[Run], policy: Policy, sizes: dict[str, int], bucket: Size
) -> list[Segment]:
    """The copies of one step: buckets as full as they get, and what is left."""
    elements = _trained_elements(runs, sizes) if reduces_copies(policy) else 0
    if not elements or policy.adapter is not None:
        return []
    size = Bindings(sizes)(bucket)
    full, rest = divmod(elements, size)
    parts = [size] * full + [rest] * (rest > 0)
    return [_copies("gradients to reduce", parts, runs, Phase.BACKWARD)]


def copies_gathered(runs: list[Run], policy: Policy, sizes: dict[str, int]) -> list[Segment]:
    """The copies by which a step's new parameters arrive."""
    if policy.stack.engine.deepspeed >= _GATHERS_IN_PLACE or policy.adapter is not None:
        return []
    elements = _trained_elements(runs, sizes)
    limit = policy.config.parallel.zero.allgather_bucket_size
    pieces = max(1, elements // limit) if limit else 1
    parts = [elements // pieces] * pieces if elements else []
    return [_copies("gathered parameters", parts, runs, Phase.STEP)]


def _trained_elements(runs: list[Run], sizes: dict[str, int]) -> int:
    """Elements of all that is trained, where no size but the model's own is open."""
    return sum(
        run.count * Bindings({**sizes, **dict(run.stage.symbols)})(elements_of(run.trained))
        for run in runs
        if run.trained
    )


def _copies(name: str, parts: list[int], runs: list[Run], phase: Phase) -> Segment:
    """One flat tensor after another."""
    dtype = next((run.trained[0].tensor.dtype for run in runs if run.trained), FP16)
    events: list[Event] = []
    for size in parts:
        flat = Tensor(name, (size,), dtype, Role.COMMUNICATION, "", SOURCE)
        events += [(ALLOC, flat), (FREE, flat)]
    return Segment(name, phase, events)
