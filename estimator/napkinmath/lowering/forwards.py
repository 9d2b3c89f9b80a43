"""Forwards without gradients in a step: of the policy's own weights, or of another model's with its
loading and its placement."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.config.train_config import RecomputeConfig, RecomputeKind
from napkinmath.config.workload_config import Workload
from napkinmath.ir import symbols as axes
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Role, Tensor
from napkinmath.ir.step import FORWARD_ENDS, Run, Segment, tell_apart
from napkinmath.lowering.data_parallel.forward_only import gathered
from napkinmath.lowering.held_outputs import TAUGHT_LOGITS, TAUGHT_STATES
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.parallel.pipeline import made_by, stage_chunks
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.rank_record import record_model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.catalog.kernels import KernelSet
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec

    Symbols = tuple[tuple[str, Size], ...]


class ForwardPolicy(Policy):
    """The same model where nothing is trained and adapters are switched off: a reference, a
    teacher, an evaluation. Virtual tokens stay: they are inputs, not a change of the weights."""

    trains_adapters = False

    def is_trained(self, path: str, kind: str) -> bool:
        return False

    def targets(self, path: str, kind: str) -> bool:
        return False

    def adapts_parameter(self, names: tuple[str, ...], path: str) -> int:
        return 0

    @property
    def inputs_require_grad(self) -> bool:
        return False


class NoGradForward:
    """One forward without gradients. `runs` are those that recorded it; `own`: it computes with the
    weights of the policy, which its engine gathers as for any other forward."""

    __slots__ = (
        "ahead",
        "behind",
        "name",
        "own",
        "policy",
        "runs",
        "segments",
        "spec",
        "thresholds",
    )

    def __init__(
        self,
        spec: ModelSpec,
        policy: Policy,
        config: TrainConfig,
        *,
        own: bool,
        pipeline_rank: int = 0,
        patch: KernelSet | None = None,
    ) -> None:
        self.ahead: list[Segment] = []
        """Brings its weights, where they lie elsewhere between uses; `behind` drops them."""
        self.behind: list[Segment] = []
        pipelined = config.parallel.pipeline_parallel_size > 1
        recompute = config.recompute if own and policy.shards else RecomputeConfig()
        checkpoints = config.offload.checkpoints and recompute.kind is not RecomputeKind.NONE
        still = config.replace(
            workload=Workload(),
            loss=policy.config.step_loss,
            recompute=recompute,
            offload=config.offload.replace(checkpoints=checkpoints),
            training_mode=False,
            gradient_accumulation_steps=config.gradient_accumulation_steps if pipelined else 1,
        )
        self.policy = ForwardPolicy(
            still,
            policy.stack,
            sdpa_choice=policy.sdpa_choice,
            cudnn_heads=policy.cudnn_heads,
            patch=patch,
            processors=policy.processors,
        )
        found = record_model(spec, self.policy)
        chunks = [(found.runs, found.shared)]
        if pipelined:
            held = stage_chunks(found, self.policy, pipeline_rank)
            chunks = [(runs, made_by(runs, found.shared)) for runs in held]
        self.runs = [run for runs, _ in chunks for run in runs]
        tell_apart(self.runs)
        self.spec, self.own, self.name = found.spec, own, ""
        self.thresholds = found.thresholds
        self.segments = [
            segment
            for runs, shared in chunks
            for segment in lower_micro_step(runs, shared, self.policy, accumulate=False)
        ]
        for segment in self.segments:
            segment.phase = Phase.FORWARD

    def called(self, name: str) -> NoGradForward:
        """The same forward under a name."""
        other: NoGradForward = object.__new__(NoGradForward)
        for field in NoGradForward.__slots__:
            setattr(other, field, getattr(self, field))
        other.name = name
        return other

    def on(self, runs: list[Run]) -> list[Segment]:
        """Its segments in a step that has these runs: under their names where it is the policy's
        own, else under its own sizes."""
        if self.own:
            return under_runs(self, runs)
        return self._named([*self.ahead, *self.segments, *self.behind])

    def passes(
        self, runs: list[Run], policy: Policy, times: int, sizes: Symbols = ()
    ) -> list[tuple[int, list[Segment]]]:
        """The same over so many micro-batches in a row, or batches of other `sizes`: (times,
        segments)."""
        if self.own:
            whole = alone(self, runs, policy, sizes, whole=False, phase=Phase.FORWARD)
            return [(times, whole)]
        rows = [(1, self.ahead), (times, self.segments), (1, self.behind)]
        return [(count, self._named(row, sizes)) for count, row in rows if row]

    def _named(self, segments: list[Segment], sizes: Symbols = ()) -> list[Segment]:
        own = self.spec.symbols
        return [
            Segment(
                f"{self.name}: {s.name}", s.phase, s.events, s.repeat, (*own, *s.symbols, *sizes)
            )
            for s in segments
        ]


def under_runs(forward: NoGradForward, runs: list[Run]) -> list[Segment]:
    """The segments of a second forward of a model, cut where the step's runs of it are: a model that
    trains may have a layer apart."""
    starts: dict[str, int] = {}
    position = 0
    for run in forward.runs:
        starts[run.name] = position
        position += run.count
    spans: list[tuple[int, str]] = []
    end = 0
    for run in runs:
        end += run.count
        spans.append((end, run.name))
    same = end == position  # else checkpoints group the layers of one that trains
    assert same or not forward.policy.shards, "units are found by the layers that they have"
    found: list[Segment] = []
    for s in forward.segments:
        if s.run not in starts or not same:
            name = f"{forward.name}: {s.name}"
            found.append(Segment(name, s.phase, s.events, s.repeat, s.symbols))
            continue
        left = s.repeat
        while left:
            until, run = next((end, name) for end, name in spans if starts[s.run] < end)
            times = min(left, until - starts[s.run])
            name = f"{forward.name}: {run}"
            found.append(Segment(name, s.phase, s.events, times, s.symbols, run))
            starts[s.run] += times
            left -= times
    return found


class Beside:
    """Forwards without gradients in each micro-step: `before` the policy's, or `held` between its
    forward and its backward; `loaded` brings their models."""

    __slots__ = (
        "before",
        "first",
        "generates",
        "held",
        "in_batches",
        "keeps_logits",
        "loaded",
        "thresholds",
    )

    def __init__(self, *, in_batches: bool = False, generates: bool = False) -> None:
        self.generates = generates
        """The policy generates by itself before its first micro-batch."""
        self.in_batches = in_batches
        """They take rollouts in batches of their own, before the first micro-batch."""
        self.first: list[NoGradForward] = []
        """Over all micro-batches before the policy's first one."""
        self.before: list[NoGradForward] = []
        self.held: list[NoGradForward] = []
        self.keeps_logits = False
        """The policy's logits wait, in fp32, for those that are held."""
        self.loaded: list[Segment] = []
        self.thresholds: list[dict[str, set[int]]] = []

    @property
    def runs_first(self) -> bool:
        """Whether the trained model's own layers run forward before its first micro-batch."""
        return self.generates or any(forward.own for forward in self.first)

    def add(self, forwards: list[NoGradForward], *, holds: bool) -> None:
        """More forwards, in their order."""
        (self.held if holds else self.before).extend(forwards)
        self.thresholds += [forward.thresholds for forward in forwards]

    def around(self, segments: list[Segment], runs: list[Run], *, parts: bool) -> list[Segment]:
        """A micro-step with these forwards in it; a teacher's logits are there when the student's
        loss is computed. `parts`: what of its last run is the student's own forward comes first
        (trl 1.16 gkd_trainer.py compute_loss)."""
        heads = (
            i
            for i, segment in enumerate(segments)
            if segment.name == "DistillationHead" or segment.phase is Phase.BACKWARD
        )
        first = next(heads, len(segments))
        ends = Segment(FORWARD_ENDS, Phase.FORWARD, [])
        opening = [s for forward in self.before for s in (*forward.on(runs), ends)]
        held = [s for forward in self.held for s in (ends, *forward.on(runs))]
        held = self._with_logits(held, runs)
        own, rest = _until_taught(segments[first:]) if parts else ([], segments[first:])
        return [*opening, *segments[:first], *own, *held, *rest]

    def _with_logits(self, held: list[Segment], runs: list[Run]) -> list[Segment]:
        """The same, with the policy's logits in fp32 where its trainer keeps them meanwhile."""
        if not (held and self.keeps_logits):
            return held
        kept = Tensor("logits, still bound", (axes.b, axes.s, axes.v), FP32, Role.LOGITS)
        name, symbols = "trainer's variables", runs[-1].stage.symbols
        bound, left = (
            Segment(name, Phase.FORWARD, [(action, kept)], 1, symbols) for action in (ALLOC, FREE)
        )
        return [bound, *held, left]

    def bring_once(self) -> None:
        """Models that lie on the host between steps come for all micro-batches at once: rollouts
        are scored before any is trained on (trl 1.16 grpo_trainer.py
        _generate_and_score_completions; verl 0.5 trainer/ppo/ray_trainer.py compute_ref_log_prob;
        NeMo-RL 0.4 algorithms/grpo.py get_reference_policy_logprobs)."""
        self.first = [f for f in self.before if f.ahead or f.behind or self.in_batches]
        self.before = [forward for forward in self.before if forward not in self.first]

    def passes(
        self, runs: list[Run], policy: Policy, times: int
    ) -> list[tuple[int, list[Segment]]]:
        """In a pipeline: each forward over all micro-batches, before the first that is trained on.

        Sources: verl 0.5 workers/actor/megatron_actor.py compute_log_prob (forward_only); NeMo-RL
        0.4 models/policy/megatron_policy_worker.py get_reference_policy_logprobs; slime
        backends/megatron_utils/actor.py compute_log_prob.
        """
        forwards = [*self.first, *self.before, *self.held]
        return [row for forward in forwards for row in forward.passes(runs, policy, times)]


def _until_taught(segments: list[Segment]) -> tuple[list[Segment], list[Segment]]:
    """The segments, the first one parted where it takes what a teacher made."""
    for at, (_, what) in enumerate(segments[0].events if segments else ()):
        if isinstance(what, Tensor) and what.name in (TAUGHT_LOGITS, TAUGHT_STATES):
            events = segments[0].events
            own, loss = (segments[0].copy(events=e, repeat=1) for e in (events[:at], events[at:]))
            return [own], [loss, *segments[1:]]
    return [], segments


def alone(
    forward: NoGradForward,
    runs: list[Run],
    policy: Policy,
    more: Symbols,
    *,
    whole: bool,
    phase: Phase,
) -> list[Segment]:
    """A forward of the policy's own weights outside its micro-steps, in a `phase` and under other
    sizes (`more`); `whole`: they are gathered already."""
    sizes, found = dict(forward.spec.symbols), under_runs(forward, runs)
    if not whole:
        found = gathered(found, runs, policy, sizes)
    for segment in found:
        if not segment.name.startswith(forward.name):  # what an engine made beside the runs
            segment.name = f"{forward.name}: {segment.name}"
        segment.phase = phase
        segment.symbols = (*forward.spec.symbols, *segment.symbols, *more)
    return found
