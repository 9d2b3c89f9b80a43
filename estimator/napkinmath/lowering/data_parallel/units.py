"""FSDP units: which runs' parameters are gathered together, and in which order units finish their
forward.

Layers are units of their own. 'carved' is what accelerate makes today: the embedding a unit, final
norm and head another that stays gathered, the rest the root's. 'layer' leaves all but the layers to
the root (torch's tutorials, accelerate before 1.14, FSDP1). 'none' makes one unit of the model.
Source: accelerate 1.14 utils/fsdp_utils.py fsdp2_prepare_model.
"""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, RUN
from napkinmath.ir.step import Run
from napkinmath.lowering.data_parallel.fsdp1 import FlatPiece
from napkinmath.lowering.data_parallel.pieces import Piece

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Event, Op, Steps
    from napkinmath.lowering.data_parallel.fsdp2 import Chunk
    from napkinmath.lowering.data_parallel.pieces import Both
    from napkinmath.lowering.policy import Policy


class Unit:
    """The runs (by index) whose parameters are gathered together; a layer's run is many units, one
    a copy.

    `resident` units stay gathered from the forward to the end of their backward; an `ending` unit
    reduces its gradients once the whole backward is done, since nothing that enters it has a
    gradient; an `outer` one encloses the model.
    """

    __slots__ = ("ending", "is_layer", "outer", "pieces", "resident", "runs")

    def __init__(
        self,
        runs: list[int],
        pieces: list[Piece],
        *,
        is_layer: bool,
        resident: bool,
        ending: bool,
        outer: bool = False,
    ) -> None:
        self.runs, self.pieces = runs, [p for p in pieces if p.parts]
        self.is_layer, self.resident, self.ending, self.outer = is_layer, resident, ending, outer
        own = [_times(piece.own_bytes(), 1 if is_layer else piece.copies) for piece in self.pieces]
        if len({piece.symbols for piece in self.pieces}) == 1:  # several pieces make one message
            _speak_as_one(self.pieces, own)
        else:
            for piece, sent in zip(self.pieces, own, strict=True):
                piece.sent = sent

    def of_every_copy(self, piece: Piece, events: list[Event]) -> list[Chunk]:
        """Chunks of a piece's events: once for a layer, which is a unit each time; else for all
        copies of its run, whose messages are one."""
        if not events or self.is_layer or piece.copies == 1:
            return [(piece.symbols, events)]
        silent = [event for event in events if event[0] != RUN]
        return [(piece.symbols, events), *[(piece.symbols, silent)] * (piece.copies - 1)]


def _times(sent: tuple[Both, Both, Both], copies: int) -> tuple[Both, Both, Both]:
    gathered, reduced, summed = ((copies * dense, copies * spread) for dense, spread in sent)
    return gathered, reduced, summed


def _speak_as_one(pieces: list[Piece], own: list[tuple[Both, Both, Both]]) -> None:
    nothing = (0, 0)
    for piece in pieces:
        piece.sent = (nothing, nothing, nothing)
    reducing = [piece for piece in pieces if piece.reduces]
    gathered, reduced, summed = (
        (sum_of([sizes[i][0] for sizes in own]), sum_of([sizes[i][1] for sizes in own]))
        for i in range(3)
    )
    pieces[-1].sent = (gathered, nothing, nothing)
    if reducing:
        last = reducing[-1]
        last.sent = (last.sent[0], reduced, summed)


def sum_of(sizes: list[Size]) -> Size:
    """The sum of sizes of which some may be symbolic."""
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


def units_of(runs: list[Run], policy: Policy) -> list[Unit]:
    """The units in the order in which they finish their forward: the enclosing one last."""
    parallel = policy.config.parallel
    flat = parallel.data_parallel is DataParallel.FSDP1
    pieces: list[Piece] = [(FlatPiece if flat else Piece)(run, policy) for run in runs]
    wrap = parallel.wrap if parallel.wrap != "auto" else "layer" if flat else "carved"
    layers = _layers(runs, wrap)
    head, entrance = _carved(runs, layers) if wrap == "carved" and layers else ([], [])
    resident = not parallel.reshards
    found: list[Unit] = []
    for index, piece in enumerate(pieces):
        if index in layers:
            found.append(Unit([index], [piece], is_layer=True, resident=resident, ending=False))
        elif entrance == [index]:
            found.append(Unit([index], [piece], is_layer=False, resident=resident, ending=True))
        elif head and index == head[-1]:
            own, both = [pieces[i] for i in head], len(head) > 1
            found.append(Unit(head, own, is_layer=False, resident=True, ending=both))
    root = [i for i in range(len(runs)) if i not in (*layers, *head, *entrance)]
    if root:
        own = [pieces[i] for i in root]
        found.append(Unit(root, own, is_layer=False, resident=True, ending=True, outer=True))
    return [unit for unit in found if unit.pieces]


def _layers(runs: list[Run], wrap: str) -> set[int]:
    """The runs that are units for themselves; a layer that is not checkpointed is one too."""
    if wrap == "none":
        return set()
    paths = {run.path for run in runs if run.stage.checkpointed or run.stage.count > 1}
    return {i for i, run in enumerate(runs) if run.path in paths}


def _carved(runs: list[Run], layers: set[int]) -> tuple[list[int], list[int]]:
    """(runs of the head's unit, with the embedding that it is tied to; those of the entrance's)."""
    last = len(runs) - 1
    tied = any(w.tied_to for w in runs[last].block.weights)
    head = [] if last in layers else [0, last] if tied and 0 not in layers else [last]
    return head, [0] if 0 not in layers and 0 not in head else []


# ---------------------------------------------------------------- places within a run


def readers_of_weights(run: Run) -> list[Op]:
    """The operations of a run that read its weights."""
    paths = {w.path for w in run.block.weights}
    return [
        op
        for op in run.block.ops
        if any(v.weight is not None and v.weight.path in paths for v in op.inputs)
    ]


def first_event(events: list[Event], steps: Steps) -> int:
    """Where the steps of an operation begin among the events of its block."""
    own = {tensor for action, tensor in steps if action == ALLOC}
    return next(
        (i for i, (action, payload) in enumerate(events) if action == ALLOC and payload in own), 0
    )
