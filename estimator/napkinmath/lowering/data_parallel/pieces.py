"""Pieces: what FSDP2 makes of one run's parameters when it gathers them and reduces their
gradients.

Sources: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_all_gather,
foreach_all_gather_copy_out, foreach_reduce; _fsdp_param_group.py unshard, wait_for_unshard,
post_backward.
"""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8, DType, find_dtype
from napkinmath.base.expr import Size, ceil_div
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.costs import HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, TAKE, Role, Tensor, Work
from napkinmath.ir.step import Run
from napkinmath.lowering.data_parallel.holders import (
    collectives,
    is_spread,
    shard_ranks,
    split_bytes,
)
from napkinmath.lowering.data_parallel.stored import on_host, ranks_of, row_shards
from napkinmath.lowering.data_parallel.streams import GATHERED, REDUCED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy

    Both = tuple[Size, Size]  # of what all ranks hold, of experts that are spread

SOURCE = "torch distributed/fsdp/_fully_shard"
Symbols = tuple[tuple[str, Size], ...]


def keeps_sums(policy: Policy) -> bool:
    """Whether gradients that are not reduced are added up in tensors of their own: FSDP1's whole
    flat ones, or of the type that is reduced."""
    parallel = policy.config.parallel
    return parallel.data_parallel is DataParallel.FSDP1 or (
        parallel.data_parallel is DataParallel.FSDP2 and parallel.reduce_dtype != "auto"
    )


class Piece:
    """One run's share of a unit: stored rows, and the buffers of its gather and of its reduction.

    `output` is the all-gather's result, from which whole parameters (`gathered`) are copied out;
    `casts` exist while the rank's rows are copied in, in the type that is gathered. `reduce_input`
    holds all gradients for the reduce-scatter, `reduced` the rank's part of them, `gradient` the
    same in the type of the stored parameters. `sent` are the bytes that its gather, its reduction
    and its all-reduce carry, of what all ranks hold and of spread experts: those of the whole unit,
    if it is the last piece of several.
    """

    __slots__ = (
        "casts",
        "copies",
        "gathered",
        "gradient",
        "host_gradient",
        "name",
        "output",
        "parallel",
        "parts",
        "ranks",
        "reduce_input",
        "reduced",
        "replicas",
        "sent",
        "sums",
        "symbols",
        "widths",
    )

    def __init__(self, run: Run, policy: Policy) -> None:
        parallel = self.parallel = policy.config.parallel
        self.ranks, self.replicas = parallel.shard_degree, parallel.replica_degree
        self.symbols: Symbols = run.stage.symbols
        self.name, self.copies = run.name, run.count
        pairs = row_shards(run, policy)
        self.parts = [part for _, part in pairs]
        self.sums: dict[Tensor, Tensor] = {}  # of micro-steps that are not reduced, by gradient
        self.gathered: list[Tensor] = []
        gathered_bytes: Size = 0
        for weight, part in pairs:
            whole = (ranks_of(weight, policy) * part.axes[0], *part.axes[1:])
            name, role = f"gathered {weight.tensor.name}", weight.tensor.role
            dtype = _gathered_dtype(weight, part)
            self.gathered.append(Tensor(name, whole, dtype, role, weight.path, SOURCE))
            gathered_bytes = gathered_bytes + self.gathered[-1].nbytes
        self.casts = _casts(pairs, run, offloaded=policy.config.offload.parameters)
        self.output = _flat("all-gather output", gathered_bytes, run) if self.ranks > 1 else None
        for tensor in (*self.casts, *([self.output] if self.output is not None else [])):
            tensor.use = GATHERED
        self._reduction(run, policy)
        self.sent = self.own_bytes()

    def own_bytes(self) -> tuple[Both, Both, Both]:
        """Bytes of the whole messages of its all-gather, reduce-scatter and all-reduce."""
        gathered = split_bytes(self.gathered, self.parallel) if self.output is not None else (0, 0)
        if self.reduced is None or self.reduce_input is None:
            return gathered, (0, 0), (0, 0)
        dense, spread = (
            ceil_div(elements * self.reduced.dtype.bits, 8) for elements in self.widths
        )
        ranks = shard_ranks(self.parallel, spread=True)
        return gathered, (self.ranks * dense, ranks * spread), (dense, spread)

    def _reduction(self, run: Run, policy: Policy) -> None:
        self.reduce_input = self.reduced = self.gradient = self.host_gradient = None
        trained = [(w, part) for w, part in row_shards(run, policy) if w.trainable]
        dense: Size = 0
        spread: Size = 0
        for weight, part in trained:
            if is_spread(weight.path, self.parallel):
                spread = spread + part.elements
            else:
                dense = dense + part.elements
        self.widths = (dense, spread)
        if not trained:
            return
        stored, wanted = trained[0][1].tensor.dtype, self.parallel.reduce_dtype
        dtype = trained[0][0].tensor.dtype if wanted == "auto" else find_dtype(wanted)
        held = self.ranks * dense + shard_ranks(self.parallel, spread=True) * spread
        module, size = run.block.name, (dense + spread,)
        self.reduce_input = _buffer("reduce-scatter input", (held,), dtype, module)
        self.reduced = self.gradient = Tensor(
            "reduced gradients", size, dtype, Role.GRADIENTS, module, SOURCE, use=REDUCED
        )
        if dtype is not stored:
            name = "sharded gradients"
            self.gradient = Tensor(name, size, stored, Role.GRADIENTS, module, SOURCE, use=REDUCED)
        if policy.config.offload.parameters:
            self.host_gradient = on_host(self.gradient)

    # ------------------------------------------------------------ events

    @property
    def reduces(self) -> bool:
        """Whether it has gradients to reduce."""
        return self.reduce_input is not None

    def flatten_gradients(self) -> list[Event]:
        """What is made of the gradients before whole parameters go: nothing here."""
        return []

    def drop_unflattened(self, gradients: list[Tensor]) -> list[Event]:
        """What of the gradients goes with that: nothing here."""
        return []

    def gather(self, *, backward: bool) -> list[Event]:
        """Copy-in and all-gather: the casts die as the call returns."""
        if self.output is None or not self.parts:
            return []
        copied: list[Event] = [
            (RUN, Work(None, (HostCopy(c.nbytes, to_host=False),), backward))
            for c in self.casts
            if c.name.endswith("from the host")
        ]
        return [
            *((ALLOC, c) for c in self.casts),
            *copied,
            (ALLOC, self.output),
            *self.collective("all-gather", self.sent[0], backward=backward),
            *((FREE, c) for c in reversed(self.casts)),
        ]

    def collective(
        self, kind: str, moved: Both, *, backward: bool, overlaps: bool = True
    ) -> list[Event]:
        """One collective of the unit (experts that are spread have their own), of which only one
        piece takes part."""
        axis = "replica" if kind == "all-reduce" else "shard"
        found = collectives(kind, moved, self.parallel, axis, overlaps=overlaps)
        return [(RUN, Work(None, (cost,), backward)) for cost in found]

    def gather_again(self) -> list[Event]:
        """A gather that nothing hides, of parameters which the recomputed forward has just let
        go."""
        return self.collective("all-gather", self.sent[0], backward=True, overlaps=False)

    def copy_out(self, *, backward: bool) -> list[Event]:
        """Whole parameters are made from the all-gather's output."""
        events: list[Event] = [(ALLOC, t) for t in self.gathered]
        if self.output is not None and self.parts:
            events.append((RUN, Work(None, (Move(2 * self.output.nbytes, 1),), backward)))
        return events

    def drop_output(self) -> list[Event]:
        """The all-gather's output goes."""
        return [(FREE, self.output)] if self.output is not None and self.parts else []

    def reshard(self) -> list[Event]:
        """Whole parameters go."""
        return [(FREE, t) for t in self.gathered]

    def accumulate(self, gradients: list[Tensor], *, held: bool) -> list[Event]:
        """Gradients that are not reduced become those of the reduction's type, later ones are added
        to them.

        Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py
        to_accumulated_grad_if_needed, accumulate_unsharded_grad_if_needed.
        """
        if self.reduced is None:
            return []
        events: list[Event] = []
        for gradient in gradients:
            total = self._sum_of(gradient, self.reduced.dtype)
            moved = Work(None, (Move(gradient.nbytes + (2 if held else 1) * total.nbytes),), True)
            if not held and total.dtype is gradient.dtype:
                events.append((TAKE, (gradient, total)))
                continue
            made: list[Event] = [] if held else [(ALLOC, total)]
            events += [*made, (RUN, moved), (FREE, gradient)]
        return events

    def _sum_of(self, gradient: Tensor, dtype: DType) -> Tensor:
        if gradient not in self.sums:
            name, module = f"sum of {gradient.name}", gradient.module
            self.sums[gradient] = Tensor(name, gradient.axes, dtype, Role.GRADIENTS, module, SOURCE)
        return self.sums[gradient]

    def copy_in(self, gradients: list[Tensor], *, held: bool = False) -> list[Event]:
        """All gradients, or their `held` sums, are copied into the reduce-scatter's input and go;
        then the rank's part of the sum is made."""
        if self.reduce_input is None or self.reduced is None:
            return []
        gradients = [self.sums[g] for g in gradients] if held else gradients
        moved = Move(2 * self.reduce_input.nbytes, 1)
        events: list[Event] = [
            (ALLOC, self.reduce_input),
            (RUN, Work(None, (moved,), True)),
            *((FREE, g) for g in gradients),
        ]
        return [*events, (ALLOC, self.reduced), *self.reductions()]

    def reductions(self) -> list[Event]:
        """The reduce-scatter over the ranks of a copy, then the all-reduce over the copies."""
        return self.collective("reduce-scatter", self.sent[1], backward=True) + self.collective(
            "all-reduce", self.sent[2], backward=True
        )

    def settle(self, *, first: bool) -> tuple[list[Event], list[Event]]:
        """(events that bring the reduced gradients to their place, those that drop what is held to
        the end of the backward).

        With copies of the sharded model (`replicas`) the buffer of the all-reduce stays referenced
        until the backward is over.
        """
        if self.reduced is None or self.gradient is None:
            return [], []
        events: list[Event] = []
        later: list[Event] = []
        if self.gradient is not self.reduced:
            events.append((ALLOC, self.gradient))
            (later if self.replicas > 1 else events).append((FREE, self.reduced))
        if self.host_gradient is not None:
            cost = HostCopy(self.gradient.nbytes, to_host=True)
            events += [(ALLOC, self.host_gradient)] if first else []
        elif not first:  # added to the gradients of earlier micro-steps
            cost = Move(3 * self.gradient.nbytes)
        else:
            return events, later
        return [*events, (RUN, Work(None, (cost,), True)), (FREE, self.gradient)], later

    def drop_reduce_input(self) -> list[Event]:
        """The reduce-scatter's input goes."""
        return [(FREE, self.reduce_input)] if self.reduce_input is not None else []


def _gathered_dtype(weight: Weight, part: Weight) -> DType:
    """Packed weights travel as they are stored, others in the type of computation."""
    return part.tensor.dtype if weight.constants else weight.tensor.dtype


def _casts(pairs: list[tuple[Weight, Weight]], run: Run, *, offloaded: bool) -> list[Tensor]:
    """What a gather copies in: rows from the host, and rows in the type that is gathered, together
    where they are on the device."""
    found: list[Tensor] = []
    elements: Size = 0
    wanted: DType | None = None
    for weight, part in pairs:
        name, stored, path = weight.tensor.name, part.tensor.dtype, weight.path
        dtype = _gathered_dtype(weight, part)
        if offloaded:
            found.append(_buffer(f"{name} from the host", part.axes, stored, path))
        if stored is not dtype and offloaded:
            found.append(_buffer(f"{name} to gather", part.axes, dtype, path))
        elif stored is not dtype:
            elements, wanted = elements + part.elements, dtype
    if wanted is not None:
        found.append(_buffer("rows to gather", (elements,), wanted, run.block.name))
    return found


def _buffer(name: str, axes: tuple[Size, ...], dtype: DType, module: str) -> Tensor:
    return Tensor(name, axes, dtype, Role.COMMUNICATION, module, SOURCE)


def _flat(name: str, nbytes: Size, run: Run) -> Tensor:
    return _buffer(name, (nbytes,), UINT8, run.block.name)
