"""From a recorded block to the events of its backward.

It follows PyTorch's engine: nodes in reverse order of creation, a second gradient of a
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
from napkinmath.lowering.chain import taken_from
from napkinmath.lowering.shared_values import leaves_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.gradient_hooks import GradientHook
    from napkinmath.lowering.saved_offload import SavedOffload


class _Pending:
    """A gradient waiting at a value: its tensor, how many holders share it, whether a product made
    it that is one with those of other linears, and whether it is a slice."""

    __slots__ = ("cut", "holders", "joined", "tensor")

    def __init__(self, tensor: Tensor, *, joined: bool = False, cut: bool = False) -> None:
        self.tensor, self.holders, self.joined, self.cut = tensor, 0, joined, cut


class Backward:
    """Runs the engine over one block; `events` grows in the order in which the device sees them."""

    def __init__(
        self,
        block: Block,
        *,
        accumulate: bool = False,
        filled: dict[str, Tensor] | None = None,
        with_gradient: frozenset[int] = frozenset(),
        keeps_input: bool = False,
        recompute: Sequence[Event] = (),
        offload: SavedOffload | None = None,
        hook: GradientHook | None = None,
        staying: Collection[Tensor] = (),
        holds_incoming: bool = False,
        stream: Tensor | None = None,
    ) -> None:
        self.block = block
        self.stream = stream  # in which the gradient of the second stream's output arrives
        self.stream_gradient: Tensor | None = None  # in which that of its input is left
        # an argument of CheckpointFunction.backward (torch utils/checkpoint.py) to its end
        self.holds_incoming = holds_incoming
        self.staying = staying  # what a graph keeps that is held from outside
        self.left: list[Tensor] = []  # of that, what the block made and leaves behind
        self.hook = hook
        self.hooked: list[tuple[GradientHook, Weight, Tensor]] = []
        self.offload = offload
        self.unpacks = bool(recompute)
        self.recompute = recompute  # run when the first node asks for a tensor that it saved
        self.events: list[Event] = []
        self.accumulate = accumulate  # gradients of an earlier micro-step exist already
        # path of a weight -> its gradient, made by another block already (tied weights)
        self.filled = filled or {}
        # ids of the shared values whose gradient slot a later block has filled already
        self.with_gradient = with_gradient
        self.keeps_input = keeps_input  # a checkpoint holds the input until the whole block is done
        self.at: dict[int, _Pending] = {}  # id(value) -> gradient waiting there
        self.values: dict[int, Value] = {}
        self.persistent: list[Tensor] = []  # gradients of weights that outlive the block
        self.made: dict[str, Tensor] = {}  # path of a weight -> its gradient, made here
        # a leaf that is made again has a gradient of its own
        leaves = leaves_of(block)
        self.external_tensors = {id(v): v for v in block.externals if v not in leaves}

    def run(self, incoming: Tensor | None) -> Tensor | None:
        """Backward from the gradient of the block's output; returns the gradient of its input, if
        it needs one."""
        block, first = self.block, None
        if incoming is not None and block.output is not None:
            first = _Pending(incoming)
            first.holders += self.holds_incoming
            self._hold(block.output, first)
        self._take_shared()
        users = self._last_savers()
        for index in range(len(block.ops) - 1, -1, -1):
            self._node(index, block.ops[index], users.get(index, []))
            self._run_hooks()
        gradient = self._input_gradient()
        if first is not None and self.holds_incoming:
            self._drop(first)
        if self.keeps_input and block.input is not None:
            if block.input.tensor in self.staying:
                self.left.append(block.input.tensor)
            else:
                self.events.append((FREE, block.input.tensor))
        return gradient

    def _take_shared(self) -> None:
        """The gradients that later blocks left at the shared values which this block made."""
        made = {id(out) for op in self.block.ops for out in op.outputs}
        for key, value in self.external_tensors.items():
            if key in self.with_gradient and key in made and value is not self.block.output:
                pending = _Pending(
                    Tensor(
                        f"grad of {value.tensor.name}",
                        value.axes,
                        value.dtype,
                        Role.ACTIVATION_GRADIENTS,
                        self.block.name,
                    )
                )
                handed = self.stream if value is self.block.stream_out else None
                self.events += taken_from(handed or value.shared_gradient(), pending.tensor)
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
                    if tensor in self.staying:
                        self.left.append(tensor)
                    else:
                        users.setdefault(index, []).append(tensor)
        return users

    def _node(self, index: int, op: Op, released: list[Tensor]) -> None:
        """One node: its backward runs, its incoming gradients and saved tensors go, then its
        results are handed on."""
        waiting = [self.at.pop(id(out), None) for out in op.outputs]
        reloads = self.offload.reloads.get(index, ()) if self.offload is not None else ()
        if not any(waiting):
            self.events += [(FREE, reload.host) for reload in reloads]
            self.events += [(FREE, tensor) for tensor in released]
            return
        if self.recompute and op.saves:
            self.events.extend(self.recompute)
            self.recompute = ()
        for reload in reloads:
            assert self.offload is not None
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
        outgoing = self._outgoing(op, waiting)
        for pending in filter(None, waiting):
            self._drop(pending)
        self.events += [(FREE, tensor) for tensor in released]
        summed = {id(gradient.of) for gradient in op.gradients if gradient.summed}
        for value, pending in outgoing:
            if id(value) not in summed:
                self._hold_or_add(value, pending)
            self._drop(pending)

    def _outgoing(self, op: Op, waiting: list[_Pending | None]) -> list[tuple[Value, _Pending]]:
        """What a node hands on: the gradients that it made, or those that came in."""
        made: dict[int, _Pending] = {}
        found: list[tuple[Value, _Pending]] = []
        for gradient in op.gradients:
            pending = (
                waiting[gradient.output]
                if gradient.tensor is None
                else made.setdefault(
                    id(gradient.tensor),
                    _Pending(gradient.tensor, joined=gradient.joined, cut=gradient.cut),
                )
            )
            if pending is not None:
                pending.holders += 1
                found.append((gradient.of, pending))
        return found

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
        if old is None and id(value) in self.external_tensors and id(value) in self.with_gradient:
            # what a later block left is added to as each gradient comes
            self.events.append((RUN, Work(None, (Move(3 * traffic(value)),), True)))
            return
        if old is None:
            self._hold(value, new)
            return
        if old.joined and new.joined:  # one product made both
            return
        new.holders += 1
        add: tuple[Cost, ...] = (Move(3 * traffic(value)),)
        if old.holders == 1 and not old.cut:  # not shared: added in place
            self.events.append((RUN, Work(None, add, True)))
            self._drop(new)
            return
        name, role, module = "sum of gradients", Role.ACTIVATION_GRADIENTS, new.tensor.module
        summed = _Pending(Tensor(name, value.axes, value.dtype, role, module))
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
        waits = self.accumulate and hook is None and bool(weight.tied_to)
        if waits and not waiting:  # for the owner's, in the engine's buffer (autograd/engine.cpp)
            self.made[path] = new.tensor
            return
        if waiting or (self.accumulate and hook is None):
            self.events.append((RUN, Work(None, (Move(3 * traffic(value)),), True)))
            self._drop(new)
            if self.accumulate and hook is None and not waits and path in self.filled:
                self.events.append((FREE, self.filled[path]))
        else:
            self.made[path] = new.tensor
            new.tensor.role = Role.GRADIENTS  # also one that a view handed through
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
        slot = value.shared_gradient()
        if value is self.block.stream_in:
            self.stream_gradient = slot
        alike = pending.tensor.dtype is slot.dtype and not pending.cut
        if id(value) not in self.with_gradient and alike:
            self.events.append((TAKE, (pending.tensor, slot)))
        elif id(value) not in self.with_gradient:  # its reader was cast: so is the gradient, back
            cast = Work(None, (Move(2 * traffic(value)),), True)
            self.events += [(ALLOC, slot), (RUN, cast), (FREE, pending.tensor)]
        else:
            self.events.append((RUN, Work(None, (Move(3 * traffic(value)),), True)))
            self._drop(pending)
