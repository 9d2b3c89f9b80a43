"""From a recorded block to allocator events: its forward (kept, checkpointed or recomputed) and its
backward.

The backward follows PyTorch's engine: nodes in reverse order of creation, a second gradient of a
value added in place where the first is not shared (torch/csrc/autograd/input_buffer.cpp), saved
tensors released as each node has run.
"""

from __future__ import annotations

from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import (
    ALLOC,
    FREE,
    RUN,
    TAKE,
    Block,
    Op,
    Role,
    Tensor,
    Value,
    Weight,
    Work,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.gradient_hooks import GradientHook
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
        dropped = [t for t in alive if t not in held or (t is output and t not in kept)]
        events += [(FREE, again.get(tensor, tensor)) for tensor in dropped]
        again = {tensor: copy for tensor, copy in again.items() if tensor not in dropped}
    unreached += [copy for tensor, copy in again.items() if tensor in alive]
    return Forward(events, kept, [t for t in cached if t in alive and t not in kept], unreached)


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


class _Pending:
    """A gradient waiting at a value: its tensor, and how many holders share it."""

    __slots__ = ("holders", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.holders = tensor, 0


class Backward:
    """Runs the engine over one block; `events` grows in the order in which the device sees them."""

    def __init__(
        self,
        block: Block,
        *,
        accumulate: bool = False,
        filled: dict[str, Tensor] | None = None,
        opened: frozenset[int] = frozenset(),
        keeps_input: bool = False,
        recompute: Sequence[Event] = (),
        offload: SavedOffload | None = None,
        hook: GradientHook | None = None,
    ) -> None:
        self.block = block
        self.hook = hook
        self.hooked: list[tuple[GradientHook, Weight, Tensor]] = []
        self.offload = offload
        self.unpacks = bool(recompute)
        self.recompute = (
            recompute  # the forward again, run when the first node asks for a tensor it saved
        )
        self.events: list[Event] = []
        self.accumulate = accumulate  # gradients of an earlier micro-step exist already
        self.filled = (
            filled or {}
        )  # path of a weight -> its gradient, made by another block already (tied weights)
        self.opened = (
            opened  # ids of the shared values whose gradient slot a later block has filled already
        )
        self.keeps_input = keeps_input  # a checkpoint holds the input until the whole block is done
        self.at: dict[int, _Pending] = {}  # id(value) -> gradient waiting there
        self.values: dict[int, Value] = {}
        self.persistent: list[Tensor] = []  # gradients of weights that outlive the block
        self.made: dict[str, Tensor] = {}  # path of a weight -> its gradient, made here
        self.external_tensors = {id(v): v for v in block.externals}

    def run(self, incoming: Tensor | None) -> Tensor | None:
        """Backward from the gradient of the block's output; returns the gradient of its input, if
        it needs one."""
        block = self.block
        if incoming is not None and block.output is not None:
            self._hold(block.output, _Pending(incoming))
        self._take_shared()
        users = self._last_savers()
        for index in range(len(block.ops) - 1, -1, -1):
            self._node(index, block.ops[index], users.get(index, []))
            self._run_hooks()
        gradient = self._input_gradient()
        if self.keeps_input and block.input is not None:
            self.events.append((FREE, block.input.tensor))
        return gradient

    def _take_shared(self) -> None:
        """The gradients that later blocks left at the shared values which this block made."""
        made = {id(out) for op in self.block.ops for out in op.outputs}
        for key, value in self.external_tensors.items():
            if key in self.opened and key in made and value is not self.block.output:
                pending = _Pending(
                    Tensor(
                        f"grad of {value.tensor.name}",
                        value.axes,
                        value.dtype,
                        Role.ACTIVATION_GRADIENTS,
                        self.block.name,
                    )
                )
                self.events.append((TAKE, (value.shared_gradient(), pending.tensor)))
                self._hold(value, pending)

    def _last_savers(self) -> dict[int, list[Tensor]]:
        """The operation after whose backward each saved tensor dies: the first, in forward order,
        that saved it."""
        owned = {t for op in self.block.ops for kind, t in op.forward if kind == ALLOC}
        if self.block.input is not None and not self.keeps_input:
            owned.add(self.block.input.tensor)
        if self.block.output is not None:
            owned.discard(self.block.output.tensor)
        owned -= {v.tensor for v in self.block.externals}
        seen: set[Tensor] = set()
        users: dict[int, list[Tensor]] = {}
        offload = self.offload
        for index, op in enumerate(self.block.ops):
            made_forward = {g.tensor for g in op.gradients if g.tensor is not None}
            for tensor in op.saves if offload is None else offload.staying(index, op):
                if tensor in owned and tensor not in seen and tensor not in made_forward:
                    seen.add(tensor)
                    users.setdefault(index, []).append(tensor)
        return users

    def _node(self, index: int, op: Op, released: list[Tensor]) -> None:
        """One node: its backward runs, its incoming gradients and saved tensors go, then its
        results are handed on."""
        waiting = [self.at.pop(id(out), None) for out in op.outputs]
        reloads = self.offload.reloads.get(index, ()) if self.offload is not None else ()
        if not any(waiting):
            self.events += [(FREE, reload.host) for reload in reloads] + [
                (FREE, tensor) for tensor in released
            ]
            return
        if self.recompute and op.saves:
            self.events.extend(self.recompute)
            self.recompute = ()
        if self.offload is not None:
            for reload in reloads:
                copy = Work(None, (self.offload.copy(reload, to_host=False),), True)
                self.events += [(ALLOC, reload.device), (RUN, copy), (FREE, reload.host)]
        self.events.extend(op.backward)
        self.events += [(FREE, reload.device) for reload in reloads]
        if self.unpacks:  # what a recomputation made again is gone with the node's own function
            self.events += [(FREE, tensor) for tensor in released]
            released = []
        self.events.extend(op.fitting)
        if op.backward_costs:
            self.events.append((RUN, op.work(backward=True)))
        made: dict[int, _Pending] = {}
        outgoing: list[tuple[Value, _Pending]] = []
        for gradient in op.gradients:
            pending = (
                waiting[gradient.output]
                if gradient.tensor is None
                else made.setdefault(id(gradient.tensor), _Pending(gradient.tensor))
            )
            if pending is not None:
                pending.holders += 1
                outgoing.append((gradient.of, pending))
        for pending in waiting:
            if pending is not None:
                self._drop(pending)
        self.events += [(FREE, tensor) for tensor in released]
        for value, pending in outgoing:
            self._hold_or_add(value, pending)
            self._drop(pending)

    def _hold(self, value: Value, pending: _Pending) -> None:
        pending.holders += 1
        self.at[id(value)] = pending
        self.values[id(value)] = value

    def _drop(self, pending: _Pending) -> None:
        pending.holders -= 1
        if pending.holders == 0:
            self.events.append((FREE, pending.tensor))

    def _hold_or_add(self, value: Value, new: _Pending) -> None:
        if value.weight is not None:
            self._accumulate(value, new)
            return
        old = self.at.get(id(value))
        if old is None:
            self._hold(value, new)
            return
        new.holders += 1
        add: tuple[Cost, ...] = (Move(3 * traffic(value)),)
        if old.holders == 1:  # not shared: added in place
            self.events.append((RUN, Work(None, add, True)))
            self._drop(new)
            return
        summed = _Pending(
            Tensor(
                "sum of gradients",
                value.axes,
                value.dtype,
                Role.ACTIVATION_GRADIENTS,
                new.tensor.module,
            )
        )
        self.events += [(ALLOC, summed.tensor), (RUN, Work(None, add, True))]
        del self.at[id(value)]
        self._drop(old)
        self._drop(new)
        self._hold(value, summed)

    def _accumulate(self, value: Value, new: _Pending) -> None:
        """AccumulateGrad: the first gradient becomes `.grad`, later ones (another micro-step, a
        tied weight) are added to it."""
        new.holders += 1
        weight = value.weight
        assert weight is not None
        path = weight.tied_to or weight.path
        again = path in self.made  # a module that ran twice
        earlier = self.filled.get(path, self.made.get(path))
        waiting = earlier is not None
        hook = self.hook if self.hook is not None and self.hook.takes(weight) else None
        if waiting or (self.accumulate and hook is None):
            self.events.append((RUN, Work(None, (Move(3 * traffic(value)),), True)))
            self._drop(new)
        else:
            self.made[path] = new.tensor
        gradient = earlier if earlier is not None else new.tensor
        if hook is not None:
            if not weight.tied_to and not again:  # a tied weight waits for its owner's gradient
                self.hooked.append((hook, weight, gradient))
        elif not waiting and not self.accumulate:
            self.persistent.append(gradient)  # stays until zero_grad

    def _run_hooks(self) -> None:
        """The hooks of the parameters whose gradients the last node finished."""
        for hook, weight, gradient in self.hooked:
            self.events += hook.events(weight, gradient)
        self.hooked.clear()

    def _input_gradient(self) -> Tensor | None:
        for key, value in self.external_tensors.items():
            pending = self.at.pop(key, None)
            if pending is not None:
                self._external(value, pending)
        result: Tensor | None = None
        for key, pending in list(self.at.items()):
            if self.block.input is not None and key == id(self.block.input):
                result = pending.tensor
            else:
                self._drop(pending)
        return result

    def _external(self, value: Value, pending: _Pending) -> None:
        """A gradient of a tensor that many blocks read (encoder states): the first is kept, later
        ones are added to it."""
        if id(value) not in self.opened:
            self.events.append((TAKE, (pending.tensor, value.shared_gradient())))
        else:
            self.events.append((RUN, Work(None, (Move(3 * traffic(value)),), True)))
            self._drop(pending)
