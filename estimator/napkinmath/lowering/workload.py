"""The step of a workload: pairs, references, teachers, critics, rollouts, and
evaluation or generation in the middle.

Sources: trl 1.16 dpo_trainer.py and kto_trainer.py _compute_loss (the reference's forward under
no_grad after the policy's), gkd_trainer.py compute_loss, reward_trainer.py, grpo_trainer.py and
rloo_trainer.py _generate_and_score_completions; trl 1.10 ppo_trainer.py. A policy's own loss is
priced as cross-entropy over the same logits; forwards without gradients leave out the adapters' own
products.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.rollout_trainers import ROLLOUT_TRAINERS, find_rollout_trainer
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import AdapterKind, Loss, Precision, TrainConfig
from napkinmath.config.workload_config import (
    OLD_LOGPROBS,
    Head,
    Placement,
    Workload,
    WorkloadKind,
)
from napkinmath.lowering.forwards import Beside, NoGradForward
from napkinmath.lowering.generation import Model, in_the_middle, rollout
from napkinmath.lowering.joined_steps import put_first
from napkinmath.lowering.placed_models import placed
from napkinmath.lowering.references import reference_place, refers, refers_by_adapters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec, Part
    from napkinmath.ir.step import Run, Step
    from napkinmath.lowering.policy import Policy

_TEACHING = {
    same: same for same in (Precision.BF16, Precision.FP16, Precision.FP32, Precision.TF32)
}  # a teacher is loaded as it runs


def trained_models(spec: ModelSpec, policy: Policy) -> list[ModelSpec]:
    """What the workload trains: the model with the head that it asks for, and a critic beside it.

    Raises InputError for a mesh on which no trainer runs it, or a model without such a head.
    """
    config = policy.config
    rule = config.workload.rule
    if rule.head is Head.EMBEDDINGS:
        from napkinmath.lowering.columns import embedding_spec

        return [embedding_spec(spec, config, config.workload.texts)]
    _check_model(spec, config.workload)
    check_mesh(config)
    own = (
        scoring(_of_pairs(spec, policy), policy)
        if rule.head is None
        else with_head(spec, rule.head, config)
    )
    kept = config.workload.teacher_topk
    if kept:
        _check_top_k(config)
        part = own.stages[-1].part.replace(kept=kept)
        own = own.replace(stages=(*own.stages[:-1], own.stages[-1].replace(part=part)))
    elif rule.head is Head.STUDENT and policy.teacher is not None and defers_both(policy):
        part = own.stages[-1].part.replace(taught_width=dict(policy.teacher.symbols)["h"])
        own = own.replace(stages=(*own.stages[:-1], own.stages[-1].replace(part=part)))
    return [own, with_head(spec, Head.SCORE, config)] if rule.critic else [own]


def _check_top_k(config: TrainConfig) -> None:
    """Raises InputError where the student's logits are not all made."""
    if config.loss is not Loss.HF:
        raise InputError(
            f"--teacher-topk {config.workload.teacher_topk} reads the student's logits, which --loss"
            f" {config.loss.value} never makes at once; add --loss hf"
        )


def defers_both(policy: Policy) -> bool:
    """Whether neither a student's logits nor its teacher's are made: the same operations patch both,
    and the student's head is plain or has LoRA on it."""
    patch, teacher = policy.patch, policy.teacher
    if patch is None or teacher is None or not patch.defers_logits:
        return False
    config = policy.adapter
    adapted = policy.targets("lm_head", "head")
    plain = not adapted or (config is not None and config.kind is AdapterKind.LORA)
    return teacher.family in patch.families and plain


def _check_model(spec: ModelSpec, workload: Workload) -> None:
    """Raises InputError for a model that the workload's trainers do not take: they load causal
    language models, a reward model's also one that scores sequences (trl 1.16 trainer/*_trainer.py,
    where no encoder is)."""
    takes = ["causal-lm"]
    if workload.rule.head is Head.SCORE:
        takes.append("sequence-classification")
    if workload.kind is not WorkloadKind.SFT and spec.task not in takes:
        raise InputError(
            f"--workload {workload.kind.value}: {shown(spec.name)} is for {spec.task}, and its"
            f" trainers take {' and '.join(takes)}; use such a model, or leave --workload out"
        )


def check_mesh(config: TrainConfig) -> None:
    """Raises InputError for meshes that no trainer of the workload has, or that are not priced."""
    parallel, workload = config.parallel, config.workload
    if parallel.data_parallel is DataParallel.DP:
        raise InputError(f"workload {workload.kind.value} is not priced with dp; use --ddp")
    if workload.entropy_loss:
        _check_entropy(workload)
    axes = (
        (parallel.tensor_parallel_size, "tensor parallelism", "--tp"),
        (parallel.context_parallel_size, "context parallelism", "--cp"),
        (parallel.expert_parallel_size, "expert parallelism", "--ep"),
        (parallel.pipeline_parallel_size, "pipeline parallelism", "--pp"),
    )
    for size, name, flag in axes:
        if size > 1:
            _check_axis(workload, name, flag)


def _check_entropy(workload: Workload) -> None:
    """Raises InputError where no trainer is named whose loss has an entropy in it."""
    kernels = ("in place", "fp32")
    if find_rollout_trainer(workload.rollout_trainer or "trl").label_kernel not in kernels:
        having = [name for name, row in ROLLOUT_TRAINERS.items() if row.label_kernel in kernels]
        raise InputError(
            f"--entropy-loss is priced as {' and '.join(having)} compute it; add --rollout-trainer"
            f" {having[0]}, or leave it out"
        )


def _check_axis(workload: Workload, name: str, flag: str) -> None:
    """Raises InputError for what a workload does that no trainer of it spreads so, or that is not
    recorded on one rank of it."""
    rule, kind = workload.rule, workload.kind.value
    if (workload.generates and not workload.has_engine) or workload.generate_tokens:
        raise InputError(
            f"workload {kind} generates with transformers, which has no {name}; add --rollout vllm,"
            f" or leave {flag} out and spread it with --ddp, --fsdp or --zero"
        )
    if workload.eval_batch:
        raise InputError(
            f"an evaluation in the middle of {kind} is not priced with {name}; leave --eval-bs or"
            f" {flag} out"
        )
    if flag == "--pp" and workload.scored_rows:
        raise InputError(
            "--score-bs: in a pipeline rollouts are scored in micro-batches of the update; leave it or"
            " --pp out"
        )
    if flag == "--pp" and rule.head is Head.STUDENT and not workload.teacher_topk:
        raise InputError(
            f"workload {kind}: no trainer brings all logits of a teacher to the last stage of a"
            " pipeline; leave --pp out, or add --teacher-topk 64 for NeMo-RL's"
        )


def with_head(spec: ModelSpec, head: Head, config: TrainConfig) -> ModelSpec:
    """The same model with another head.

    A chunked or fused loss holds no logits, and one that takes all of them no more than another's.
    Raises InputError for a model without a head of logits.
    """
    if config.loss is not Loss.HF and head not in (Head.SCORE, Head.TOKEN_SCORES):
        return spec
    part = spec.stages[-1].part.ending_in(head)
    if part is None:
        raise InputError(
            f"{shown(spec.name)} ends in no causal language-model head that another could replace;"
            " use a decoder"
        )
    return spec.replace(stages=(*spec.stages[:-1], spec.stages[-1].replace(part=part)))


def scoring(spec: ModelSpec, policy: Policy) -> ModelSpec:
    """The policy, and its reference, as a trainer of rollouts asks it for log-probabilities: with a
    head over completions alone, or with one kernel over all logits, where the trainer has that."""
    if not policy.config.workload.rolls_out:
        return spec
    part = _scoring_head(spec, policy)
    return (
        spec
        if part is None
        else spec.replace(stages=(*spec.stages[:-1], spec.stages[-1].replace(part=part)))
    )


def _of_pairs(spec: ModelSpec, policy: Policy) -> ModelSpec:
    """The policy, and its reference, as a trainer of pairs asks it for logits, where it does."""
    if not (policy.config.workload.rule.holds and policy.stack.loss.pairs_keep_logits):
        return spec
    last = spec.stages[-1]
    return spec.replace(stages=(*spec.stages[:-1], last.replace(part=last.part.without_labels())))


def _scoring_head(spec: ModelSpec, policy: Policy) -> Part | None:
    """The exit that scores rollouts; None for the model's own."""
    workload, parallel = policy.config.workload, policy.config.parallel
    loss, loss_code = policy.config.step_loss, policy.stack.loss
    trainer = find_rollout_trainer(workload.rollout_trainer or "trl")
    last, found = spec.stages[-1].part, None
    plain = parallel.tensor_parallel_size == 1 and not loss_code.chunks
    if not plain or not policy.stack.model.runs_transformers:
        pass
    elif trainer.label_kernel and loss is Loss.HF:
        found = last.ending_in(Head.KERNEL)
        if found is not None:
            kernel, entropy = trainer.label_kernel, workload.entropy_loss
            whole, in_place = kernel == "log_softmax", kernel == "in place"
            found = found.replace(in_place=in_place, whole=whole, entropy=entropy)
    elif policy.stack.loss.shifts_rollouts and loss is Loss.HF:
        found = last.ending_in(Head.COMPLETION)
        found = None if found is None else found.replace(shifted=True)
    elif (
        workload.rule.scores_labels
        and trainer.completion_logits
        and parallel.context_parallel_size == 1
        and loss is not Loss.FUSED
    ):
        found = last.ending_in(Head.COMPLETION)
        if found is not None:
            in_chunks = loss is Loss.CHUNKED
            found = found.replace(tokens=workload.completion_tokens, in_chunks=in_chunks)
    if workload.entropy_loss and found is None and loss is Loss.HF:
        raise InputError(
            "--entropy-loss is priced for transformers' decoders without --tp; leave it out, or add"
            " --loss fused, whose kernel holds nothing for it"
        )
    return found


def beside(spec: ModelSpec, policy: Policy, pipeline_rank: int) -> Beside:
    """The forwards without gradients in each micro-step of the policy, or a pipeline rank's part of
    them."""
    config, workload = policy.config, policy.config.workload
    generates = workload.generates and policy.rollout is None
    found = Beside(in_batches=bool(workload.scored_rows), generates=generates)
    rule, spec = workload.rule, scoring(_of_pairs(spec, policy), policy)
    whole = policy.stack.loss.pairs_keep_logits and config.step_loss is Loss.HF
    found.keeps_logits = whole and spec.stages[-1].part.task == "causal-lm"
    has_reference = refers(policy)
    name, by_adapters = opening(config), has_reference and refers_by_adapters(policy)
    if name or by_adapters:  # the same forward serves both
        own = NoGradForward(spec, policy, config, own=True, pipeline_rank=pipeline_rank)
        if name:
            found.add([own.called(name)], holds=False)
        if by_adapters:
            found.add(_own_reference(own, config), holds=rule.holds)
    swaps = has_reference and not by_adapters and reference_place(workload) is Placement.SWAP
    if has_reference and not by_adapters:
        holds = rule.holds and not swaps
        found.add(_reference(spec, policy, found, pipeline_rank), holds=holds)
    if workload.teacher:
        taught = workload.kind is WorkloadKind.DISTILL and not workload.teacher_topk
        found.add(_second(policy, found, pipeline_rank), holds=taught)
    if (
        workload.rolls_out or swaps or workload.teacher_topk
    ) and config.parallel.pipeline_parallel_size == 1:
        found.bring_once()
    return found


def opening(config: TrainConfig) -> str:
    """The forward of the policy without gradients before the one that is trained on; '' for
    none."""
    workload = config.workload
    wanted, name = workload.old_logprobs, workload.rule.opening
    if not workload.rolls_out or (wanted is None and name):
        return name
    if wanted is None and workload.has_engine:
        wanted = find_rollout_trainer(workload.rollout_trainer or "trl").old_logprobs
    return OLD_LOGPROBS if wanted else ""


def beside_critic(critic: ModelSpec, policy: Policy, pipeline_rank: int) -> Beside:
    """The critic's forward without gradients, whose values the update needs (trl 1.10
    ppo_trainer.py full_value; verl ray_trainer.py compute_values)."""
    config = policy.config
    found = Beside(in_batches=bool(config.workload.scored_rows))
    values = NoGradForward(critic, policy, config, own=True, pipeline_rank=pipeline_rank)
    found.add([values.called("values of the rollout")], holds=False)
    if found.in_batches and config.parallel.pipeline_parallel_size == 1:
        found.bring_once()
    return found


def _reference(
    spec: ModelSpec, policy: Policy, found: Beside, pipeline_rank: int
) -> list[NoGradForward]:
    """The forwards of a reference that is a copy of the policy."""
    config, workload = policy.config.replace(adapter=None), policy.config.workload
    rule = workload.rule
    loaded, forwards = placed(
        spec,
        policy,
        config,
        rule.reference,
        reference_place(workload),
        prepared=rule.reference_is_prepared or _shards_models(workload),
        pipeline_rank=pipeline_rank,
    )
    found.loaded += loaded
    return forwards


def _shards_models(workload: Workload) -> bool:
    trainer = workload.rollout_trainer
    return workload.rolls_out and bool(trainer) and find_rollout_trainer(trainer).shards_models


def _own_reference(own: NoGradForward, config: TrainConfig) -> list[NoGradForward]:
    """The forwards of a reference that is the policy with its adapters switched off."""
    at = config.workload.reference_at
    if at is not Placement.AUTO:
        raise InputError(
            f"--reference-at {at.value}: with adapters the reference is the policy itself, its"
            " adapters switched off; leave it out"
        )
    return [own.called(name) for name in config.workload.rule.reference]


def _second(policy: Policy, found: Beside, pipeline_rank: int) -> list[NoGradForward]:
    """The forward of a teacher, or of a reward model."""
    config, teacher, rule = policy.config, policy.teacher, policy.config.workload.rule
    assert teacher is not None  # read by whoever made the policy
    precision = _TEACHING.get(config.precision, Precision.BF16_AUTOCAST)
    frozen = config.replace(adapter=None, quantization=None, precision=precision)
    head, patch = Head.LOGITS if rule.head is Head.STUDENT else Head.SCORE, None
    if head is Head.LOGITS and not config.workload.teacher_topk and defers_both(policy):
        head, patch = Head.HIDDEN, policy.patch
    model, at = with_head(teacher, head, config), config.workload.teacher_at
    kept = config.workload.teacher_topk
    if kept:
        last = model.stages[-1]
        model = model.replace(
            stages=(*model.stages[:-1], last.replace(part=last.part.replace(kept=kept)))
        )
        at = Placement.OFFLOAD if at is Placement.AUTO else at
    loaded, forwards = placed(
        model,
        policy,
        frozen,
        (rule.second,),
        at,
        prepared=_shards_models(config.workload),
        pipeline_rank=pipeline_rank,
        patch=patch,
        as_policy=bool(kept),
    )
    found.loaded += loaded
    return forwards


def surround(
    step: Step, runs: list[Run], spec: ModelSpec, own: ModelSpec, around: Beside, policy: Policy
) -> None:
    """Adds to a step the loading of what runs `around` its micro-steps, what the policy (its
    `runs`) generates before them, and what is done after its update.

    `spec` is the policy as it was given, `own` with the head that is trained.
    """
    step.load += around.loaded
    for thresholds in around.thresholds:
        step.note(thresholds)
    model = Model(step=step, runs=runs, policy=policy)
    if policy.config.workload.generates:
        loaded, times, rolled = rollout(model, spec)
        step.load += loaded
        put_first(step, times, rolled)
    step.save = in_the_middle(model, own) + step.save
