"""workload_step: the step of a workload: pairs, references, teachers, critics, rollouts, and
evaluation or generation in the middle.

Sources: trl 0.2x to 1.x dpo_trainer.py (concatenated_forward, then compute_ref_log_probs under
no_grad), gkd_trainer.py (compute_loss), reward_trainer.py, grpo_trainer.py
(_generate_and_score_completions), ppo_trainer.py; transformers 5.23 trainer.py evaluation_loop,
cache_utils.py DynamicLayer.update. A policy's own loss is priced as cross-entropy over the same
logits; an evaluation and a reference leave out the adapters' own products.
"""

from __future__ import annotations

import copy

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Size, ceil_div, minimum, product, symbol
from napkinmath.config.train_config import Loss, Precision, RecomputeConfig, TrainConfig
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.lifecycle import load_segments
from napkinmath.lowering.policy import Policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import Part
    from napkinmath.ir.step import Run, Segment, Step
    from napkinmath.models.layers.head import CausalLmHead

    Symbols = tuple[tuple[str, Size], ...]

_b, _s, _v, _k, _dh = (symbol(name) for name in ("b", "s", "v", "k", "dh"))
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


def workload_step(spec: ModelSpec, policy: Policy) -> Step:
    """The step of `policy.config.workload`; raises InputError where it is spread over several GPUs
    or the model has no such head."""
    from napkinmath.ir.step import build_step

    config, workload = policy.config, policy.config.workload
    if config.parallel.world_size > 1:
        raise InputError(f"workload {workload.kind.value} is priced on one GPU; leave --gpus out")
    plain = copy.copy(policy)
    plain.config = config.replace(workload=Workload())
    own = (
        scored(spec)
        if workload.kind is WorkloadKind.REWARD
        else taught(spec, config)
        if workload.kind is WorkloadKind.DISTILL
        else spec
    )
    step = build_step(own, plain)
    if workload.kind is WorkloadKind.PPO:
        _join(step, build_step(scored(spec), plain))
    before, after = _beside(spec, policy, step)
    step.micro_steps = [
        _surrounded(repeat, segments, before, after) for repeat, segments in step.micro_steps
    ]
    if workload.rolls_out:
        repeat, segments = step.micro_steps[0]
        rows = (
            _b * config.gradient_accumulation_steps
        )  # generated at once for all micro-steps: trl grpo_config.py steps_per_generation
        tokens = workload.completion_tokens or ceil_div(_s, 2)
        prompt = _s - tokens + 1 - minimum(_s - tokens, 1)  # one token at least
        prefill = _prefill(spec, policy, "rollout", (("b", rows), ("s", prompt)))
        rollout = _generation(step.runs, policy, tokens, "rollout", rows, prefill, timed=True)
        step.micro_steps[:1] = [
            (1, rollout + segments),
            *([(repeat - 1, segments)] if repeat > 1 else []),
        ]
    step.save = _in_the_middle(own, policy, step) + step.save
    step.policy = policy
    return step


def scored(spec: ModelSpec) -> ModelSpec:
    """The same model with a score for its head."""
    from napkinmath.models.layers.score_head import ScoreHead

    head = _causal_head(spec)
    return _ending_in(spec, ScoreHead(norm=head.norm, norm_name=head.norm_name))


def taught(spec: ModelSpec, config: TrainConfig) -> ModelSpec:
    """The same model whose loss is its divergence from a teacher; a chunked or fused loss holds no
    logits, a divergence's no more than another's."""
    from napkinmath.models.layers.distillation_head import DistillationHead

    return (
        _ending_in(spec, DistillationHead(head=_causal_head(spec)))
        if config.loss is Loss.HF
        else spec
    )


def without_loss(spec: ModelSpec, config: TrainConfig) -> ModelSpec:
    """The same model whose logits leave it; as it is where the loss never holds them all."""
    from napkinmath.models.layers.distillation_head import LogitsHead

    return _ending_in(spec, LogitsHead(head=_causal_head(spec))) if config.loss is Loss.HF else spec


def _ending_in(spec: ModelSpec, part: Part) -> ModelSpec:
    return spec.replace(stages=(*spec.stages[:-1], spec.stages[-1].replace(part=part)))


def _causal_head(spec: ModelSpec) -> CausalLmHead:
    from napkinmath.models.layers.head import CausalLmHead

    part = spec.stages[-1].part
    if not isinstance(part, CausalLmHead):
        raise InputError(
            f"{shown(spec.name)} ends in no causal language-model head that another could replace;"
            " use a decoder"
        )
    return part


def _join(step: Step, other: Step) -> None:
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


# ---------------------------------------------------------------- forwards of other models


def _beside(spec: ModelSpec, policy: Policy, step: Step) -> tuple[list[Segment], list[Segment]]:
    """Forwards without gradients in each micro-step: (before the policy's forward, between its
    forward and its backward)."""
    config, workload = policy.config, policy.config.workload
    before: list[Segment] = []
    after: list[Segment] = []
    if (
        workload.kind in (WorkloadKind.DPO, WorkloadKind.GRPO, WorkloadKind.PPO)
        and workload.reference
    ):
        loaded, forward = _forward(spec, policy, config, "reference")
        if config.adapter is None:
            step.load += loaded
        (after if workload.kind is WorkloadKind.DPO else before).extend(forward)
    if workload.teacher:
        teacher = _catalogued(workload.teacher)
        frozen = config.replace(
            adapter=None,
            quantization=None,
            precision=_TEACHING.get(config.precision, Precision.BF16_AUTOCAST),
        )
        name = "teacher" if workload.kind is WorkloadKind.DISTILL else "reward model"
        loaded, forward = _forward(
            without_loss(teacher, config) if name == "teacher" else scored(teacher),
            policy,
            frozen,
            name,
        )
        step.load += loaded
        (after if name == "teacher" else before).extend(forward)
    return before, after


def _catalogued(name: str) -> ModelSpec:
    """A model of the catalog; a path is none, so that a configuration never opens a file."""
    from napkinmath.catalog.models import find_row, read_model

    if find_row(name) is None:
        raise InputError(f"--teacher {shown(name)} is not in the catalog; list: estimate models")
    return read_model(name.rpartition("/")[2])


def _forward(
    spec: ModelSpec,
    policy: Policy,
    config: TrainConfig,
    name: str,
    *,
    phase: Phase = Phase.FORWARD,
    more: Symbols = (),
) -> tuple[list[Segment], list[Segment]]:
    """(loading, forward without gradients) of a model, under its own sizes."""
    from napkinmath.ir.step import lower_micro_step, record_runs

    still = config.replace(
        workload=Workload(),
        recompute=RecomputeConfig(),
        training_mode=False,
        gradient_accumulation_steps=1,
    )
    quiet = ForwardPolicy(still, policy.stack, sdpa_choice=policy.sdpa_choice)
    quiet.thresholds = policy.thresholds
    runs, shared = record_runs(spec, quiet)
    forward = lower_micro_step(runs, shared, quiet, accumulate=False)
    loaded = load_segments(runs, quiet)
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
        found += _untimed(
            _forward(
                own,
                policy,
                policy.config,
                "evaluation",
                phase=Phase.EVALUATE,
                more=(("b", workload.eval_batch),),
            )[1]
        )
    if workload.generate_tokens:
        prefill = _untimed(_prefill(own, policy, "generation", ()))
        found += _generation(
            step.runs, policy, workload.generate_tokens, "generation", _b, prefill, timed=False
        )
    return found


def _untimed(segments: list[Segment]) -> list[Segment]:
    for segment in segments:
        segment.events = [event for event in segment.events if event[0] != RUN]
    return segments


def _prefill(spec: ModelSpec, policy: Policy, name: str, sizes: Symbols) -> list[Segment]:
    """The prompts' forward: transformers' generate keeps the last position's logits alone, so the
    head is next to nothing."""
    from napkinmath.models.layers.head import CausalLmHead

    shown_last = scored(spec) if isinstance(spec.stages[-1].part, CausalLmHead) else spec
    return _forward(
        shown_last, policy, policy.config, f"{name}: prompt", phase=Phase.EVALUATE, more=sizes
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
    from napkinmath.ir.step import Segment

    length = _s if name == "rollout" else _s + tokens
    opened: list[Segment] = []
    closed: list[Segment] = []
    decoded: list[Segment] = []
    dtype = policy.autocast or policy.loaded_dtype
    for run in runs:
        moved: Size = 0
        for weight in run.block.weights:
            moved = moved + weight.tensor.nbytes
        events: list[Event] = []
        if run.stage.checkpointed:
            axes = _cache_axes(run, rows, length)
            pair = [
                Tensor(f"{what} cache", axes, dtype, Role.ACTIVATIONS, run.block.name)
                for what in ("key", "value")
            ]
            grown = Tensor("grown cache", axes, dtype, Role.WORKSPACE, run.block.name)
            opened.append(
                Segment(
                    f"{name}: cache of {run.name}",
                    Phase.EVALUATE,
                    [(ALLOC, t) for t in pair],
                    run.count,
                    run.stage.symbols,
                )
            )
            closed.append(
                Segment(
                    f"{name}: cache of {run.name} dropped",
                    Phase.EVALUATE,
                    [(FREE, t) for t in pair],
                    run.count,
                    run.stage.symbols,
                )
            )
            moved = moved + 3 * product(axes) * dtype.bits // 8
            events = [(ALLOC, grown), (FREE, grown)]
        if timed:
            events.append((RUN, Work(None, (Move(tokens * moved, tokens * _LAUNCHES),), False)))
        decoded.append(
            Segment(f"{name}: {run.name}", Phase.EVALUATE, events, run.count, run.stage.symbols)
        )
    logits = Tensor("logits of the next token", (rows, _v), FP32, Role.LOGITS)
    decoded.append(
        Segment(f"{name}: next token", Phase.EVALUATE, [(ALLOC, logits), (FREE, logits)])
    )
    return opened + prefill + decoded + closed


def _cache_axes(run: Run, rows: Size, length: Size) -> tuple[Size, ...]:
    """(sequences, key/value heads, tokens kept, head size) of one layer's cache."""
    from napkinmath.models.layers.attention import GroupedQueryAttention

    attention = getattr(run.stage.part, "attention", None)
    if not isinstance(attention, GroupedQueryAttention):
        raise InputError(
            "generation is priced for grouped-query attention; this model caches something else"
        )
    heads = _k if attention.grouped else symbol("a")
    return rows, heads, minimum(length, attention.window) if attention.window else length, _dh
