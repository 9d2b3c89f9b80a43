"""Between backward and update: the loss scaler's unscaling and gradient clipping.

Sources: torch 2.13 nn/utils/clip_grad.py clip_grad_norm_ with foreach;
aten/src/ATen/native/cuda/ForeachReduceOp.cu (one tensor of partial norms, one of norms);
amp/grad_scaler.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, DType
from napkinmath.base.expr import Size, ceil_div, maximum
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run, Segment, by_block, segments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy

FOREACH_CHUNK = (
    65536  # elements of one block of a multi-tensor kernel: kChunkSize of MultiTensorApply.cuh
)


def lower_clipping(owners: list[Run], policy: Policy) -> list[Segment]:
    """The segments of unscaling and clipping."""
    found: list[Segment] = []
    if policy.rule.loss_scaling:
        found += _scaler(owners)
        unscaled = by_block(lambda run: [_moves(run.trained, 2, 1)])
        found += segments("unscaling", Phase.CLIP, owners, unscaled)
    if policy.config.clip_gradients:
        dtypes = dict.fromkeys(w.tensor.dtype for run in owners for w in run.trained)
        for dtype in dtypes:
            found += _norms(owners, dtype)
        normed = by_block(lambda run: [_moves(run.trained, 3, 2)])
        found += segments("gradient norm", Phase.CLIP, owners, normed)
        found += _norms_released(found)
    return found


def _moves(weights: list[Weight], passes: int, launches: int) -> Event:
    moved: Size = 0
    for weight in weights:
        moved = moved + passes * weight.tensor.nbytes
    return RUN, Work(None, (Move(moved, launches),), False)


def _norms(owners: list[Run], dtype: DType) -> list[Segment]:
    """Partial norms of a type's gradients (freed at once), one norm a tensor, their stack and the
    total."""
    count, chunks = 0, list[Size]()
    for run in owners:
        weights = [w for w in run.trained if w.tensor.dtype is dtype]
        count += run.count * len(weights)
        # a tower's own sizes are not bound here; the text tower has the largest tensors
        if not run.stage.symbols:
            chunks += [ceil_div(w.elements, FOREACH_CHUNK) for w in weights]
    widest: Size = 1
    for chunk in dict.fromkeys(chunks):
        widest = maximum(widest, chunk)
    partials = Tensor("partial norms", (count, widest), FP32, Role.WORKSPACE)
    named = (("norms", count), ("stacked norms", count), ("total norm", 1), ("clipping factor", 1))
    norms, *later = (Tensor(name, (n,), dtype, Role.WORKSPACE) for name, n in named)
    events: list[Event] = [(ALLOC, partials), (ALLOC, norms), (FREE, partials)]
    events += [(ALLOC, t) for t in later]
    return [Segment(f"norms of {dtype} gradients", Phase.CLIP, events)]


def _norms_released(made: list[Segment]) -> list[Segment]:
    alive: dict[Tensor, None] = {}
    for segment in made:
        if segment.name.startswith("norms of"):
            for action, payload in segment.events:
                if isinstance(payload, Tensor):
                    if action == ALLOC:
                        alive[payload] = None
                    else:
                        alive.pop(payload)
    return [Segment("norms released", Phase.CLIP, [(FREE, tensor) for tensor in alive])]


def _scaler(owners: list[Run]) -> list[Segment]:
    """Four fp32 scalars: scale and growth tracker stay, the inverse scale and the found-inf flag
    are made each step."""
    made = [
        Tensor(name, (1,), FP32, Role.WORKSPACE) for name in ("inverse loss scale", "found inf")
    ]
    return [
        Segment(
            "loss scaler", Phase.CLIP, [*((ALLOC, t) for t in made), *((FREE, t) for t in made)]
        )
    ]
