"""The step of a workload: pairs, references, teachers, critics, rollouts, and
evaluation or generation in the middle.

Sources: trl 0.2x to 1.x dpo_trainer.py (concatenated_forward, then compute_ref_log_probs under
no_grad), gkd_trainer.py (compute_loss), reward_trainer.py, grpo_trainer.py
(_generate_and_score_completions), ppo_trainer.py; transformers 5.23 trainer.py evaluation_loop,
cache_utils.py DynamicLayer.update. A policy's own loss is priced as cross-entropy over the same
logits; an evaluation and a reference leave out the adapters' own products.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Size, ceil_div, minimum, product, symbol
from napkinmath.config.train_config import Loss, Precision, RecomputeConfig, TrainConfig
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work, allocs, frees
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.ir.step import Run, Segment, Step
from napkinmath.lowering.lifecycle import load_segments
from napkinmath.lowering.micro_step import lower_micro_step
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.record import record_runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import Part

    Symbols = tuple[tuple[str, Size], ...]

_b, _s, _v, _dh = (symbol(name) for name in ("b", "s", "v", "dh"))
_TEACHING = {
    same: same for same in (Precision.BF16, Precision.FP16, Precision.FP32, Precision.TF32)
}  # a teacher is loaded as it runs
_LAUNCHES = 12  # kernels of one layer's forward for one token


class ForwardPolicy(Policy):
    """The same model where nothing is trained and adapters are switched off: a reference, a
    teacher, an evaluation."""

    def is_trained(self, path: str) -> bool:
        return False

    def targets(self, path: str, kind: str) -> bool:
        return False

    def adapts_parameter(self, names: tuple[str, ...]) -> bool:
        return False

    @property
    def inputs_require_grad(self) -> bool:
        return False


def trained_models(spec: ModelSpec, config: TrainConfig) -> list[ModelSpec]:
    """What the workload trains: the model with the head that it asks for, and a critic beside it.

    Raises InputError where it is spread over several GPUs or the model has no such head.
    """
    kind = config.workload.kind
    if config.parallel.world_size > 1:
        raise InputError(f"workload {kind.value} is priced on one GPU; leave --gpus out")
    if kind is WorkloadKind.REWARD:
        return [scored(spec)]
    if kind is WorkloadKind.DISTILL:
        return [taught(spec, config)]
    return [spec, scored(spec)] if kind is WorkloadKind.PPO else [spec]


def surround(step: Step, spec: ModelSpec, own: ModelSpec, policy: Policy) -> None:
    """Adds to the step of what is trained (`own`) what the workload does before, within and after
    it."""
    config, workload = policy.config, policy.config.workload
    before, after = _beside(spec, policy, step)
    step.micro_steps = [
        _surrounded(repeat, segments, before, after) for repeat, segments in step.micro_steps
    ]
    if workload.rolls_out:
        repeat, segments = step.micro_steps[0]
        # generated at once for all micro-steps: trl grpo_config.py steps_per_generation
        rows = _b * config.gradient_accumulation_steps
        tokens = workload.completion_tokens or ceil_div(_s, 2)
        prompt = _s - tokens + 1 - minimum(_s - tokens, 1)  # one token at least
        prefill = _prefill(step, spec, policy, "rollout", (("b", rows), ("s", prompt)))
        rollout = _generation(step.runs, policy, tokens, "rollout", rows, prefill, timed=True)
        step.micro_steps[:1] = [
            (1, rollout + segments),
            *([(repeat - 1, segments)] if repeat > 1 else []),
        ]
    step.save = _in_the_middle(own, policy, step) + step.save


def scored(spec: ModelSpec) -> ModelSpec:
    """The same model with a score for its head."""
    return _ending_in(spec, spec.stages[-1].part.scoring())


def taught(spec: ModelSpec, config: TrainConfig) -> ModelSpec:
    """The same model whose loss is its divergence from a teacher; a chunked or fused loss holds no
    logits, a divergence's no more than another's."""
    return _ending_in(spec, spec.stages[-1].part.student()) if config.loss is Loss.HF else spec


def without_loss(spec: ModelSpec, config: TrainConfig) -> ModelSpec:
    """The same model whose logits leave it; as it is where the loss never holds them all."""
    return _ending_in(spec, spec.stages[-1].part.teacher()) if config.loss is Loss.HF else spec


def _ending_in(spec: ModelSpec, part: Part | None) -> ModelSpec:
    if part is None:
        raise InputError(
            f"{shown(spec.name)} ends in no causal language-model head that another could replace;"
            " use a decoder"
        )
    return spec.replace(stages=(*spec.stages[:-1], spec.stages[-1].replace(part=part)))


def join(step: Step, other: Step) -> None:
    """A second model trained in the same step: its micro-step after the first's, its update beside
    it."""
    step.load += other.load
    step.runs = step.runs + other.runs
    step.micro_steps = [
        (repeat, mine + theirs)
        for (repeat, mine), (_, theirs) in zip(step.micro_steps, other.micro_steps, strict=True)
    ]
    for part in ("clip", "states", "work", "zero"):
        setattr(step.update, part, getattr(step.update, part) + getattr(other.update, part))
    step.save = step.save + other.save
    _note(step, other.thresholds)


def _note(step: Step, thresholds: dict[str, set[int]]) -> None:
    for name, values in thresholds.items():
        step.thresholds.setdefault(name, set()).update(values)


# ---------------------------------------------------------------- forwards of other models


def _beside(spec: ModelSpec, policy: Policy, step: Step) -> tuple[list[Segment], list[Segment]]:
    """Forwards without gradients in each micro-step: (before the policy's forward, between its
    forward and its backward)."""
    config, workload = policy.config, policy.config.workload
    before: list[Segment] = []
    after: list[Segment] = []
    referring = workload.kind in (WorkloadKind.DPO, WorkloadKind.GRPO, WorkloadKind.PPO)
    if referring and workload.reference:
        loaded, forward = _forward(step, spec, policy, config, "reference")
        if config.adapter is None:
            step.load += loaded
        (after if workload.kind is WorkloadKind.DPO else before).extend(forward)
    if workload.teacher:
        (after if workload.kind is WorkloadKind.DISTILL else before).extend(_taught(policy, step))
    return before, after


def _taught(policy: Policy, step: Step) -> list[Segment]:
    """The forward of a teacher, or of a reward model; the step loads it."""
    config, teacher = policy.config, policy.teacher
    assert teacher is not None  # read by whoever made the policy
    precision = _TEACHING.get(config.precision, Precision.BF16_AUTOCAST)
    frozen = config.replace(adapter=None, quantization=None, precision=precision)
    if config.workload.kind is WorkloadKind.DISTILL:
        name, model = "teacher", without_loss(teacher, config)
    else:
        name, model = "reward model", scored(teacher)
    loaded, forward = _forward(step, model, policy, frozen, name)
    step.load += loaded
    return forward


def _forward(
    step: Step,
    spec: ModelSpec,
    policy: Policy,
    config: TrainConfig,
    name: str,
    *,
    phase: Phase = Phase.FORWARD,
    more: Symbols = (),
) -> tuple[list[Segment], list[Segment]]:
    """(loading, forward without gradients) of a model, under its own sizes; the step notes the
    thresholds of its record."""
    still = config.replace(
        workload=Workload(),
        recompute=RecomputeConfig(),
        training_mode=False,
        gradient_accumulation_steps=1,
    )
    quiet = ForwardPolicy(still, policy.stack, sdpa_choice=policy.sdpa_choice)
    found = record_runs(spec, quiet)
    _note(step, found.thresholds)
    forward = lower_micro_step(found.runs, found.shared, quiet, accumulate=False)
    loaded = load_segments(found.runs, quiet)
    for segment in (*loaded, *forward):
        segment.name = f"{name}: {segment.name}"
        segment.symbols = (*spec.symbols, *segment.symbols, *more)
    for segment in forward:
        segment.phase = phase
    return loaded, forward


def _surrounded(
    repeat: int, segments: list[Segment], before: list[Segment], after: list[Segment]
) -> tuple[int, list[Segment]]:
    """A micro-step with forwards before it and between its forward and its backward; a teacher's
    logits are there when the student's loss is computed."""
    heads = (
        i
        for i, segment in enumerate(segments)
        if segment.name == "DistillationHead" or segment.phase is Phase.BACKWARD
    )
    first = next(heads, len(segments))
    return repeat, [*before, *segments[:first], *after, *segments[first:]]


# ---------------------------------------------------------------- generation and evaluation


def _in_the_middle(own: ModelSpec, policy: Policy, step: Step) -> list[Segment]:
    """Evaluation and generation after an optimizer step, the states in place; they take no part in
    the step's time."""
    workload = policy.config.workload
    found: list[Segment] = []
    if workload.eval_batch:
        rows: Symbols = (("b", workload.eval_batch),)
        how, name = policy.config, "evaluation"
        forward = _forward(step, own, policy, how, name, phase=Phase.EVALUATE, more=rows)[1]
        found += _untimed(forward)
    if workload.generate_tokens:
        prefill = _untimed(_prefill(step, own, policy, "generation", ()))
        found += _generation(
            step.runs, policy, workload.generate_tokens, "generation", _b, prefill, timed=False
        )
    return found


def _untimed(segments: list[Segment]) -> list[Segment]:
    for segment in segments:
        segment.events = [event for event in segment.events if event[0] != RUN]
    return segments


def _prefill(
    step: Step, spec: ModelSpec, policy: Policy, name: str, sizes: Symbols
) -> list[Segment]:
    """The prompts' forward: transformers' generate keeps the last position's logits alone, so the
    head is next to nothing."""
    shown_last = spec if spec.stages[-1].part.scoring() is None else scored(spec)
    label = f"{name}: prompt"
    return _forward(
        step, shown_last, policy, policy.config, label, phase=Phase.EVALUATE, more=sizes
    )[1]


def _generation(
    runs: Sequence[Run],
    policy: Policy,
    tokens: Size,
    name: str,
    rows: Size,
    prefill: list[Segment],
    *,
    timed: bool,
) -> list[Segment]:
    """A key/value cache of `rows` sequences, their prompts' forward, then one token after the
    other: every weight is read for each.

    A layer's cache grows by concatenation, so one layer's is there twice. Raises InputError for
    layers that cache something else.
    """
    length = _s if name == "rollout" else _s + tokens
    opened: list[Segment] = []
    closed: list[Segment] = []
    decoded: list[Segment] = []
    for run in runs:
        read: Size = 0
        for weight in run.block.weights:
            read = read + weight.tensor.nbytes
        events: list[Event] = []
        if run.stage.checkpointed:
            pair, grown = _caches(run, policy, rows, length)
            label = f"{name}: cache of {run.name}"
            opened.append(run.segment(label, Phase.EVALUATE, list(allocs(*pair))))
            closed.append(run.segment(f"{label} dropped", Phase.EVALUATE, list(frees(*pair))))
            read = read + 3 * product(grown.axes) * grown.dtype.bits // 8
            events = [(ALLOC, grown), (FREE, grown)]
        if timed:
            events.append((RUN, Work(None, (Move(tokens * read, tokens * _LAUNCHES),), False)))
        decoded.append(run.segment(f"{name}: {run.name}", Phase.EVALUATE, events))
    logits = Tensor("logits of the next token", (rows, _v), FP32, Role.LOGITS)
    next_token: list[Event] = [(ALLOC, logits), (FREE, logits)]
    decoded.append(Segment(f"{name}: next token", Phase.EVALUATE, next_token))
    return opened + prefill + decoded + closed


def _caches(run: Run, policy: Policy, rows: Size, length: Size) -> tuple[list[Tensor], Tensor]:
    """(keys and values of one layer, either of them while it grows)."""
    axes, module = _cache_axes(run, rows, length), run.block.name
    dtype = policy.autocast or policy.loaded_dtype
    pair = [
        Tensor(f"{what} cache", axes, dtype, Role.ACTIVATIONS, module) for what in ("key", "value")
    ]
    return pair, Tensor("grown cache", axes, dtype, Role.WORKSPACE, module)


def _cache_axes(run: Run, rows: Size, length: Size) -> tuple[Size, ...]:
    """(sequences, key/value heads, tokens kept, head size) of one layer's cache."""
    cached = run.stage.part.cached_heads
    if cached is None:
        raise InputError(
            "generation is priced for grouped-query attention; this model caches something else"
        )
    heads, window = cached
    return rows, heads, minimum(length, window) if window else length, _dh
