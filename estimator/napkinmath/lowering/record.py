"""Recording: every distinct block of a model once, on a tape of its own."""

from __future__ import annotations

from napkinmath.ir.costs import Dispatch
from napkinmath.ir.ledger import Block, Role, Tensor, Value, Weight
from napkinmath.ir.model_spec import SECOND_STREAM
from napkinmath.ir.step import Run
from napkinmath.ir.tape import Tape
from napkinmath.lowering.recompute import arrange
from napkinmath.lowering.unconverted import with_last_linear_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec, Stage
    from napkinmath.lowering.policy import Policy


class Recording:
    """What recording a model under a policy found.

    `shared` are the values that every block may read. `thresholds` are the values of b and s at
    which the library runs other operations: between two of them one record holds for every size.
    `decoded` is the size in bytes of the buffer that patched operations decode weights into.
    """

    __slots__ = ("decoded", "runs", "shared", "spec", "thresholds")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.runs: list[Run] = []
        self.shared: dict[str, Value] = {}
        self.thresholds: dict[str, set[int]] = {}
        self.decoded = 0

    def note(self, tape: Tape) -> None:
        """Takes over what a tape has found beside its block."""
        self.decoded = max(self.decoded, tape.decoded)
        for symbol, values in tape.thresholds.items():
            self.thresholds.setdefault(symbol, set()).update(values)

    def copied(self) -> Recording:
        """The same with runs and blocks of its own, for lowering marks them."""
        found = Recording(self.spec)
        own = {id(run.block): run.block.copy() for run in self.runs}
        found.runs = [Run(own[id(run.block)], run.count, run.stage, run.first) for run in self.runs]
        found.shared, found.thresholds = dict(self.shared), self.thresholds
        found.decoded = self.decoded
        return found


class RankModel:
    """What one rank runs of a recorded model; `chunks` are its stages of a pipeline, none where it
    has the whole model."""

    __slots__ = ("chunks", "pipeline_rank", "runs", "shared", "spec")

    def __init__(
        self, recording: Recording, runs: list[Run], chunks: list[list[Run]], pipeline_rank: int
    ) -> None:
        self.spec, self.shared = recording.spec, recording.shared
        self.runs, self.chunks, self.pipeline_rank = runs, chunks, pipeline_rank

    @property
    def sizes(self) -> dict[str, int]:
        """The model's own symbols."""
        return dict(self.spec.symbols)


def record_runs(spec: ModelSpec, policy: Policy) -> Recording:
    """Records the whole model; with quantized weights once more where the library leaves its last
    linear whole."""
    found = record_stages(spec, policy)
    if policy.format is not None:
        marked = with_last_linear_whole(spec, found.runs, policy)
        if marked is not None:
            found = record_stages(marked, policy)
            found.spec = spec
    return found


def record_stages(spec: ModelSpec, policy: Policy) -> Recording:
    """Records the stages in order; a copy of a part is recorded anew only where its input's type or
    need of a gradient differs."""
    recorder = _Recorder(spec, policy)
    for stage in arrange(spec, policy.config.recompute):
        recorder.add(stage)
    return recorder.found


class _Recorder:
    """Goes through the stages: `incoming` is what the last one handed on, `stream` what it handed
    on beside."""

    def __init__(self, spec: ModelSpec, policy: Policy) -> None:
        self.policy = policy
        self.found = Recording(spec)
        self.incoming: Value | None = None
        self.stream: Value | None = None
        self.idle_incoming: Value | None = None  # what a tower that does not run would hand on
        self.blocks: dict[tuple[object, ...], Block] = {}
        self.idle_shared: dict[str, Value] = {}  # what idle blocks would have shared
        self.numbers: dict[str, int] = {}  # layers so far at each path

    def add(self, stage: Stage) -> None:
        """The runs of one stage, and what it publishes."""
        images = bool(self.policy.config.batch.images)
        if stage.modality == "idle" or (stage.modality in ("image", "across") and not images):
            self._add_idle(stage)
            return
        self._add_running(stage.replace(publishes="") if stage.waits and not images else stage)
        if stage.publishes and self.incoming is not None and (images or not stage.waits):
            self.found.shared[stage.publishes] = self.incoming
            self.incoming = None

    def _add_running(self, stage: Stage) -> None:
        done, before = 0, self.numbers.get(stage.path, 0) if stage.checkpointed else 0
        while done < stage.count:
            block = self._block(stage, self.found.shared)
            steady = _alike(self.incoming, block.output) and not stage.publishes
            steady = steady and (self.stream is None or _alike(self.stream, block.stream_out))
            count = stage.count - done if steady else 1
            self.found.runs.append(Run(block, count, stage, before + done))
            done += count
            self.numbers[stage.path] = before + done
            self.incoming, self.stream = block.output, block.stream_out

    def _add_idle(self, stage: Stage) -> None:
        text = not self.policy.config.batch.images
        # of a tower, past which the text's states go; without one, an idle layer reads the text's
        of_tower = stage.modality == "image" or (
            stage.modality == "idle" and self.idle_incoming is not None
        )
        if text and of_tower:
            handed_on, self.incoming = self.incoming, self.idle_incoming
            self._note_idle(stage)
            self.idle_incoming, self.incoming = self.incoming, handed_on
        else:
            self._note_idle(stage)

    def _note_idle(self, stage: Stage) -> None:
        block = self._block(stage, {**self.found.shared, **self.idle_shared})
        still = stage.replace(checkpointed=False, publishes="")
        self.found.runs.append(Run(idle(block), stage.count, still, 0))
        if stage.modality == "image":
            self.incoming = block.output

    def _block(self, stage: Stage, shared: dict[str, Value]) -> Block:
        """The block of one copy, which may publish into `shared`."""
        x, y = self.incoming, self.stream
        key = (
            stage.replace(count=1),
            x and (x.axes, x.dtype, x.requires_grad),
            y and (y.axes, y.dtype, y.requires_grad),
            tuple(self.found.shared.items()),
        )
        if key not in self.blocks:
            self.blocks[key] = self._record(stage, shared)
            self.idle_shared = {n: v for n, v in shared.items() if n not in self.found.shared}
        return self.blocks[key]

    def _record(self, stage: Stage, shared: dict[str, Value]) -> Block:
        """One copy of a stage's part on a fresh tape."""
        own = {k: size for k, size in stage.symbols if isinstance(size, int)}
        tape = Tape(self.policy, {**dict(self.found.spec.symbols), **own})
        if stage.path:
            tape.module = stage.path if stage.count == 1 else f"{stage.path}.*"
        if self.policy.config.compile and stage.checkpointed:
            from napkinmath.lowering.uncompiled import reads_positions

            tape.compiles = not reads_positions(tape, self.policy, shared)
        x, stream = (
            _entering(name, given, tape.module)
            for name, given in (("hidden states", self.incoming), (SECOND_STREAM, self.stream))
        )
        before = set(shared)
        if stream is not None:
            shared[SECOND_STREAM] = stream
        output = stage.part.record(tape, x, shared)
        handed_on = shared.pop(SECOND_STREAM, None)
        asked = x is None and stage.part.output_needs_grad(self.policy)
        if asked and output is not None and output.dtype.floating:
            output.requires_grad = True
        published = [value for name, value in shared.items() if name not in before]
        externals = published + [value for name, value in shared.items() if name in before]
        externals += [value for value in (handed_on, stream) if value is not None]
        self.found.note(tape)
        block = tape.block(stage.path, x, output, externals)
        block.stream_in, block.stream_out = stream, handed_on
        if tape.compiles and stage.checkpointed:
            from napkinmath.lowering.compiled import fuse_chains

            fuse_chains(block)
        elif stage.checkpointed:
            _add_python(block, self.policy)
        return block


def _entering(name: str, given: Value | None, module: str) -> Value | None:
    """A block's own name for what it is handed."""
    if given is None:
        return None
    states = Tensor(name, given.axes, given.dtype, Role.ACTIVATIONS, module)
    return Value(states, given.axes, given.dtype, given.requires_grad)


def _add_python(block: Block, policy: Policy) -> None:
    """The host's time in a layer's modules, before its first operation and in the backward of the
    last one that has one."""
    forward, backward = policy.stack.loop.layer_dispatches
    if not forward:
        return
    block.ops[0].costs = (*block.ops[0].costs, Dispatch(forward))
    last = next((op for op in reversed(block.ops) if op.gradients), None)
    if last is not None:
        last.backward_costs = (*last.backward_costs, Dispatch(backward))


def _alike(x: Value | None, y: Value | None) -> bool:
    """Whether a further copy reads what this one read; a sequence may come whole into the first
    layer that splits it."""
    if x is None or y is None:
        return False
    return y.dtype is x.dtype and y.axes == x.axes and y.requires_grad == x.requires_grad


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
