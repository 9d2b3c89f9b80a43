"""Step: the intermediate form of one training step, plain data: recorded blocks, and segments of
events by phase."""

from __future__ import annotations

from napkinmath.ir.tape import REMAINDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Block, Event, Phase, Weight
    from napkinmath.ir.model_spec import ModelSpec, Stage
    from napkinmath.ir.recording import ChosenOptimizer, RecordingPolicy


STAGE_ENTRANCE = "stage entrance"  # path of what a later pipeline stage begins with


END_OF_STEP = "end of the micro-step"
FORWARD_ENDS = "end of the model's forward"  # where another model runs before the backward


class Segment:
    """`repeat` times the same events: a layer's forward, its backward, one block's optimizer
    step.

    `run` names the run whose weights it computes with, which an engine gathers: its own name, but
    for a second forward of the same model. `empties`: the allocator's cache is emptied after it.
    """

    __slots__ = ("empties", "events", "name", "phase", "repeat", "run", "symbols")

    def __init__(
        self,
        name: str,
        phase: Phase,
        events: list[Event],
        repeat: int = 1,
        symbols: tuple[tuple[str, Size], ...] = (),
        run: str = "",
    ) -> None:
        self.name, self.phase, self.events = name, phase, events
        self.repeat, self.symbols, self.run = repeat, symbols, run or name
        self.empties = False

    def copy(self, *, events: list[Event] | None = None, repeat: int) -> Segment:
        """The same segment with other events, or repeated otherwise."""
        kept = self.events if events is None else events
        found = Segment(self.name, self.phase, kept, repeat, self.symbols, self.run)
        found.empties = self.empties
        return found


class Run:
    """A recorded block, repeated `count` times in a row, the first copy at index `first` of its
    stage."""

    __slots__ = ("block", "count", "first", "label", "stage")

    def __init__(self, block: Block, count: int, stage: Stage, first: int) -> None:
        self.block, self.count, self.stage, self.first = block, count, stage, first
        self.label = ""  # its name where several runs would have the same

    @property
    def trained(self) -> list[Weight]:
        """The weights of the block that get a gradient, tied ones once."""
        return [w for w in self.block.weights if w.trainable and not w.tied_to and not w.buffer]

    def segment(self, name: str, phase: Phase, events: list[Event]) -> Segment:
        """Events that each copy of the block has."""
        return Segment(name, phase, events, self.count, self.stage.symbols)

    @property
    def name(self) -> str:
        """'model.layers.0..31', or the path of a single block."""
        if self.label:
            return self.label
        return self.path if self.stage.count == 1 else self.numbered

    @property
    def path(self) -> str:
        """The stage's path in the model; the part's class where it has none."""
        return self.stage.path or type(self.stage.part).__name__

    @property
    def numbered(self) -> str:
        """The path with the numbers of its copies."""
        return (
            f"{self.path}.{self.first}"
            if self.count == 1
            else f"{self.path}.{self.first}..{self.first + self.count - 1}"
        )


def segments(
    label: str, phase: Phase, owners: list[Run], events_of: Callable[[Run], list[Event]]
) -> list[Segment]:
    """One segment a run of equal blocks, repeated for each of them; none without events."""
    return [
        run.segment(f"{label} of {run.name}", phase, events)
        for run in owners
        if (events := events_of(run))
    ]


def by_block(events_of: Callable[[Run], list[Event]]) -> Callable[[Run], list[Event]]:
    """The same, asked once for all runs of one block: they have one list of events, so that what
    comes later (numbering, prices, profiles) is done once for it too."""
    known: dict[int, list[Event]] = {}

    def found(run: Run) -> list[Event]:
        key = id(run.block)
        if key not in known:
            known[key] = events_of(run)
        return known[key]

    return found


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


class Update:
    """What happens around the optimizer, as segments: masters at load, clipping, states (first step
    only), the update, zero_grad."""

    __slots__ = ("clip", "load", "optimizer", "states", "work", "zero")

    def __init__(
        self,
        optimizer: ChosenOptimizer,
        *,
        load: list[Segment],
        clip: list[Segment],
        states: list[Segment],
        work: list[Segment],
        zero: list[Segment],
    ) -> None:
        self.optimizer, self.load, self.clip = optimizer, load, clip
        self.states, self.work, self.zero = states, work, zero


class Step:
    """The intermediate form of one training step: blocks, and segments of events by phase.

    `workspaces` are made before the first product; `thresholds` are the values of b and s between
    which the record holds for every size.
    """

    __slots__ = (
        "load",
        "micro_steps",
        "policy",
        "runs",
        "save",
        "spec",
        "symbols",
        "thresholds",
        "update",
        "workspaces",
    )

    def __init__(
        self,
        spec: ModelSpec,
        policy: RecordingPolicy,
        runs: list[Run],
        load: list[Segment],
        micro_steps: list[tuple[int, list[Segment]]],
        update: Update,
        save: list[Segment],
    ) -> None:
        self.spec, self.policy, self.runs = spec, policy, runs
        self.load, self.micro_steps, self.update, self.save = load, micro_steps, update, save
        self.workspaces: list[Segment] = []
        self.thresholds: dict[str, set[int]] = {}
        config, length = policy.config, policy.sequence_length
        self.symbols: dict[str, Size] = {
            **dict(spec.symbols),
            "b": config.micro_batch_size,
            "s": length,
            "st": config.batch.target_length or length,
        }

    def note(self, thresholds: dict[str, set[int]]) -> None:
        """Takes over the thresholds of another record of the same step."""
        for name, values in thresholds.items():
            self.thresholds.setdefault(name, set()).update(values)


def side(thresholds: Mapping[str, Iterable[int]], sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where b and s (ints, or arrays) lie among the thresholds: a record holds for sizes on the
    same side of each, with the same remainders."""
    return tuple(
        sizes["s"] % value if name == REMAINDER else sizes[name] >= value
        for name in sorted(thresholds)
        for value in sorted(thresholds[name])
    )


def reads_tokens(step: Step) -> bool:
    """Whether the model reads token ids or samples of a sound; a vision encoder's sequence is its
    image's and no choice of the user."""
    if step.policy.config.parallel.pipeline_parallel_size > 1:
        # only models of language are cut into stages, and only the first stage reads the ids
        return True
    read = ("input ids", "samples")
    return any(op.name in read for run in step.runs for op in run.block.ops)
