"""FSDP2 (torch's fully_shard): a micro-step's segments with units gathered before they run and
their gradients reduced after.

Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_state.py, in the order
in which they make and drop tensors.
"""

from __future__ import annotations

from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Tensor
from napkinmath.ir.step import END_OF_STEP, FORWARD_ENDS, Run, Segment
from napkinmath.lowering.data_parallel.fsdp1_hooks import (
    has_units_within,
    held_by_hook,
    is_recomputed_around,
    regathers,
    sums_of_views,
)
from napkinmath.lowering.data_parallel.pieces import Symbols, keeps_sums
from napkinmath.lowering.data_parallel.units import (
    Unit,
    first_event,
    readers_of_weights,
    units_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.data_parallel.pieces import Piece
    from napkinmath.lowering.policy import Policy

Chunk = tuple[Symbols, "list[Event]"]


class FullyShard:
    """Walks the segments of micro-steps and keeps track of what is gathered, on its way, or being
    reduced."""

    def __init__(self, runs: list[Run], policy: Policy) -> None:
        self.runs, self.policy = runs, policy
        self.sums = keeps_sums(policy)
        self.units = units_of(runs, policy)
        self.unit_of = {index: unit for unit in self.units for index in unit.runs}
        self.index_of = {run.name: index for index, run in enumerate(runs)}
        self.follows = False  # a forward before the micro-step whose units nothing has reset
        self.gradients: dict[
            int, list[Tensor]
        ] = {}  # of each run, made in a micro-step and unsharded
        self._reset()

    def _reset(self) -> None:
        self.copied: Unit | None = (
            None  # forward: the unit whose all-gather output waits for the next copy-out
        )
        self.fetched: list[Unit] = []  # all-gather outputs that nobody has copied out
        self.whole: set[int] = set()  # ids of units that are gathered
        self.forwarded: dict[int, int] = {}  # copies of each run that have gone forward
        self.reducing: Unit | None = None  # the unit whose reduce-scatter input is still held
        self.later: list[Chunk] = []  # what goes when the backward is over
        self.hooked = False  # whether a layer before has left what its hook holds
        self.times = 1  # copies of a layer that the events being made stand for

    # ------------------------------------------------------------ one micro-step

    def micro_step(
        self, segments: list[Segment], *, reduces: bool, first: bool, held: bool = False
    ) -> list[Segment]:
        """The segments of a micro-step; `reduces` its gradients or keeps them whole, `first` to
        find no reduced gradients yet.

        `held`: sums of the gradients of micro-steps before are there.
        """
        self._reset()
        self.reduces, self.first, self.held = reduces, first, held
        self.out: list[Segment] = []
        left = {phase: self._copies(segments, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        backward = False
        for segment in segments:
            index = self.index_of.get(segment.run, -1)
            if not backward and segment.phase is Phase.BACKWARD:
                backward = True
                self._end_of_forward()
            if segment.name == FORWARD_ENDS:
                self._end_of_forward()
                continue
            if segment.name == END_OF_STEP:
                self._end_of_backward()
            if index not in self.unit_of or segment.phase not in left:
                self.out.append(segment)
                continue
            copies = left[segment.phase]
            copies[index] -= segment.repeat
            self._spread(segment, index, ends=copies[index] == 0)
        return self.out

    def _copies(self, segments: list[Segment], phase: Phase) -> dict[int, int]:
        found: dict[int, int] = {}
        for segment in segments:
            index = self.index_of.get(segment.run, -1)
            if segment.phase is phase and index >= 0:
                found[index] = found.get(index, 0) + segment.repeat
        return found

    def _spread(self, segment: Segment, index: int, *, ends: bool) -> None:
        """A segment's first copy, those in between, which are alike, and its last one, after which
        another unit follows."""
        backward = segment.phase is Phase.BACKWARD
        counts = [1, segment.repeat - 1] if segment.repeat > 1 else [1]
        if backward and ends and segment.repeat > 1:
            counts = [1, segment.repeat - 2, 1] if segment.repeat > 2 else [1, 1]
        done = 0
        for repeat in counts:
            done += repeat
            last = ends and done == segment.repeat
            before, self.times = len(self.out), repeat
            if backward:
                chunks = self._backward(segment, index, last=last)
            else:
                chunks = self._forward(segment, index)
                self.forwarded[index] = self.forwarded.get(index, 0) + repeat
            self._emit(segment, chunks)
            if repeat > 1 and len(self.out) > before:  # an idle tower's layer has no events
                assert len(self.out) == before + 1, "copies of a layer differ"
                self.out[-1] = self.out[-1].copy(repeat=repeat)

    def _emit(self, like: Segment, chunks: list[Chunk]) -> None:
        """Segments of the chunks; neighbours whose symbols are bound alike are one."""
        merged: list[Chunk] = []
        for symbols, events in chunks:
            if not events:
                continue
            if merged and merged[-1][0] == symbols:
                merged[-1][1].extend(events)
            else:
                merged.append((symbols, list(events)))
        self.out += [
            Segment(like.name, like.phase, events, 1, symbols, like.run)
            for symbols, events in merged
        ]

    # ------------------------------------------------------------ forward

    def _forward(self, segment: Segment, index: int) -> list[Chunk]:
        unit = self.unit_of[index]
        chunks: list[Chunk] = []
        outer = self.units[-1] if self.units[-1].outer else None
        if outer is not None and index == 0 and id(outer) not in self.whole:
            chunks += self._unshard_forward(outer)
        again = unit.resident and self.forwarded.get(index, 0) >= self.runs[index].count
        if (unit.is_layer and not again) or id(unit) not in self.whole:
            chunks += self._unshard_forward(unit)
        at = self._exit(index, segment)
        chunks.append((segment.symbols, segment.events[:at]))
        if at < len(segment.events) and self.copied is not None:
            chunks += _each(self.copied, lambda p: p.drop_output())
            self.copied = None
        chunks.append((segment.symbols, segment.events[at:]))
        if not unit.resident and index == unit.runs[-1]:
            chunks += _each(unit, lambda p: p.reshard())
            self.whole.discard(id(unit))
        return chunks

    def forward_only(self, segments: list[Segment], *, stays: bool = False) -> list[Segment]:
        """The segments of a forward that no backward follows, after which units that would wait
        for one go; `stays`: the enclosing one is gathered for good."""
        outer = self.units[-1] if self.units[-1].outer else None
        found = self.gathered_once(segments, {id(outer)} if stays and outer is not None else set())
        for unit in self.units:
            if id(unit) in self.whole and not (stays and unit is outer):
                count = self.runs[unit.runs[0]].count if unit.is_layer else 1
                before = len(self.out)
                self._tail("units resharded", Phase.FORWARD, _each(unit, lambda p: p.reshard()))
                found[before:] = [s.copy(repeat=count) for s in found[before:]]
        return found

    def gathered_once(self, forward: list[Segment], whole: set[int]) -> list[Segment]:
        """A first forward, whose resident units stay gathered as those of `whole` (ids) are."""
        self._reset()
        self.out, self.whole = [], set(whole)
        left = self._copies(forward, Phase.FORWARD)
        for segment in forward:
            index = self.index_of.get(segment.run, -1)
            if index not in self.unit_of or segment.phase is not Phase.FORWARD:
                self.out.append(segment)
                continue
            left[index] -= segment.repeat
            self._spread(segment, index, ends=left[index] == 0)
        self._end_of_forward()
        return self.out

    def _unshard_forward(self, unit: Unit) -> list[Chunk]:
        """All-gather, copy-out of whole parameters, and only then the last unit's output goes: a
        local variable holds it so long."""
        chunks = _each(unit, lambda p: p.gather(backward=False)) + _each(
            unit, lambda p: p.copy_out(backward=False)
        )
        if self.copied is not None:
            chunks += _each(self.copied, lambda p: p.drop_output())
        self.copied = unit
        self.whole.add(id(unit))
        return chunks

    def _exit(self, index: int, segment: Segment) -> int:
        """Position at which the model's forward returns: before a loss that the trainer computes."""
        run = self.runs[index]
        if not run.stage.part.returns_logits:
            return len(segment.events)
        position = max(run.block.ops.index(op) for op in readers_of_weights(run))
        loss = run.block.ops[position + 1]
        return first_event(segment.events, loss.forward)

    def _end_of_forward(self) -> None:
        if self.copied is not None:
            self._tail(
                "all-gather output released",
                Phase.FORWARD,
                _each(self.copied, lambda p: p.drop_output()),
            )
            self.copied = None

    # ------------------------------------------------------------ backward

    def _backward(self, segment: Segment, index: int, *, last: bool) -> list[Chunk]:
        unit, run = self.unit_of[index], self.runs[index]
        outer = self.units[-1] if self.units[-1].outer else None
        at = self._entry(unit, index, segment)
        late = unit.is_layer and has_units_within(run, self.policy)
        begins = outer is not None and index == len(self.runs) - 1
        chunks = self._prefetch(outer, last=True) if outer is not None and begins else []
        chunks.append((segment.symbols, segment.events[:at]))
        if not unit.outer:
            chunks += self._unshard_backward(unit)
            if regathers(run, self.policy):
                chunks += _each(unit, lambda p: p.gather_again())
            if index == unit.runs[-1] and not late:  # the first of its runs to go backward
                chunks += self._prefetch(unit, last=last)
        events = sums_of_views(self.runs, index, segment.events[at:], self.policy)
        chunks.append((segment.symbols, events))
        if late:
            chunks += self._prefetch(unit, last=last)
        self.gradients[index] = weight_gradients(run)
        if not unit.ending:
            chunks += self._post_backward(unit, last=last)
        return chunks + (self._held_by_hook(segment, run) if unit.is_layer else [])

    def _held_by_hook(self, segment: Segment, run: Run) -> list[Chunk]:
        """What the hook of a recomputed layer holds to the end of the backward."""
        held = held_by_hook(run, self.policy)
        if held is None:
            return []
        # the gradient of the last layer's input is still on its way
        kept = list(held) if self.hooked else [held[0]]
        self.hooked = True
        dropped: Chunk = (segment.symbols, [(FREE, tensor) for tensor in kept])
        self.later += [dropped] * self.times
        return [(segment.symbols, [(ALLOC, tensor) for tensor in kept])]

    def _entry(self, unit: Unit, index: int, segment: Segment) -> int:
        """Position at which the gradient of the unit's output is there: of the head, after the loss
        has gone backward."""
        if unit.is_layer or unit.outer or index != len(self.runs) - 1:
            return 0
        users = readers_of_weights(self.runs[index])
        return first_event(segment.events, users[-1].backward) if users else 0

    def _unshard_backward(self, unit: Unit) -> list[Chunk]:
        """Whole parameters again, from an output fetched before or now; the output goes at once."""
        if id(unit) in self.whole:
            return []
        chunks: list[Chunk] = []
        if unit in self.fetched:
            self.fetched.remove(unit)
        else:
            chunks += _each(unit, lambda p: p.gather(backward=True))
        self.whole.add(id(unit))
        return [
            *chunks,
            *_each(unit, lambda p: p.copy_out(backward=True)),
            *_each(unit, lambda p: p.drop_output()),
        ]

    def _prefetch(self, unit: Unit, *, last: bool) -> list[Chunk]:
        """The unit that finished its forward before this one is gathered: of a layer, its neighbour
        or what comes before the layers."""
        parallel = self.policy.config.parallel
        if parallel.data_parallel is DataParallel.FSDP1 and not parallel.backward_prefetch:
            return []
        target = unit
        if unit.is_layer and not last:
            if unit.resident:
                return []
        else:
            position = self.units.index(unit)
            target = self.units[position - 1]
            if (position == 0 and not self._wraps_around()) or id(target) in self.whole:
                return []
        around = target.is_layer and is_recomputed_around(self.runs[target.runs[0]], self.policy)
        if target in self.fetched or around:
            # the first forward made no graph, and so no hook that would ask for the parameters
            return []
        self.fetched.append(target)
        return _each(target, lambda p: p.gather(backward=True))

    def _wraps_around(self) -> bool:
        """Whether what goes backward last asks for the last unit of a forward before, which nobody
        reads then; under PEFT that is the root with a norm alone.

        Source: torch 2.13 _fsdp_param_group.py _record_post_forward, with multiplicity;
        _fsdp_state.py _root_post_backward_final_callback forgets them.
        """
        fsdp2 = self.policy.config.parallel.data_parallel is DataParallel.FSDP2
        again = self.follows or self.forwarded.get(0, 0) > self.runs[0].count
        return fsdp2 and again and self.policy.adapter is None

    def _post_backward(self, unit: Unit, *, last: bool = True) -> list[Chunk]:
        """What the backward of a unit ends with: its gradients are collected, and reduced where
        this micro-step's are."""
        return (
            self._collect(unit)
            + self._reshard(unit, last=last)
            + (self._reduce(unit) if self.reduces else [])
        )

    def _collect(self, unit: Unit) -> list[Chunk]:
        """Gradients made one flat gradient, or added to the sums of the micro-steps before."""
        chunks: list[Chunk] = []
        if self.reduces or self.sums:
            chunks += _each(unit, lambda p: p.flatten_gradients())
            chunks += _each(unit, lambda p: p.drop_unflattened(self._unsharded(unit, p)))
        if self.sums and (self.held or not self.reduces):
            chunks += _each(unit, lambda p: p.accumulate(self._unsharded(unit, p), held=self.held))
        return chunks

    def _reshard(self, unit: Unit, *, last: bool) -> list[Chunk]:
        """Whole parameters go."""
        if id(unit) not in self.whole:
            return []
        if last or not unit.resident:
            self.whole.discard(id(unit))
        return _each(unit, lambda p: p.reshard())

    def _reduce(self, unit: Unit) -> list[Chunk]:
        """The last unit's reduce-scatter input goes, then this unit's gradients are reduced."""
        chunks: list[Chunk] = []
        if self.reducing is not None:
            chunks += _each(self.reducing, lambda p: p.drop_reduce_input())
            self.reducing = None
        if not any(p.reduces for p in unit.pieces):
            return chunks
        self.reducing = unit
        chunks += _each(unit, lambda p: p.copy_in(self._unsharded(unit, p), held=self.held))
        for piece in unit.pieces:
            events, later = piece.settle(first=self.first)
            chunks += unit.of_every_copy(piece, events)
            self.later += unit.of_every_copy(piece, later) * self.times
        return chunks

    def _unsharded(self, unit: Unit, piece: Piece) -> list[Tensor]:
        """The gradients of a piece's run that the backward has left."""
        return next(self.gradients.get(i, []) for i in unit.runs if self.runs[i].name == piece.name)

    def _end_of_backward(self) -> None:
        """What no gradient of an input announced: enclosing units, then those that end with the
        backward, as modules are listed."""
        chunks: list[Chunk] = []
        self.times = 1
        for unit in sorted((u for u in self.units if u.ending), key=lambda u: not u.outer):
            chunks += self._post_backward(unit)
        for unit in self.fetched:
            chunks += _each(unit, lambda p: p.drop_output())
        self._end_of_reductions(chunks)

    def _end_of_reductions(self, before: list[Chunk] | None = None) -> None:
        chunks = before or []
        if self.reducing is not None:
            chunks += _each(self.reducing, lambda p: p.drop_reduce_input())
        self._tail("end of the backward", Phase.BACKWARD, chunks + self.later)

    def _tail(self, name: str, phase: Phase, chunks: list[Chunk]) -> None:
        self._emit(Segment(name, phase, []), chunks)


def _each(unit: Unit, events_of: Callable[[Piece], list[Event]]) -> list[Chunk]:
    return [
        chunk
        for piece in unit.pieces
        if (events := events_of(piece))
        for chunk in unit.of_every_copy(piece, events)
    ]


def weight_gradients(run: Run) -> list[Tensor]:
    """Gradients of a run's weights, as its block recorded them."""
    return run.block.gradients
