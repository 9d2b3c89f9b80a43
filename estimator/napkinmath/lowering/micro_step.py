"""One micro-step: the forward of every run, then their backwards in reverse, as segments of
events."""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, Block, Phase, Role, Tensor, Value
from napkinmath.ir.step import END_OF_STEP, STAGE_ENTRANCE, Run, Segment
from napkinmath.lowering.autograd import Backward
from napkinmath.lowering.chain import (
    Chain,
    SecondGradient,
    SecondStream,
    note_held_streams,
    taken_from,
)
from napkinmath.lowering.forward import Forward, saved_tensors
from napkinmath.lowering.gradient_hooks import keeps_gradients
from napkinmath.lowering.shared_values import END, leaves_of, shared_releases
from napkinmath.lowering.units import LoweredBlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.shared_values import Releases

    # events, and what they leave in both chains
    _Handed = tuple[list[Event], "Tensor | None", "Tensor | None"]


def lower_micro_step(
    runs: list[Run], shared: dict[str, Value], policy: Policy, *, accumulate: bool
) -> list[Segment]:
    """Forward of every run, then backward in reverse; `accumulate` adds to the gradients of an
    earlier one."""
    units = _units(runs, policy)
    releases = shared_releases(runs, shared, policy)
    note_held_streams(runs, units, releases)
    forwards = _Forwards(runs, units, releases)
    for index in range(len(runs)):
        forwards.add(index)
    segments = forwards.segments + forwards.end() + forwards.cached
    if policy.stack.loop.holds_last_step and policy.stack.quantizer.keeps_input:
        from napkinmath.lowering.held_outputs import with_graph_before

        segments = with_graph_before(segments, runs)
    backward, with_gradient = _lower_backward(runs, units, releases, accumulate=accumulate)
    segments += backward
    ends: list[Event] = [(FREE, tensor) for tensor in releases.get(END, ())]
    leaves = (leaf for run in runs for leaf in leaves_of(run.block))
    ends += [(FREE, x.shared_gradient()) for x in dict.fromkeys(leaves) if id(x) in with_gradient]
    if forwards.chain.held is not None:
        ends.append((FREE, forwards.chain.held))  # the loss
    segments.append(Segment(END_OF_STEP, Phase.BACKWARD, ends))
    if policy.beside is None:
        return segments
    # an engine gathers the weights of a run once: it stays one piece
    return policy.beside.around(segments, runs, parts=not policy.shards)


def _units(runs: list[Run], policy: Policy) -> list[LoweredBlock]:
    """Of each run the unit that lowers its block; runs of one block share it."""
    found: dict[int, LoweredBlock] = {}
    for run in runs:
        if id(run.block) not in found:
            found[id(run.block)] = LoweredBlock(run.block, run.stage, policy)
    return [found[id(run.block)] for run in runs]


def lower_micro_steps(
    runs: list[Run], shared: dict[str, Value], policy: Policy
) -> list[tuple[int, list[Segment]]]:
    """(times, segments) of a step's micro-steps: the first makes gradients, unless those of the
    step before are kept; the others add to them."""
    steps = policy.config.gradient_accumulation_steps
    found = [(1, lower_micro_step(runs, shared, policy, accumulate=False))]
    kept = keeps_gradients(policy)  # what was lowered has then said which gradients there are
    if kept or steps > 1:
        later = lower_micro_step(runs, shared, policy, accumulate=True)
        found = [(steps, later)] if kept else [*found, (steps - 1, later)]
    return found


# ---------------------------------------------------------------- forward


class _Forwards:
    """Lowers the forwards in order; `cached` are the segments that end autocast after the last."""

    def __init__(self, runs: list[Run], units: list[LoweredBlock], releases: Releases) -> None:
        self.runs, self.units, self.releases = runs, units, releases
        self.segments: list[Segment] = []
        self.cached: list[Segment] = []
        self.chain = Chain("hidden states between blocks", Role.ACTIVATIONS)
        # until the model's loop has the next layer's
        self.second = Chain("second result of the layer before", Role.ACTIVATIONS)
        self.stream = SecondStream()
        self._known: dict[tuple[object, ...], _Handed] = {}

    def add(self, index: int) -> None:
        """The forward of one run."""
        run, forward = self.runs[index], self.units[index].forward()
        events = self._events(index, forward)
        returned = run.block.returned if run.block.returned in forward.until_end else None
        self._hold_until_end(run, [t for t in forward.until_end if t is not returned])
        opening = self.second.drop() if returned is None else []
        opening += self._released(index)
        embedded = self._held_entrance(index, forward)
        first_differs = opening or embedded or (returned is not None and self.second.held is None)
        for repeat in [1, run.count - 1] if first_differs and run.count > 1 else [run.count]:
            closing = [] if returned is None else self.second.replace(returned)
            if embedded is not None:
                closing, embedded = [(ALLOC, embedded), *closing], None
            whole = opening + events + closing if opening or closing else events
            self.segments.append(Segment(run.name, Phase.FORWARD, whole, repeat, run.stage.symbols))
            opening = []

    def _events(self, index: int, forward: Forward) -> list[Event]:
        """The run's own forward, and the handing over on both sides: one list for all runs of a
        block that are handed the same."""
        run = self.runs[index]
        block, key = run.block, (id(run.block), id(self.chain.held), id(self.stream.held))
        if key not in self._known:
            events = list["Event"]()
            if block.input is not None:
                events.append(self.chain.take(block.input.tensor))
            events += self.stream.taken(block) + forward.events
            if block.output is not None and not run.stage.publishes:
                given = block.output.tensor, block.output, run.stage.symbols
                events.append(self.chain.give(*given))
            events += self.stream.given(run, self.units[index])
            self._known[key] = events, self.chain.held, self.stream.held
        events, self.chain.held, self.stream.held = self._known[key]
        return events

    def _released(self, index: int) -> list[Event]:
        """What ends before a run, once whatever its count."""
        return [(FREE, tensor) for tensor in self.releases.get((Phase.FORWARD, index), ())]

    def end(self) -> list[Segment]:
        """What the model's forward held until it returned, on a stage without a head."""
        events = self.second.drop() + self._released(len(self.runs))
        return [Segment("end of the forward", Phase.FORWARD, events)] if events else []

    def _hold_until_end(self, run: Run, tensors: list[Tensor]) -> None:
        """Tensors that live to the end of the forward pass: autocast's weight casts."""
        if tensors:
            name = f"end of autocast, {run.name}"
            self.cached.append(run.segment(name, Phase.FORWARD, [(FREE, t) for t in tensors]))

    def _held_entrance(self, index: int, forward: Forward) -> Tensor | None:
        """The embeddings that are held from here on, noted where they are released."""
        unit = self.units[index]
        ends = [i + 1 for i, run in enumerate(self.runs) if run.stage.ends_forward]
        start = max((i for i in ends if i <= index), default=0)
        stop = min((i for i in ends if i > index), default=len(self.runs))
        runs = self.runs[start:stop]  # of the model's forward that is under way
        held = held_entrance(runs, index - start, unit, forward)
        if held is not None:
            has_head = not self.units[stop - 1].is_layer
            end = Phase.FORWARD, stop - has_head
            entrance = entrance_of(runs)
            if _keeps_own_output(runs[entrance].block):
                end = Phase.BACKWARD, start + entrance
            self.releases.setdefault(END if unit.pipelined else end, []).append(held)
        return held


def _keeps_own_output(block: Block) -> bool:
    """Whether an entrance reads its own output once more, for what its backward needs of it."""
    output = block.output
    return output is not None and output.tensor in saved_tensors(block)


def entrance_of(runs: list[Run]) -> int:
    """The run that makes the text's embeddings: the first, or the one that puts images among
    them."""
    if not runs[0].stage.publishes:
        return 0
    return max(first_text_layer(runs) - 1, 0)


def first_text_layer(runs: list[Run]) -> int:
    """The first checkpointable run that belongs to no tower."""
    found = (i for i, run in enumerate(runs) if run.stage.checkpointed and not run.stage.modality)
    return next(found, 0)


def _behind(runs: list[Run], entrance: int) -> int:
    """The first run behind the entrance, past towers that lie idle."""
    found = (i for i, run in enumerate(runs) if i > entrance and run.block.output is not None)
    return next(found, 0)


def held_entrance(
    runs: list[Run], index: int, unit: LoweredBlock, forward: Forward
) -> Tensor | None:
    """A stand-in for the embeddings that the model's own forward holds, made after the first layer
    if that layer does not keep them.

    On a later pipeline stage of torch it is the buffer that the hidden states were received in.
    """
    value, entrance = unit.block.input, entrance_of(runs)
    if (
        index != _behind(runs, entrance)
        or (unit.pipelined and runs[0].path != STAGE_ENTRANCE)
        or value is None
        or (index == len(runs) - 1 and not unit.pipelined)
        or not (unit.is_layer or runs[entrance].stage.part.output_is_held_past_layers)
        or unit.checkpointed
        or value.tensor in forward.kept
        or runs[entrance].stage.publishes
        or not (runs[entrance].stage.part.output_is_held(training=unit.training) or unit.pipelined)
    ):
        return None
    name, module = "embeddings held by the model's forward", runs[entrance].block.name
    return Tensor(name, value.axes, value.dtype, Role.ACTIVATIONS, module)


# ---------------------------------------------------------------- backward


def _lower_backward(
    runs: list[Run], units: list[LoweredBlock], releases: Releases, *, accumulate: bool
) -> tuple[list[Segment], set[int]]:
    """The segments, and the ids of the shared values that got a gradient."""
    loss = runs[-1].block.output
    if loss is None or not loss.requires_grad:
        return [], set()
    backwards = _Backwards(loss, accumulate=accumulate)
    first_layer = first_text_layer(runs)
    for index in range(len(runs) - 1, -1, -1):
        run = runs[index]
        if backwards.reaches(run):
            backwards.add(run, units[index])
        elif backwards.reaches_shared(run.block):
            backwards.add_shared(run, units[index])
        if (released := releases.get((Phase.BACKWARD, index))) is not None:
            backwards.release("shared tensors released", released)
        if index == first_layer and backwards.left:
            backwards.release("graphs of stored tensors released", backwards.left)
    return backwards.segments, backwards.with_gradient


# (gradient of the output, the engine that ran, gradient of the input)
_Lowered = tuple[Tensor, Backward, "Tensor | None"]


class _Backwards:
    """Lowers the backwards from the last run to the first.

    `filled` are gradients of tied weights that a later block has made, `with_gradient` the ids of the
    shared values that have a gradient waiting. A block that several runs share goes backward as the
    first of them does, unless what waits for it differs.
    """

    def __init__(self, loss: Value, *, accumulate: bool) -> None:
        self.accumulate = accumulate
        self.chain = Chain("gradient between blocks", Role.ACTIVATION_GRADIENTS)
        self.stream = SecondGradient()
        self.filled: dict[str, Tensor] = {}
        self.with_gradient: set[int] = set()
        self.left: list[Tensor] = []  # by recomputations whose results something still holds
        self.known: dict[tuple[object, ...], _Lowered] = {}
        self.handed: dict[tuple[object, ...], _Handed] = {}
        name = "gradient of the loss"
        seed = Tensor(name, loss.axes, loss.dtype, Role.ACTIVATION_GRADIENTS)
        started: list[Event] = [(ALLOC, seed), self.chain.give(seed, loss)]
        self.segments = [Segment(name, Phase.BACKWARD, started)]

    def reaches(self, run: Run) -> bool:
        """Whether the run's output has a gradient."""
        output = run.block.output
        if output is None or not output.requires_grad:
            return False
        return not run.stage.publishes or id(output) in self.with_gradient

    def reaches_shared(self, block: Block) -> bool:
        """Whether only what the block shares has one: a trained prefix."""
        waiting = self.with_gradient | self.stream.waiting(block)
        return any(id(out) in waiting for op in block.ops for out in op.outputs)

    def add(self, run: Run, unit: LoweredBlock) -> None:
        """The backward of a run, its first copy apart where that opens shared gradients."""
        block = run.block
        readers = {id(value) for value in shared_readers(block)}
        apart = readers - self.with_gradient or self.stream.differs(block)
        apart = apart and run.count > 1
        for repeat in [1, run.count - 1] if apart else [run.count]:
            events, backward = self._events(run, unit)
            self._append(run, events, backward, repeat)
            self.with_gradient |= readers
            for path in (w.tied_to for w in block.weights):
                if path and path in backward.made:
                    self.filled[path] = backward.made[path]

    def release(self, name: str, tensors: list[Tensor]) -> None:
        """Tensors that end between two backwards."""
        events: list[Event] = [(FREE, tensor) for tensor in tensors]
        self.segments.append(Segment(name, Phase.BACKWARD, events))

    def add_shared(self, run: Run, unit: LoweredBlock) -> None:
        """The backward of a block of which only what it shares needs a gradient."""
        waiting = frozenset(self.with_gradient | self.stream.waiting(run.block))
        stream = self.stream.arrives(run.block)
        if unit.checkpointed:
            engine, _ = unit.backward(
                None,
                accumulate=self.accumulate,
                filled=self.filled,
                with_gradient=waiting,
                stream=stream,
            )
        else:
            engine = Backward(
                run.block,
                accumulate=self.accumulate,
                filled=self.filled,
                with_gradient=waiting,
                hook=unit.hook,
                stream=stream,
            )
            engine.run(None)
        events = self.stream.around(run, unit, engine, engine.events)
        self._append(run, events, engine, run.count)
        self.with_gradient |= {id(value) for value in shared_readers(run.block)}

    def _append(self, run: Run, events: list[Event], engine: Backward, repeat: int) -> None:
        if not self.accumulate:
            run.block.gradients = engine.persistent
        self.left += engine.left
        self.segments.append(Segment(run.name, Phase.BACKWARD, events, repeat, run.stage.symbols))

    def _events(self, run: Run, unit: LoweredBlock) -> tuple[list[Event], Backward]:
        """One block's backward: its events, and the engine that made them."""
        block = run.block
        waiting = frozenset(self.with_gradient | self.stream.waiting(block))
        key = id(block), waiting, len(self.filled), id(self.stream.held)
        if key not in self.known:
            self.known[key] = self._lowered(block, unit, waiting)
        incoming, backward, result = self.known[key]
        assert block.output is not None
        held = *key, id(self.chain.held)
        if held not in self.handed:
            events = self._handed_over(run, incoming, backward, result)
            events = self.stream.around(run, unit, backward, events)
            self.handed[held] = events, self.chain.held, self.stream.held
        events, self.chain.held, self.stream.held = self.handed[held]
        return events, backward

    def _handed_over(
        self, run: Run, incoming: Tensor, backward: Backward, result: Tensor | None
    ) -> list[Event]:
        """The backward's events, and the handing over on both sides."""
        block = run.block
        assert block.output is not None
        taken = (
            taken_from(block.output.shared_gradient(), incoming)
            if run.stage.publishes
            else [self.chain.take(incoming)]
        )
        events: list[Event] = [*taken, *backward.events]
        if result is not None and block.input is not None:
            events.append(self.chain.give(result, block.input, run.stage.symbols))
        return events

    def _lowered(self, block: Block, unit: LoweredBlock, waiting: frozenset[int]) -> _Lowered:
        output = block.output
        assert output is not None
        role = Role.ACTIVATION_GRADIENTS
        incoming = Tensor("incoming gradient", output.axes, output.dtype, role, block.name)
        backward, result = unit.backward(
            incoming,
            accumulate=self.accumulate,
            filled=self.filled,
            with_gradient=waiting,
            stream=self.stream.arrives(block),
        )
        return incoming, backward, result


def shared_readers(block: Block) -> list[Value]:
    """The shared values needing a gradient that a block reads and did not make."""
    made = {id(out) for op in block.ops for out in op.outputs}
    read = {id(value) for op in block.ops for value in op.inputs}
    return [
        value
        for value in block.externals
        if value.requires_grad
        and id(value) in read
        and id(value) not in made
        and value is not block.stream_in
    ]
