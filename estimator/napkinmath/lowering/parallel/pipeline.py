"""Pipeline parallelism: a rank's layers out of a recorded model, and its micro-batches in the order
of the schedule.

Every stage is the same record cut elsewhere: the first keeps what comes before the layers, the last
what comes after, and all make the tables that layers read. What a stage receives and sends are
b·s·h of hidden states and of their gradient.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate

from napkinmath.base.errors import InputError
from napkinmath.ir.costs import Collective, traffic
from napkinmath.ir.ledger import ALLOC, BATCH, Block, Op, Phase, Role, Tensor, Value, Weight
from napkinmath.ir.model_spec import Part, Stage
from napkinmath.ir.step import STAGE_ENTRANCE, Run, Segment
from napkinmath.lowering.gradient_hooks import keeps_gradients
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.parallel.stage_order import (
    FORWARD,
    check_micro_batches,
    head_in_layers,
    held_stages,
    in_flight,
    layers_per_stage,
    stage_order,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.parallel.stage_order import Turn
    from napkinmath.lowering.policy import Policy
    from napkinmath.lowering.record import RankModel, Recording

    Halves = tuple[list[Segment], list[Segment]]  # a micro-batch's forward and backward


# Chunks of a rank that each have an entrance of their own, and so are lowered each by itself: the
# replay tells their tensors apart and sees sooner that micro-batches repeat. More share one.
CHUNKS_APART = 32


def num_micro_batches(policy: Policy) -> int:
    """Micro-batches in a pipelined step."""
    config = policy.config
    return config.parallel.num_micro_batches or config.gradient_accumulation_steps


class Pieces:
    """A recorded model as a pipeline cuts it: what comes before the layers, each layer's run, what
    comes after."""

    def __init__(self, runs: list[Run], name: str) -> None:
        cut = [run.stage.checkpointed and not run.stage.modality for run in runs]
        layers = [i for i, run in enumerate(runs) if cut[i] and run.block.ops]
        if not layers:
            raise InputError(
                f"{name} has no row of equal layers to cut into pipeline stages; use"
                " pipeline_parallel_size=1"
            )
        if layers != list(range(layers[0], layers[-1] + 1)) or any(
            runs[i].stage.publishes for i in layers
        ):
            raise InputError(
                f"{name} has several towers of layers, which a pipeline does not cut here; use"
                " pipeline_parallel_size=1"
            )
        if any(run.block.stored for run in runs):
            raise InputError(
                f"{name}: late layers read the keys and values of earlier ones, which no pipeline"
                " hands on; use pipeline_parallel_size=1"
            )
        self.before, self.after = runs[: layers[0]], runs[layers[-1] + 1 :]
        copies = [(runs[i], k) for i in layers for k in range(runs[i].count)]
        self.layers = [run for run, _ in copies]
        self.offsets = [run.first + k for run, k in copies]

    def between(self, start: int, stop: int | None) -> list[Run]:
        """The runs of layers start to stop."""
        found: list[Run] = []
        for run, offset in zip(self.layers[start:stop], self.offsets[start:stop], strict=True):
            last = found[-1] if found else None
            if last is not None and last.block is run.block and last.first + last.count == offset:
                last.count += 1
            else:
                found.append(Run(run.block, 1, run.stage, offset))
        return found


def stage_chunks(recording: Recording, policy: Policy, rank: int) -> list[list[Run]]:
    """The runs of each model chunk that a pipeline rank holds, in the order of the model."""
    parallel, shared = policy.config.parallel, recording.shared
    pieces = Pieces(recording.runs, recording.spec.name)
    if _parameters_reach(pieces.before, made_by(pieces.before, shared)):
        raise InputError(
            f"{recording.spec.name}: layers read what parameters before them make, which no pipeline"
            " hands on; use pipeline_parallel_size=1"
        )
    head = head_in_layers(recording.spec, policy.stack)
    counts = layers_per_stage(len(pieces.layers), parallel, head)
    check_micro_batches(parallel, num_micro_batches(policy))
    begins = [0, *accumulate(counts)]
    held = held_stages(parallel, rank)
    entrances: dict[int, Run] = {}
    chunks: list[list[Run]] = []
    for index in held:
        inner = pieces.between(begins[index], begins[index + 1])
        before = pieces.before
        if index > 0:
            first = inner[0] if inner else pieces.between(len(pieces.layers) - 1, None)[0]
            key = id(first.block) if len(held) > CHUNKS_APART else index
            if key not in entrances:
                entrances[key] = entrance(pieces.before, first, shared, policy)
            same = entrances[key]
            before = [Run(same.block, 1, same.stage, 0)]
        after = pieces.after if index == len(counts) - 1 else []
        if index > 0:
            after = [untied(run) for run in after]
        chunks.append([*before, *inner, *after])
    return chunks


def _parameters_reach(before: list[Run], shared: dict[str, Value]) -> bool:
    """Whether a parameter before the layers is in what all layers read."""
    reached = set[int]()
    for op in (op for run in before for op in run.block.ops):
        if any(
            id(value) in reached or (value.weight is not None and not value.weight.buffer)
            for value in op.inputs
        ):
            reached |= {id(value) for value in op.outputs}
    return any(id(value) in reached for value in shared.values())


def untied(run: Run) -> Run:
    """A head whose embedding is on another stage holds a copy of the weight; the two gradients are
    summed."""
    for weight in run.block.weights:
        weight.tied_to = ""
    return run


# ---------------------------------------------------------------- what a later stage begins with


def entrance(before: list[Run], first: Run, shared: dict[str, Value], policy: Policy) -> Run:
    """The start of a stage that embeds nothing: hidden states are received, tables and masks are
    made."""
    given = first.block.input
    assert given is not None
    kept, weights, last_use = _tables(before, shared)
    states = Tensor("received hidden states", given.axes, given.dtype, Role.ACTIVATIONS)
    received = Value(states, given.axes, given.dtype, given.requires_grad)
    costs = _passing_on(received, policy)
    receive = Op(
        "receive",
        "",
        (),
        (received,),
        forward=((ALLOC, states),),
        saves=(),
        costs=costs,
        backward=(),
        gradients=(),
        backward_costs=costs if received.requires_grad else (),
    )
    last_use = {tensor: index + 1 for tensor, index in last_use.items()} | {states: 0}
    made, ops = tuple(shared.values()), [receive, *kept]
    block = Block(STAGE_ENTRANCE, ops, weights, None, received, made, last_use, {})
    symbols = before[-1].stage.symbols if before else ()
    return Run(block, 1, Stage(part=Part(), path=STAGE_ENTRANCE, symbols=symbols), 0)


def _passing_on(received: Value, policy: Policy) -> tuple[Collective, ...]:
    """A send from stage to stage. Megatron's tensor-parallel ranks hold the same hidden states:
    each sends its part, and they gather.

    Sources: Megatron-LM arguments.py scatter_gather_tensors_in_pipeline; DeepSpeed
    runtime/pipe/engine.py is_pipe_partitioned.
    """
    parallel, moved = policy.config.parallel, traffic(received)
    overlaps = parallel.pipeline_schedule.record.is_pipelined
    ranks = parallel.tensor_parallel_size
    if ranks == 1 or parallel.sequence_parallel or not policy.stack.engine.own_stages:
        return (Collective("send", moved, ranks=2, axis="pipeline", overlaps=overlaps),)
    return (
        Collective("send", moved // ranks, ranks=2, axis="pipeline", overlaps=overlaps),
        Collective("all-gather", moved, ranks=ranks, axis="tensor", overlaps=overlaps),
    )


def _tables(
    before: list[Run], shared: dict[str, Value]
) -> tuple[list[Op], list[Weight], dict[Tensor, int]]:
    """The operations before the layers that read neither the batch nor a parameter, the buffers,
    and where their tensors end."""
    wanted = {value.tensor for value in shared.values() if value.tensor.source != BATCH}
    kept: list[Op] = []
    last_use: dict[Tensor, int] = {}
    for block in (run.block for run in before):
        marred, places = set[int](), list[int]()
        for op in block.ops:
            if _can_be_made_again(op, marred):
                kept.append(op)
            else:
                marred |= {id(value) for value in op.outputs}
            places.append(len(kept) - 1)
        for tensor, index in block.last_use.items():
            last_use[tensor] = max(len(kept) - 1 if tensor in wanted else places[index], 0)
    made = {tensor for op in kept for _, tensor in op.forward}
    buffers = [weight for run in before for weight in run.block.weights if weight.buffer]
    return kept, buffers, {tensor: index for tensor, index in last_use.items() if tensor in made}


def _can_be_made_again(op: Op, marred: set[int]) -> bool:
    """Whether an operation reads neither the batch nor a parameter; `marred` are the ids of values
    made of those."""
    reads = any(
        id(value) in marred or (value.weight is not None and not value.weight.buffer)
        for value in op.inputs
    )
    batch = any(value.tensor.source == BATCH for value in op.outputs)
    return bool(op.outputs and op.forward) and not reads and not batch


# ---------------------------------------------------------------- order


def pipelined(model: RankModel, policy: Policy) -> list[tuple[int, list[Segment]]]:
    """The step's forwards and backwards in the schedule's order; a chunk's first backward makes
    gradients, unless those of the step before are kept; later ones add to them."""

    def lowered(chunk: list[Run], *, accumulate: bool) -> list[Segment]:
        made = made_by(chunk, model.shared)
        return lower_micro_step(chunk, made, policy, accumulate=accumulate)

    first, later = (
        [_halves(each) for each in once_each(model.chunks, partial(lowered, accumulate=adds))]
        for adds in (False, True)
    )
    return scheduled(
        policy, model.pipeline_rank, later if keeps_gradients(policy) else first, later
    )


def once_each(
    chunks: list[list[Run]], lowered: Callable[[list[Run]], list[Segment]]
) -> Iterator[list[Segment]]:
    """The segments of every chunk; chunks of equal blocks are lowered once, and each has its own
    names."""
    known: dict[tuple[tuple[int, int], ...], tuple[list[Run], list[Segment]]] = {}
    for chunk in chunks:
        key = tuple((id(run.block), run.count) for run in chunk)
        if key not in known:
            known[key] = chunk, lowered(chunk)
        like, segments = known[key]
        yield segments if like is chunk else _renamed(segments, like, chunk)


def _renamed(segments: list[Segment], like: list[Run], chunk: list[Run]) -> list[Segment]:
    """The segments of a chunk under the names of an equal one: an engine finds a run by its name."""
    names = {a.name: b.name for a, b in zip(like, chunk, strict=True)}

    def named(name: str) -> str:
        old = max((old for old in names if name.endswith(old)), key=len, default="")
        return name.removesuffix(old) + names[old] if old else name

    return [
        Segment(named(s.name), s.phase, s.events, s.repeat, s.symbols, named(s.run))
        for s in segments
    ]


def scheduled(
    policy: Policy, rank: int, first: list[Halves], later: list[Halves]
) -> list[tuple[int, list[Segment]]]:
    """Halves of each chunk's first micro-batch and of later ones, in a rank's order: (times,
    segments)."""
    seen: set[Turn] = set()
    found: list[tuple[int, list[Segment]]] = []

    def half(turn: Turn, fresh: set[Turn]) -> list[Segment]:
        what, chunk = turn
        return (first if turn in fresh else later)[chunk][what != FORWARD]

    for times, turns in stage_order(policy.config.parallel, rank, num_micro_batches(policy)):
        if set(turns) - seen:  # a chunk's first forward and first backward belong together
            row: list[Segment] = []
            for turn in turns:
                row += half(turn, {turn} - seen)
                seen.add(turn)
            found.append((1, row))
            times -= 1
        if times:
            found.append((times, [segment for turn in turns for segment in half(turn, set())]))
    return found


def made_by(runs: list[Run], shared: dict[str, Value]) -> dict[str, Value]:
    """The shared values that some runs make themselves."""
    made = {
        tensor
        for run in runs
        for op in run.block.ops
        for action, tensor in op.forward
        if action == ALLOC
    }
    return {name: value for name, value in shared.items() if value.tensor in made}


def _halves(segments: list[Segment]) -> Halves:
    """A micro-step's forward and backward."""
    start = next(
        (i for i, segment in enumerate(segments) if segment.phase is Phase.BACKWARD), len(segments)
    )
    return segments[:start], segments[start:]


def waiting_buffers(model: RankModel, policy: Policy) -> list[Segment]:
    """torch's stages make a buffer for every micro-batch they will receive, forward and backward;
    those in use are counted where they are used.

    Source: torch 2.13 distributed/pipelining/stage.py PipelineStage._create_act_recv_info,
    _create_grad_recv_info.
    """
    parallel = policy.config.parallel
    if not policy.keeps_stage_buffers:
        return []
    count = num_micro_batches(policy)
    held = max(in_flight(stage_order(parallel, model.pipeline_rank, count)).values())
    found: list[Segment] = []

    def make(name: str, like: Value, times: int) -> None:
        if times > 0:
            events: list[Event] = [(ALLOC, _buffer(name, like))]
            found.append(
                Segment("receive buffers of waiting micro-batches", Phase.LOAD, events, times)
            )

    for runs in model.chunks:
        received, sent = runs[0].block.output, runs[-1].block.output
        if runs[0].path == STAGE_ENTRANCE and received is not None:
            make("receive buffer of activations", received, count - held)
            waits = not parallel.pipeline_schedule.record.backward_waits
            if received.requires_grad and waits:  # for the next one
                make("gradient on its way to the stage before", received, 1)
        if sent is not None and runs[-1].stage.checkpointed and sent.requires_grad:
            make("receive buffer of gradients", sent, count - 1)
    return found


def _buffer(name: str, like: Value) -> Tensor:
    return Tensor(name, like.axes, like.dtype, Role.COMMUNICATION)
