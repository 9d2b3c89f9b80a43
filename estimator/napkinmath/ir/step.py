"""build_step: a model and a training configuration become the ordered segments of one training
step."""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8
from napkinmath.ir.ledger import ALLOC, BATCH, FREE, TAKE, Block, Phase, Role, Tensor, Value, Weight
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.tape import Tape
from napkinmath.lowering.autograd import Backward, made_again, saved_tensors
from napkinmath.lowering.lifecycle import load_segments, save_segments
from napkinmath.lowering.recompute import arrange
from napkinmath.lowering.units import Unit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.autograd import Forward
    from napkinmath.lowering.optimizer import Update
    from napkinmath.lowering.policy import Policy


STAGE_ENTRANCE = "stage entrance"  # path of what a later pipeline stage begins with


class Segment:
    """`repeat` times the same events: a layer's forward, its backward, one block's optimizer
    step."""

    __slots__ = ("events", "name", "phase", "repeat", "symbols")

    def __init__(
        self,
        name: str,
        phase: Phase,
        events: list[Event],
        repeat: int = 1,
        symbols: tuple[tuple[str, Size], ...] = (),
    ) -> None:
        self.name, self.phase, self.events, self.repeat, self.symbols = (
            name,
            phase,
            events,
            repeat,
            symbols,
        )

    def copy(self, *, events: list[Event] | None = None, repeat: int) -> Segment:
        """The same segment with other events, or repeated otherwise."""
        return Segment(
            self.name, self.phase, self.events if events is None else events, repeat, self.symbols
        )


class Run:
    """A recorded block, repeated `count` times in a row, the first copy at index `first` of its
    stage."""

    __slots__ = ("block", "count", "first", "label", "stage")

    def __init__(self, block: Block, count: int, stage: Stage, first: int) -> None:
        self.block, self.count, self.stage, self.first = block, count, stage, first
        self.label = ""  # its name where several runs would have the same

    @property
    def name(self) -> str:
        """'model.layers.0..31', or the path of a single block."""
        if self.label:
            return self.label
        return self.path if self.stage.count == 1 else self.numbered

    @property
    def path(self) -> str:
        return self.stage.path or type(self.stage.part).__name__

    @property
    def numbered(self) -> str:
        """The path with the numbers of its copies."""
        return (
            f"{self.path}.{self.first}"
            if self.count == 1
            else f"{self.path}.{self.first}..{self.first + self.count - 1}"
        )


def tell_apart(runs: list[Run]) -> None:
    """Gives runs of one path names of their own: engines find a run by its name. Layers are
    numbered, others counted."""
    seen: dict[str, int] = {}
    layers = {run.path for run in runs if run.stage.checkpointed and run.first}
    for run in runs:
        if run.stage.checkpointed and run.path in layers:
            run.label = run.numbered
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.label = f"{run.name}, {seen[run.name]}"


class Step:
    """The intermediate form of one training step: blocks, and segments of events by phase."""

    __slots__ = (
        "load",
        "micro_steps",
        "policy",
        "runs",
        "save",
        "spec",
        "symbols",
        "update",
        "workspaces",
    )

    def __init__(
        self,
        spec: ModelSpec,
        policy: Policy,
        runs: list[Run],
        load: list[Segment],
        micro_steps: list[tuple[int, list[Segment]]],
        update: Update,
        save: list[Segment],
    ) -> None:
        self.spec, self.policy, self.runs, self.load, self.micro_steps, self.update, self.save = (
            spec,
            policy,
            runs,
            load,
            micro_steps,
            update,
            save,
        )
        if policy.stack.holds_last_step:
            from napkinmath.lowering.held_outputs import hold_through_update

            hold_through_update(update, runs)
        self.workspaces = product_workspaces(policy)
        if (
            policy.decoded
        ):  # made before the first product: patched operations decode every weight into it
            buffer = Tensor(
                "buffer of decoded weights", (max(policy.decoded),), UINT8, Role.WORKSPACE
            )
            self.workspaces += [Segment(buffer.name, Phase.FORWARD, [(ALLOC, buffer)])]
        config = policy.config
        self.symbols = {
            **dict(spec.symbols),
            "b": config.micro_batch_size,
            "s": policy.sequence_length,
            "st": config.batch.target_length or policy.sequence_length,
        }


def reads_tokens(step: Step) -> bool:
    """Whether the model reads token ids; a vision encoder's sequence is its image's and no choice
    of the user."""
    if step.policy.config.parallel.pipeline_parallel_size > 1:
        # only models of language are cut into stages, and only the first stage reads the ids
        return True
    return any(op.name == "input ids" for run in step.runs for op in run.block.ops)


def product_workspaces(policy: Policy) -> list[Segment]:
    """What torch allocates for cuBLAS on the first product of the forward's thread, and on that of
    the backward's.

    Source: torch aten/src/ATen/cuda/CublasHandlePool.cpp getCUDABlasLtWorkspace, one a thread and
    stream.
    """
    if not policy.product_workspace_bytes:
        return []
    phases = ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward"))
    return [
        Segment(
            f"cuBLAS workspace of the {name}",
            phase,
            [
                (
                    ALLOC,
                    Tensor(
                        f"cuBLAS workspace, {name}",
                        (policy.product_workspace_bytes,),
                        UINT8,
                        Role.WORKSPACE,
                    ),
                )
            ],
        )
        for phase, name in phases
    ]


def build_step(spec: ModelSpec, policy: Policy, *, pipeline_rank: int = 0) -> Step:
    """Records every distinct block once and lowers it to segments; sizes stay symbolic. Of a
    pipeline it is one rank's step."""
    whole = spec
    if not policy.config.workload.is_plain:
        from napkinmath.lowering.workload import workload_step

        return workload_step(spec, policy)
    if policy.tensor is not None:
        from napkinmath.lowering.parallel.tensor import rank_share

        spec = rank_share(spec, policy.tensor.degree, policy.tensor.style)
    if policy.context is not None:
        from napkinmath.lowering.parallel.context import check_context

        check_context(spec, policy.config)
    if policy.experts is not None:
        from napkinmath.lowering.parallel.expert import check_experts

        check_experts(spec, policy.config.parallel)
    alone = policy.config.parallel.pipeline_parallel_size == 1
    runs, shared = record_runs(spec, policy) if alone else recorded_once(whole, spec, policy)
    if policy.tensor is not None:
        from napkinmath.lowering.parallel.tensor import check_layers

        check_layers(runs, policy.tensor, spec.name)
    if policy.experts is not None:
        from napkinmath.lowering.parallel.expert import check_spread

        check_spread(runs, spec.name)
    chunks = [runs]
    if not alone:
        from napkinmath.lowering.parallel.pipeline import stage_chunks

        chunks = stage_chunks(runs, shared, policy, pipeline_rank, spec.name)
        runs = [run for chunk in chunks for run in chunk]
    tell_apart(runs)
    if policy.shards:
        from napkinmath.lowering.data_parallel.engines import sharded_step

        return sharded_step(
            spec, policy, runs, shared, [] if chunks[0] is runs else chunks, pipeline_rank
        )
    load = load_segments(runs, policy)
    accumulation = policy.config.gradient_accumulation_steps
    if chunks[0] is not runs:
        from napkinmath.lowering.parallel.pipeline import pipelined, waiting_buffers

        micro_steps = pipelined(chunks, shared, policy, pipeline_rank)
        load += waiting_buffers(chunks, policy, pipeline_rank)
    else:
        micro_steps = [(1, lower_micro_step(runs, shared, policy, accumulate=False))]
        if accumulation > 1:
            micro_steps.append(
                (accumulation - 1, lower_micro_step(runs, shared, policy, accumulate=True))
            )
    from napkinmath.lowering.optimizer import lower_update

    if policy.config.offload.parameters:
        from napkinmath.lowering.parameter_offload import load_on_host, stream

        load = load_on_host(load, runs)
        micro_steps = [(repeat, stream(segments, runs, policy)) for repeat, segments in micro_steps]
    update = lower_update(runs, policy, dict(spec.symbols))
    if policy.config.parallel.replicates:
        from napkinmath.lowering.data_parallel.replicated import replicate

        load, micro_steps = replicate(runs, policy, load, micro_steps, update, dict(spec.symbols))
    if policy.stack.bucket_bytes:
        bucket = Tensor(
            "gradient buckets",
            (policy.stack.bucket_bytes,),
            UINT8,
            Role.COMMUNICATION,
            source=policy.stack.source,
        )
        load += [Segment("gradient buckets", Phase.LOAD, [(ALLOC, bucket)])]
    if policy.stack.gradients_kept and not policy.config.optimizer_in_backward:
        load += [
            Segment(
                f"gradients of {run.name}",
                Phase.LOAD,
                [(ALLOC, t) for t in run.block.gradients],
                run.count,
                run.stage.symbols,
            )
            for run in runs
            if run.block.gradients
        ]
        micro_steps = [(accumulation, lower_micro_step(runs, shared, policy, accumulate=True))]
        update.zero = []
    return Step(
        spec, policy, runs, load + update.load, micro_steps, update, save_segments(runs, policy)
    )


def record_runs(spec: ModelSpec, policy: Policy) -> tuple[list[Run], dict[str, Value]]:
    """Records the whole model; with quantized weights once more where the library leaves its last
    linear whole."""
    recorded = record_stages(spec, policy)
    if policy.format is not None:
        from napkinmath.lowering.unconverted import with_last_linear_whole

        marked = with_last_linear_whole(spec, recorded[0], policy)
        if marked is not None:
            return record_stages(marked, policy)
    return recorded


def record_stages(spec: ModelSpec, policy: Policy) -> tuple[list[Run], dict[str, Value]]:
    """Records the stages in order; a copy of a part is recorded anew only where its input's type or
    need of a gradient differs."""
    runs: list[Run] = []
    shared: dict[str, Value] = {}
    sizes = dict(spec.symbols)
    incoming: Value | None = None
    recorded: dict[tuple[object, ...], Block] = {}
    asleep: dict[str, Value] = {}  # what idle blocks would have shared
    numbers: dict[str, int] = {}
    for stage in arrange(spec, policy.config.recompute):
        done = 0
        before = numbers.get(stage.path, 0) if stage.checkpointed else 0
        while done < stage.count:
            key = (
                stage.replace(count=1),
                incoming and (incoming.axes, incoming.dtype, incoming.requires_grad),
                tuple(shared.items()),
            )
            block = recorded.get(key)
            dormant = stage.modality == "idle" or (
                stage.modality in ("image", "across") and not policy.config.batch.images
            )
            if block is None:
                seen = {**shared, **asleep} if dormant else shared
                block = recorded[key] = record_block(
                    stage, policy, incoming, seen, {**sizes, **dict(stage.symbols)}
                )
                asleep = {name: value for name, value in seen.items() if name not in shared}
            output = block.output
            if dormant:
                runs.append(
                    Run(
                        idle(block), stage.count, stage.replace(checkpointed=False, publishes=""), 0
                    )
                )
                incoming = output if stage.modality == "image" else incoming
                break
            steady = (
                output is not None
                and incoming is not None
                and output.dtype is incoming.dtype
                and output.axes
                == incoming.axes  # a sequence may come whole into the first layer that splits it
                and output.requires_grad == incoming.requires_grad
            )
            count = stage.count - done if steady and not stage.publishes else 1
            runs.append(Run(block, count, stage, before + done))
            done += count
            numbers[stage.path] = before + done
            incoming = output
        if stage.publishes and incoming is not None:
            if not (stage.modality == "image" and not policy.config.batch.images):
                shared[stage.publishes] = incoming
            incoming = None
    return runs, shared


def recorded_once(
    whole: ModelSpec, spec: ModelSpec, policy: Policy
) -> tuple[list[Run], dict[str, Value]]:
    """The runs that every pipeline rank is cut from, recorded for the first of them; blocks are the
    rank's own, for lowering marks them."""
    from copy import copy

    if policy.recorded is None or policy.recorded[0] is not whole:
        policy.recorded = (whole, *record_runs(spec, policy))
    _, runs, shared = policy.recorded
    own = {id(run.block): copy(run.block) for run in runs}
    return [Run(own[id(run.block)], run.count, run.stage, run.first) for run in runs], dict(shared)


def idle(block: Block) -> Block:
    """A block whose weights are loaded but that does not run: no gradient ever reaches them, so no
    optimizer state is made."""
    weights = [
        Weight(
            w.path,
            w.axes,
            w.tensor,
            trainable=False,
            kind=w.kind,
            constants=w.constants,
            buffer=w.buffer,
            tied_to=w.tied_to,
        )
        for w in block.weights
    ]
    return Block(block.name, [], weights, None, None, (), {}, block.symbols)


def record_block(
    stage: Stage,
    policy: Policy,
    incoming: Value | None,
    shared: dict[str, Value],
    sizes: dict[str, int] | None = None,
) -> Block:
    """One copy of a stage's part on a fresh tape."""
    tape = Tape(policy, sizes)
    if stage.path:
        tape.module = stage.path if stage.count == 1 else f"{stage.path}.*"
    x = None
    if incoming is not None:
        x = Value(
            Tensor("hidden states", incoming.axes, incoming.dtype, Role.ACTIVATIONS, tape.module),
            incoming.axes,
            incoming.dtype,
            incoming.requires_grad,
        )
    before = set(shared)
    output = stage.part.record(tape, x, shared)
    if (
        x is None
        and output is not None
        and stage.part.output_needs_grad(policy)
        and output.dtype.floating
    ):
        output.requires_grad = True
    published = [value for name, value in shared.items() if name not in before]
    externals = published + [value for name, value in shared.items() if name in before]
    block = tape.block(stage.path, x, output, externals)
    block.cached = frozenset((*(value.tensor for value in tape.casts.values()), *tape.outliving))
    return block


class Chain:
    """The tensor handed from block to block: one slot for each shape and type, so that a slot has
    one size."""

    __slots__ = ("_name", "_role", "_slots", "held")

    def __init__(self, name: str, role: Role) -> None:
        self._name, self._role = name, role
        self._slots: dict[tuple[object, ...], Tensor] = {}
        self.held: Tensor | None = None

    def give(self, tensor: Tensor, value: Value | Tensor) -> Event:
        """The event that hands a block's result on."""
        key = (value.axes, value.dtype)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Tensor(self._name, value.axes, value.dtype, self._role)
        self.held = slot
        return TAKE, (tensor, slot)

    def replace(self, tensor: Tensor) -> list[Event]:
        """The events that drop what is held and hold the tensor."""
        dropped: list[Event] = [] if self.held is None else [(FREE, self.held)]
        return [*dropped, self.give(tensor, tensor)]

    def take(self, tensor: Tensor) -> Event:
        """The event that makes the handed-on tensor the reader's own."""
        assert self.held is not None
        return TAKE, (self.held, tensor)


def lower_micro_step(
    runs: list[Run], shared: dict[str, Value], policy: Policy, *, accumulate: bool
) -> list[Segment]:
    """Forward of every run, then backward in reverse."""
    segments: list[Segment] = []
    cached: list[Segment] = []
    chain = Chain("hidden states between blocks", Role.ACTIVATIONS)
    second = Chain(
        "second result of the layer before", Role.ACTIVATIONS
    )  # until the model's loop has the next layer's
    releases = shared_releases(runs, shared, policy)
    units = [Unit(run.block, run.stage, policy) for run in runs]
    for index, run in enumerate(runs):
        block = run.block
        events: list[Event] = [
            (FREE, tensor) for tensor in releases.get((Phase.FORWARD, index), ())
        ]
        forward = units[index].forward()
        if block.input is not None:
            events.append(chain.take(block.input.tensor))
        events += forward.events
        if block.output is not None and not run.stage.publishes:
            events.append(chain.give(block.output.tensor, block.output))
        returned = block.returned if block.returned in forward.until_end else None
        until_end = [t for t in forward.until_end if t is not returned]
        if until_end:
            cached.append(
                Segment(
                    f"end of autocast, {run.name}",
                    Phase.FORWARD,
                    [(FREE, t) for t in until_end],
                    run.count,
                    run.stage.symbols,
                )
            )
        opening: list[Event] = []
        if second.held is not None and (returned is None or index == len(runs) - 1):
            opening.append((FREE, second.held))
            second.held = None
        embedded = held_entrance(runs, index, units[index], forward)
        if embedded is not None:
            releases.setdefault(
                (Phase.STEP, 0) if units[index].pipelined else (Phase.FORWARD, len(runs) - 1), []
            ).append(embedded)
        first_differs = (
            bool(opening) or embedded is not None or (returned is not None and second.held is None)
        )
        for repeat in [1, run.count - 1] if first_differs and run.count > 1 else [run.count]:
            closing = [] if returned is None else second.replace(returned)
            if embedded is not None:
                closing, embedded = [(ALLOC, embedded), *closing], None
            segments.append(
                Segment(
                    run.name, Phase.FORWARD, opening + events + closing, repeat, run.stage.symbols
                )
            )
            opening = []
    segments += cached
    if policy.stack.holds_last_step and policy.stack.quantized_keeps_input:
        held = [(run, tensors) for run in runs if (tensors := inputs_kept_by_nodes(run.block))]
        segments[:0] = [
            Segment(
                "graph of the step before",
                Phase.FORWARD,
                [(ALLOC, t) for t in tensors],
                run.count,
                run.stage.symbols,
            )
            for run, tensors in held
        ]
        segments += [
            Segment(
                "graph of the step before dropped",
                Phase.FORWARD,
                [(FREE, t) for t in tensors],
                run.count,
                run.stage.symbols,
            )
            for run, tensors in held
        ]
    segments += _lower_backward(runs, units, releases, accumulate=accumulate)
    ends: list[Event] = [(FREE, tensor) for tensor in releases.get((Phase.STEP, 0), ())]
    if chain.held is not None:
        ends.append((FREE, chain.held))  # the loss
    segments.append(Segment("end of the micro-step", Phase.BACKWARD, ends))
    return segments


def held_entrance(runs: list[Run], index: int, unit: Unit, forward: Forward) -> Tensor | None:
    """A stand-in for the embeddings that the model's own forward holds, made after the first layer
    where that keeps them not.

    On a later pipeline stage of torch it is the buffer that the hidden states were received in.
    """
    value = unit.block.input
    if (
        index != 1
        or (unit.pipelined and runs[0].name != STAGE_ENTRANCE)
        or value is None
        or (index == len(runs) - 1 and not unit.pipelined)
        or not unit.is_layer
        or unit.checkpointed
        or value.tensor in forward.kept
        or runs[0].stage.publishes
    ):
        return None
    return Tensor(
        "embeddings held by the model's forward",
        value.axes,
        value.dtype,
        Role.ACTIVATIONS,
        runs[0].block.name,
    )


def inputs_kept_by_nodes(block: Block) -> list[Tensor]:
    """Stand-ins for the inputs of quantized products that the nodes of a finished backward still
    hold (bitsandbytes' ctx.tensors)."""
    kept = {
        tensor: None
        for op in block.ops
        if op.inputs[1:] and op.inputs[1].weight is not None and op.inputs[1].weight.constants
        for tensor in op.saves
    }
    return [
        Tensor("input kept by the step before", t.axes, t.dtype, t.role, t.module) for t in kept
    ]


def shared_releases(
    runs: list[Run], shared: dict[str, Value], policy: Policy
) -> dict[tuple[Phase, int], list[Tensor]]:
    """Where each shared tensor dies: with the backward of the first run that keeps it, or as the
    head starts; inputs stay.

    A checkpointed run holds what it reads until it is recomputed, and makes anew what it made; a
    leaf with a gradient is held by its node. The model's own forward holds the rest until it
    returns.
    """
    found: dict[tuple[Phase, int], list[Tensor]] = {}
    loss = runs[-1].block.output
    backward = loss is not None and loss.requires_grad
    for name, value in shared.items():
        tensor = value.tensor
        keepers = [
            i
            for i, run in enumerate(runs)
            if tensor
            in (
                run.block.last_use
                if policy.recomputes and run.stage.checkpointed
                else saved_tensors(run.block)
            )
            and not (
                policy.recomputes and run.stage.checkpointed and tensor in made_again(run.block)
            )
        ]
        leaf = value.requires_grad and any(
            value in op.outputs and not op.inputs for run in runs for op in run.block.ops
        )
        if (
            leaf
            or tensor.source == BATCH
            or tensor in runs[-1].block.last_use
            or runs[-1].stage.checkpointed
        ):
            at = (Phase.STEP, 0)
        elif keepers and backward:
            at = (Phase.BACKWARD, keepers[0])
        else:
            closed = [i + 1 for i, run in enumerate(runs[:-1]) if name in run.stage.closes]
            at = (Phase.FORWARD, closed[-1] if closed else len(runs) - 1)
        found.setdefault(at, []).append(tensor)
    return found


def _lower_backward(
    runs: list[Run],
    units: list[Unit],
    releases: dict[tuple[Phase, int], list[Tensor]],
    *,
    accumulate: bool,
) -> list[Segment]:
    loss = runs[-1].block.output
    if loss is None or not loss.requires_grad:
        return []
    chain = Chain("gradient between blocks", Role.ACTIVATION_GRADIENTS)
    seed = Tensor("gradient of the loss", loss.axes, loss.dtype, Role.ACTIVATION_GRADIENTS)
    segments = [
        Segment("gradient of the loss", Phase.BACKWARD, [(ALLOC, seed), chain.give(seed, loss)])
    ]
    filled: dict[str, Tensor] = {}
    opened: set[int] = set()  # shared values that have a gradient waiting
    for index in range(len(runs) - 1, -1, -1):
        run = runs[index]
        block = run.block
        if (
            block.output is not None
            and block.output.requires_grad
            and (not run.stage.publishes or id(block.output) in opened)
        ):
            readers = {id(value) for value in shared_readers(block)}
            repeats = [1, run.count - 1] if readers - opened and run.count > 1 else [run.count]
            for repeat in repeats:
                events, backward = _backward_of(
                    run,
                    units[index],
                    chain,
                    accumulate=accumulate,
                    filled=filled,
                    opened=frozenset(opened),
                )
                if not accumulate:
                    block.gradients = backward.persistent
                segments.append(
                    Segment(run.name, Phase.BACKWARD, events, repeat, run.stage.symbols)
                )
                opened |= readers
                filled |= {
                    path: backward.made[path]
                    for w in block.weights
                    if (path := w.tied_to) and path in backward.made
                }
        elif any(
            id(out) in opened for op in block.ops for out in op.outputs
        ):  # only what it shares needs a gradient: a trained prefix
            engine = Backward(
                block,
                accumulate=accumulate,
                filled=filled,
                opened=frozenset(opened),
                hook=units[index].hook,
            )
            engine.run(None)
            if not accumulate:
                block.gradients = engine.persistent
            segments.append(
                Segment(run.name, Phase.BACKWARD, engine.events, run.count, run.stage.symbols)
            )
        if (Phase.BACKWARD, index) in releases:
            segments.append(_release(releases, index))
    return segments


def shared_readers(block: Block) -> list[Value]:
    """The shared values needing a gradient that a block reads and did not make."""
    made = {id(out) for op in block.ops for out in op.outputs}
    read = {id(value) for op in block.ops for value in op.inputs}
    return [
        value
        for value in block.externals
        if value.requires_grad and id(value) in read and id(value) not in made
    ]


def _backward_of(
    run: Run,
    unit: Unit,
    chain: Chain,
    *,
    accumulate: bool,
    filled: dict[str, Tensor],
    opened: frozenset[int],
) -> tuple[list[Event], Backward]:
    """One block's backward: its events, and the engine that made them."""
    block = run.block
    assert block.output is not None
    incoming = Tensor(
        "incoming gradient",
        block.output.axes,
        block.output.dtype,
        Role.ACTIVATION_GRADIENTS,
        block.name,
    )
    events: list[Event] = [
        (
            (TAKE, (block.output.shared_gradient(), incoming))
            if run.stage.publishes
            else chain.take(incoming)
        )
    ]
    backward, result = unit.backward(incoming, accumulate=accumulate, filled=filled, opened=opened)
    events += backward.events
    if result is not None and block.input is not None:
        events.append(chain.give(result, block.input))
    return events, backward


def _release(releases: dict[tuple[Phase, int], list[Tensor]], index: int) -> Segment:
    return Segment(
        "shared tensors released",
        Phase.BACKWARD,
        [(FREE, tensor) for tensor in releases[Phase.BACKWARD, index]],
    )
