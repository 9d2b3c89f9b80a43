"""What one block hands to the next: the hidden states forward, their gradient backward.

Beside them goes the second of two streams of a denoiser (its text beside the picture). A block's
input of it is held to the end of the block's backward where that needs it. Else it ends with the
block's forward where the stage says so (`closes`), or as the last run starts.
"""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, TAKE, Phase, Role, Tensor, Value
from napkinmath.ir.model_spec import SECOND_STREAM
from napkinmath.lowering.forward import saved_tensors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Block, Event
    from napkinmath.ir.step import Run
    from napkinmath.lowering.autograd import Backward
    from napkinmath.lowering.shared_values import Releases
    from napkinmath.lowering.units import LoweredBlock


class Chain:
    """The tensor handed from block to block: one slot for each shape and type of a batch, so
    that a slot has one size."""

    __slots__ = ("_name", "_role", "_slots", "held")

    def __init__(self, name: str, role: Role) -> None:
        self._name, self._role = name, role
        self._slots: dict[tuple[object, ...], Tensor] = {}
        self.held: Tensor | None = None

    def give(
        self,
        tensor: Tensor,
        value: Value | Tensor,
        symbols: tuple[tuple[str, Size], ...] = (),
    ) -> Event:
        """The event that hands a block's result on, of a stage with these `symbols`."""
        key = (value.axes, value.dtype, dict(symbols).get("b"))
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Tensor(self._name, value.axes, value.dtype, self._role)
        self.held = slot
        return TAKE, (tensor, slot)

    def replace(self, tensor: Tensor) -> list[Event]:
        """The events that drop what is held and hold the tensor."""
        return [*self.drop(), self.give(tensor, tensor)]

    def drop(self) -> list[Event]:
        """The event that drops what is held, if anything is."""
        dropped: list[Event] = [] if self.held is None else [(FREE, self.held)]
        self.held = None
        return dropped

    def take(self, tensor: Tensor) -> Event:
        """The event that makes the handed-on tensor the reader's own."""
        assert self.held is not None
        return TAKE, (self.held, tensor)


def taken_from(slot: Tensor, own: Tensor) -> list[Event]:
    """The events that make the gradient of a shared value its maker's: one that was a slice of a
    larger storage is a tensor of its own from here on."""
    if slot.axes == own.axes:
        return [(TAKE, (slot, own))]
    return [(ALLOC, own), (FREE, slot)]


class SecondStream(Chain):
    """What the block before has handed on of it, forward."""

    def __init__(self) -> None:
        super().__init__("second stream between blocks", Role.ACTIVATIONS)

    def taken(self, block: Block) -> list[Event]:
        """The events before a block that reads it."""
        return [] if block.stream_in is None else [self.take(block.stream_in.tensor)]

    def given(self, run: Run, unit: LoweredBlock) -> list[Event]:
        """The events behind a block: what it hands on, and the end of what it read."""
        read, made, events = run.block.stream_in, run.block.stream_out, list["Event"]()
        self.held = None
        if made is not None:
            events.append(self.give(made.tensor, made, run.stage.symbols))
        if read is not None and SECOND_STREAM in run.stage.closes and not _is_kept(read, unit):
            events.append((FREE, read.tensor))
        return events


def note_held_streams(runs: list[Run], units: list[LoweredBlock], releases: Releases) -> None:
    """Adds what of the stream ends as the last run starts."""
    for run, unit in zip(runs, units, strict=True):
        read = run.block.stream_in
        closed = SECOND_STREAM in run.stage.closes
        if read is not None and not closed and not _is_kept(read, unit):
            held = releases.setdefault((Phase.FORWARD, len(runs) - 1), [])
            held += [read.tensor] * run.count


class SecondGradient(Chain):
    """The gradient that a later block has left of it, backward."""

    def __init__(self) -> None:
        super().__init__("gradient of the second stream between blocks", Role.ACTIVATION_GRADIENTS)

    def waiting(self, block: Block) -> set[int]:
        """The id of the block's output of it, where that has a gradient."""
        return {id(block.stream_out)} if self.held and block.stream_out is not None else set()

    def differs(self, block: Block) -> bool:
        """Whether what reaches the last copy of a block is of another shape than what that hands
        on to the one before."""
        read = block.stream_in
        return self.held is not None and read is not None and self.held.axes != read.axes

    def arrives(self, block: Block) -> Tensor | None:
        """The tensor in which it reaches a block: it may be a slice of a larger storage."""
        held = self.held
        if held is None or block.stream_out is None:
            return None
        name = "incoming gradient of the second stream"
        return Tensor(name, held.axes, held.dtype, Role.ACTIVATION_GRADIENTS, block.name)

    def around(
        self, run: Run, unit: LoweredBlock, engine: Backward, events: list[Event]
    ) -> list[Event]:
        """A block's backward with the handing over on both sides."""
        read, left = run.block.stream_in, engine.stream_gradient
        if engine.stream is not None:
            events = [self.take(engine.stream), *events]
            self.held = None
        if left is not None:
            events = [*events, self.give(left, left, run.stage.symbols)]
        if read is not None and _is_kept(read, unit):
            events = [*events, (FREE, read.tensor)]
        return events


def _is_kept(read: Value, unit: LoweredBlock) -> bool:
    """Whether the block's backward needs what it read."""
    return unit.checkpointed or read.tensor in saved_tensors(unit.block)
