"""From a recorded block to the events of its forward: kept for the backward, checkpointed, or run
again."""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, RUN, Block, Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.saved_offload import SavedOffload


class Forward:
    """A block's forward as events, and the tensors that outlive it.

    `unreached` go with the block's graph: selected ones that a recomputation stopped before, and
    what it made again and still holds.
    """

    __slots__ = ("events", "kept", "unreached", "until_end")

    def __init__(
        self,
        events: list[Event],
        kept: set[Tensor],
        until_end: list[Tensor],
        unreached: list[Tensor],
    ) -> None:
        self.events, self.kept, self.until_end, self.unreached = events, kept, until_end, unreached


def saved_tensors(block: Block) -> set[Tensor]:
    """Every tensor that some operation of the block keeps for its backward."""
    return {tensor for op in block.ops for tensor in op.saves}


def _frees_after(
    block: Block, kept: set[Tensor], not_before: dict[Tensor, int]
) -> dict[int, list[Tensor]]:
    """Which of the block's own tensors die after which operation."""
    owned = {t for op in block.ops for kind, t in op.forward if kind == ALLOC} - {
        t for op in block.ops for kind, t in op.forward if kind == FREE
    }
    if block.input is not None:
        owned.add(block.input.tensor)
    if block.output is not None:
        owned.discard(block.output.tensor)
    owned -= {value.tensor for value in block.externals}
    frees: dict[int, list[Tensor]] = {}
    for tensor, index in block.last_use.items():
        if tensor in owned and tensor not in kept:
            frees.setdefault(max(index, not_before.get(tensor, 0)), []).append(tensor)
    return frees


def forward_events(
    block: Block,
    *,
    keep: bool,
    holds_input: bool,
    cached: Collection[Tensor] = (),
    stop_early: bool = False,
    selected: Collection[Tensor] = (),
    replay: bool = False,
    offload: SavedOffload | None = None,
    is_layer: bool = False,
) -> Forward:
    """The forward with its saved tensors kept, or freed as soon as nothing reads them
    (`keep=False`, checkpointing).

    `holds_input`: the input is a checkpoint and stays until the block's backward is done. `cached`
    tensors (autocast's weight casts) live to the end of the forward pass. `stop_early` ends a
    recomputation at the last operation that saves something, as torch.utils.checkpoint does without
    reentrance. `selected` tensors outlive a checkpointed forward and are there already when it is
    run again (`replay`); `offload` sends saved tensors to the host. The caller of a layer
    (`is_layer`) holds its input until it returns.
    """
    kept = (
        saved_tensors(block) - (offload.gone if offload is not None else set())
        if keep
        else set[Tensor]()
    )
    held = kept.union(cached, () if replay else selected)
    if block.input is not None and holds_input:
        held = held | {block.input.tensor}
    not_before = offload.released_after() if offload is not None else {}
    if keep:
        not_before = {**block.graph_use, **not_before}
    if is_layer and block.input is not None:
        not_before[block.input.tensor] = len(block.ops) - 1
    frees = _frees_after(block, held, not_before)
    last = _stop(block) if stop_early else len(block.ops) - 1
    events: list[Event] = []
    again = made_again(block) if replay else {}
    unreached = [
        t for op in block.ops[last + 1 :] for _, t in op.forward if replay and t in selected
    ]
    alive: dict[Tensor, None] = {t: None for t in selected if replay and t not in unreached}
    if block.input is not None and block.input.tensor in cached:
        alive[block.input.tensor] = None
    for index, op in enumerate(block.ops[: last + 1]):
        if not (replay and any(tensor in selected for _, tensor in op.forward)):
            for step in op.forward:
                events.append((step[0], again.get(step[1], step[1])))
                if step[0] == ALLOC:
                    alive[step[1]] = None
                else:
                    alive.pop(step[1], None)
            if op.costs:
                events.append((RUN, op.work(backward=False)))
        if offload is not None:
            events += offload.copies_out(index)
        for tensor in frees.get(index, ()):
            events.append((FREE, tensor))
            alive.pop(tensor, None)
    if stop_early:  # the exception that ends the recomputation drops everything not saved
        output = block.output.tensor if block.output is not None else None
        stored = {value.tensor for value in block.stored}
        dropped = [
            t
            for t in alive
            if t not in stored and (t not in held or (t is output and t not in kept))
        ]
        events += [(FREE, again.get(tensor, tensor)) for tensor in dropped]
        again = {tensor: copy for tensor, copy in again.items() if tensor not in dropped}
    unreached += [copy for tensor, copy in again.items() if tensor in alive]
    shared = {value.tensor for value in block.externals}  # their last reader says when they go
    ends = [t for t in cached if t in alive and t not in kept and t not in shared]
    return Forward(events, kept, ends, unreached)


def stored_graph(block: Block) -> set[Tensor]:
    """What the graph of the block's stored values keeps: the tensors saved on the way to them."""
    wanted = {id(value) for value in block.stored}
    kept: set[Tensor] = set()
    for op in reversed(block.ops):
        if any(id(out) in wanted for out in op.outputs):
            wanted.update(id(value) for value in op.inputs if value.requires_grad)
            kept.update(op.saves)
    return kept


def made_again(block: Block) -> dict[Tensor, Tensor]:
    """Stand-ins for what a recomputed block hands to later ones: the first copy is theirs, the
    second the recomputation's own."""
    shared = {value.tensor for value in block.externals}
    made = {t: None for op in block.ops for kind, t in op.forward if kind == ALLOC and t in shared}
    return {t: Tensor(f"{t.name}, made again", t.axes, t.dtype, t.role, t.module) for t in made}


def _stop(block: Block) -> int:
    """The last operation that a recomputation with early stop runs: packing the last saved tensor
    raises.

    Inputs are packed before the kernel runs, results after it (torch's generated VariableType
    functions).
    """
    last = max((i for i, op in enumerate(block.ops) if op.saves), default=-1)
    if last < 0:
        return last
    op = block.ops[last]
    made = {tensor for _, tensor in op.forward}
    return last if any(tensor in made for tensor in op.saves) else last - 1
