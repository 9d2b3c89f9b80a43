"""Saved tensors in host memory: autograd's pack and unpack hooks that copy them there and back.

Rows of STYLES are the implementations. Sources: torch 2.13 autograd/graph.py save_on_cpu; torchtune
training/_activation_offloading.py and its copy in TRL models/activation_offloading.py,
OffloadActivations.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.expr import product
from napkinmath.base.record import Record
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, RUN, Block, Role, Tensor, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.ledger import Event, Op


class OffloadStyle(Record):
    """How one implementation treats saved tensors."""

    name: str
    meaning: str
    weights_too: bool
    """Weights saved by a product go to the host as well: the saved tensor is a transposed view, no
    longer a Parameter."""
    repeats_stay: bool
    """A tensor that several operations save is copied once and stays on the device for the
    others."""
    smallest_bytes: int = 0
    """Smaller tensors stay."""
    stash: int = 0
    """Tensors that wait for their copy on a second stream; 0 copies on the compute stream."""
    head_stays: bool = False
    """Nothing from the language-model head on is offloaded."""


STYLES: dict[str, OffloadStyle] = {
    row.name: row
    for row in (
        OffloadStyle(
            name="trl",
            meaning="TRL's activation_offloading",
            weights_too=False,
            repeats_stay=True,
            smallest_bytes=1024,
            stash=5,
            head_stays=True,
        ),
        OffloadStyle(
            name="torchtune",
            meaning="torchtune's enable_activation_offloading",
            weights_too=True,
            repeats_stay=False,
            smallest_bytes=1024,
            stash=5,
            head_stays=True,
        ),
        OffloadStyle(
            name="save_on_cpu",
            meaning="torch.autograd.graph.save_on_cpu",
            weights_too=True,
            repeats_stay=False,
        ),
    )
}


def find_style(name: str) -> OffloadStyle:
    """The row of that name; raises InputError with the nearest names."""

    row = STYLES.get(name)
    if row is None:
        raise InputError(
            f"offload style {shown(name)} is unknown; use one of"
            f" {', '.join(STYLES)}{suggest(name, list(STYLES))}"
        )
    return row


class Reload:
    """A saved tensor's copy that exists while one operation's backward runs, and its place in host
    memory."""

    __slots__ = ("device", "host")

    def __init__(self, saved: Tensor) -> None:
        self.device = Tensor(
            f"{saved.name} from the host", saved.axes, saved.dtype, Role.ACTIVATIONS, saved.module
        )
        self.host = Tensor(
            f"{saved.name} in host memory",
            saved.axes,
            saved.dtype,
            Role.ACTIVATIONS,
            saved.module,
            host=True,
        )


class SavedOffload:
    """What a block's forward sends to the host after which operation, and what each backward asks
    back."""

    __slots__ = ("gone", "overlaps", "packed_ops", "pinned", "releases", "reloads", "stays")

    def __init__(self, block: Block, style: OffloadStyle, *, pinned: bool) -> None:
        self.pinned, self.overlaps = pinned, style.stash > 0
        self.reloads: dict[int, list[Reload]] = {}  # operation -> what it saved and gets back
        self.stays: dict[
            int, list[Tensor]
        ] = {}  # operation -> what it saved that stays on the device
        self.gone: set[Tensor] = set()  # offloaded by some operation and kept on the device by none
        self.releases: dict[
            int, list[Tensor]
        ] = {}  # operation -> tensors whose copy is known to be done
        self.packed_ops = _head_start(block) if style.head_stays else len(block.ops)
        self._pack(block, style)

    def _pack(self, block: Block, style: OffloadStyle) -> None:
        weights = {w.tensor for w in block.weights}
        lasting = weights | {
            value.tensor for value in block.externals
        }  # what stays on the device whatever is copied
        if block.output is not None:
            lasting.add(block.output.tensor)
        lasting |= {
            g.tensor
            for op in block.ops
            for g in op.gradients
            if g.tensor is not None and g.tensor in op.saves
        }  # gradients made in the forward
        packed: dict[Tensor, int] = {}  # tensor -> number of its last copy
        waiting: dict[Tensor, int] = {}
        for number, (index, tensor) in enumerate(
            (i, t) for i, op in enumerate(block.ops[: self.packed_ops]) for t in op.saves
        ):
            small = _constant_bytes(tensor) < style.smallest_bytes
            repeated = style.repeats_stay and (tensor in packed or tensor in lasting - weights)
            if small or repeated or (tensor in weights and not style.weights_too):
                if tensor not in lasting:
                    self.stays.setdefault(index, []).append(tensor)
                continue
            for earlier in [t for t, n in waiting.items() if n <= number - style.stash]:
                del waiting[earlier]
                self.releases.setdefault(index, []).append(earlier)
            packed[tensor] = number
            self.reloads.setdefault(index, []).append(Reload(tensor))
            if style.stash and tensor not in lasting:
                waiting[tensor] = number
        for tensor in waiting:
            self.releases.setdefault(len(block.ops) - 1, []).append(tensor)
        kept = {t for tensors in self.stays.values() for t in tensors} | {
            t for op in block.ops[self.packed_ops :] for t in op.saves
        }
        self.gone = set(packed) - kept - lasting

    def staying(self, index: int, op: Op) -> Sequence[Tensor]:
        """What an operation saved that its backward finds on the device."""
        return self.stays.get(index, ()) if index < self.packed_ops else op.saves

    def released_after(self) -> dict[Tensor, int]:
        """The operation before which the device's copy of an offloaded tensor cannot be freed."""
        return {tensor: index for index, tensors in self.releases.items() for tensor in tensors}

    def copies_out(self, index: int) -> list[Event]:
        """What leaves for the host once an operation has run."""
        events: list[Event] = []
        for reload in self.reloads.get(index, []):
            events += [
                (ALLOC, reload.host),
                (RUN, Work(None, (self.copy(reload, to_host=True),), False)),
            ]
        return events

    def copy(self, reload: Reload, *, to_host: bool) -> HostCopy:
        """The copy's cost."""
        return HostCopy(
            reload.host.host_bytes, to_host=to_host, pinned=self.pinned, overlaps=self.overlaps
        )


def _head_start(block: Block) -> int:
    """Index of the first operation of the language-model head; the number of operations where there
    is none."""
    return next(
        (
            i
            for i, op in enumerate(block.ops)
            if any(v.weight is not None and v.weight.kind == "head" for v in op.inputs)
        ),
        len(block.ops),
    )


def _constant_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor whose size is known before anything is bound; others count as large."""
    count = product(tensor.axes)
    return count * tensor.dtype.bits // 8 if isinstance(count, int) else 1 << 62
