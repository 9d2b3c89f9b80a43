"""What was assumed: every value that the configuration leaves open."""

from __future__ import annotations

from napkinmath.answers.images import image_assumptions
from napkinmath.config.train_config import Attention, Loss
from napkinmath.config.workload_config import Head
from napkinmath.ir.step import reads_tokens
from napkinmath.lowering.choices import is_of_today
from napkinmath.lowering.precision import PRECISIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.lowering.policy import Policy


def assumptions(e: Estimate) -> tuple[str, ...]:
    """What the configuration leaves open, with the value taken."""
    config, policy = e.config, e.step.policy
    found = [
        f"stack {policy.stack.name}: {policy.stack.meaning}",
        f"precision {config.precision.value}: {PRECISIONS[config.precision].meaning}",
    ]
    if policy.stack.loop.fp32_parameters and config.parallel.sharded_dtype == "fp32":
        found.append(
            f"parameters in fp32 shards, gradients summed in {config.parallel.reduce_dtype}:"
            " --sharded-dtype and --reduce-dtype say otherwise"
        )
    if config.optimizer == "auto":
        found.append(f"optimizer {e.step.update.optimizer.name}: the stack's default")
    shares = policy.stack.engine.shares_optimizer
    if shares and config.parallel.data_parallel.value == "zero1":
        found.append("optimizer's states shared out over ranks: the stack's default; else --ddp")
    if config.attention is Attention.AUTO and policy.config.attention is Attention.EAGER:
        first = ".".join(map(str, e.spec.sdpa_since))
        found.append(
            f"attention: whole scores, as this model's class has no SDPA before transformers {first}"
        )
    elif config.attention in (Attention.AUTO, Attention.SDPA):
        kernel = policy.sdpa_choice
        only = (
            " where its inputs allow" if kernel is not Attention.MATH else ", in bf16 the only one"
        )
        if kernel is Attention.CUDNN and is_of_today(policy.stack):
            only += ", as torch for CUDA 13 picks it; --attention flash for CUDA 12"
        found.append(f"attention: the {kernel.value} kernel{only}")
    if config.adapter is not None and config.adapter.dtype == "auto":
        sharded = config.parallel.data_parallel.is_fsdp and policy.loaded_rule.autocast is not None
        who = config.stack if policy.stack.model.narrow_adapters else "PEFT"
        how = f"stored as {who} makes them, gathered in" if sharded else "in"
        found.append(
            f"adapters {how} {policy.adapter_dtype}: what"
            f" {'FSDP with mixed precision' if sharded else who} does"
        )
    scores = config.workload.rule.scores_labels and policy.stack.loss.scores_in_chunks
    if scores and config.loss is Loss.CHUNKED:
        found.append("log-probabilities in chunks, as TRL takes them: --loss hf for all logits")
    if config.mlp_tiles and dict(e.spec.symbols).get("e"):
        found.append("--mlp-tiles leaves experts whole, which see a part of the tokens each")
    skips = policy.patch is not None and policy.patch.adapted_head == "skipped"
    if skips and policy.targets("lm_head", "head"):
        found.append(
            "the adapter on lm_head is never run or trained: the patch's loss reads the base"
            " weight; --train-modules lm_head trains a copy"
        )
    policy_of_ranks = e.ranks.policy
    if policy_of_ranks.teacher is not None and config.workload.rule.head is Head.STUDENT:
        found += _patched_teacher(policy_of_ranks)
    if config.workload.rule.head is Head.EMBEDDINGS:
        found.append("an embedding is the mean of its tokens; the first one alone (CLS) holds less")
    if config.workload.rolls_out and config.workload.reference is None:
        found += _reference_of(e.ranks.policy)
    if config.workload.has_engine:
        found.append(_engine_of(e))
    if config.workload.rolls_out and not config.workload.generates:
        found.append("rollouts are made elsewhere: their memory and time are not in the figures")
    if config.parallel.pipeline_parallel_size > 1 and not config.workload.is_plain:
        found.append(
            "in a pipeline: forwards without gradients, and a critic, run over all micro-batches"
            " before the policy's, as in verl, NeMo-RL and slime"
        )
    if e.settings.expandable_segments:
        found.append("allocator: segments that grow, as PYTORCH_ALLOC_CONF asks for them")
    if not config.batch.lengths and reads_tokens(e.step):
        found.append("every sequence is as long as the context")
    if e.spec.family == "apertus":  # transformers activations.py XIELUActivation
        found.append("xIELU in Python, step by step; the kernel of the package xielu holds less")
    found += image_assumptions(e)
    if e.time is not None and e.time.share("host memory"):
        found += _usual_host(e)
    return tuple(found)


def _patched_teacher(policy: Policy) -> list[str]:
    """Whose logits a patched student's distillation makes."""
    from napkinmath.lowering.workload import defers_both

    if policy.patch is None or policy.teacher is None or not policy.patch.defers_logits:
        return []
    if defers_both(policy):
        return ["student and teacher are both patched: the logits of neither are made"]
    why = "adapters on its head" if policy.targets("lm_head", "head") else "its teacher's family"
    return [f"the logits of student and teacher are made, since the patch does not take {why}"]


def _reference_of(policy: Policy) -> list[str]:
    """Whether a trainer of rollouts has a reference by itself, where nothing was said."""
    from napkinmath.lowering.references import refers

    workload = policy.config.workload
    trainer = workload.rollout_trainer or "trl"
    if refers(policy):
        return [f"a reference, as {trainer} runs one by itself: --reference off leaves it out"]
    if not workload.rule.refers:
        return []
    return [f"no reference, as {trainer} runs none by itself (beta 0): --reference adds it"]


def _engine_of(e: Estimate) -> str:
    """Whose placement of the rollouts' engine fills what the user left open."""
    from napkinmath.lowering.rollout.plan import EnginePlan

    plan = e.ranks.policy.rollout
    assert isinstance(plan, EnginePlan)
    gpus = "GPUs of its own" if plan.apart else "the policy's GPUs"
    refused = plan.trainer.asks_bf16 and plan.engine.computes_in(plan.hardware.gpu) != "bf16"
    halves = (
        f"; in fp16, since {plan.hardware.gpu.name} has no bf16, which {plan.trainer.name} asks for by"
        " itself"
    )
    return (
        f"{plan.engine.name} on {gpus} as {plan.trainer.name} places it: {plan.share:g} of each,"
        f" {plan.model.ranks} an engine, sleep level {plan.sleep}, weights by {plan.sync.value}"
        + (halves if refused else "")
    )


def _usual_host(e: Estimate) -> list[str]:
    """The machine that the host's update is priced on, where none was given."""
    assert e.hardware is not None
    host = e.hardware.gpu.host
    if e.hardware.gpu.given_host is not None:
        return []
    runs = "rows are gathered" if e.config.offload.embeddings else "the optimizer runs"
    return [
        f"host of {host.cores} cores and {host.memory_bytes_per_s / 1e9:.0f} GB/s of memory, usual"
        f" around such GPUs: {runs} there; --host says otherwise"
    ]
