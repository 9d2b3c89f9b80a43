"""What one block hands to the next: the hidden states forward, their gradient backward."""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, TAKE, Role, Tensor, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Event


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
