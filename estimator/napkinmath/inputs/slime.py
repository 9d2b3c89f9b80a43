"""slime's launch scripts: Megatron-LM's arguments beside its own, for a policy trained on what
SGLang generates, or supervised.

Keys: THUDM/slime slime/utils/arguments.py at 624b824a898a and Megatron-LM's. What they do:
slime/backends/megatron_utils/arguments.py (bf16, the distributed optimizer),
backends/megatron_utils/actor.py (the reference's weights lie in host memory and are swapped in).
"""

from __future__ import annotations

from math import lcm

from napkinmath.base import values
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.megatron import read_recomputation, read_sums
from napkinmath.inputs.megatron_model import settle_model
from napkinmath.inputs.rollouts import name_rollouts, policy_alone
from napkinmath.inputs.rows import WITHIN, Row, degree, give_experts, read_rows, world_size

_OPTIMIZERS: dict[str, object] = {"adam": "adamw-fused", "sgd": "sgd", "muon": "muon"}
_DEGREES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
)
# More of the model's sizes, which the checkpoint that --hf-checkpoint names has too.
_SIZES = (
    *("use_gated_attention", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("${MODEL_ARGS[@]}", "${DISTRIBUTED_ARGS[@]}"),
)
# What the engine loads may be quantized; the policy is trained from a bf16 copy beside it.
_ENGINES_FORMATS = ("-FP8", "-fp8", "-INT4", "-int4", "-bf16", "-BF16")


_ROLLOUT = ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a slime launch."""
    job.take("megatron_arguments", *_SIZES)
    settle_model(job)
    unfused = not is_off(job.take("no_gradient_accumulation_fusion"))
    job.give("stack", "slime-unfused" if unfused else "slime")
    _read_model(job)
    gpus, inner = _read_mesh(job)
    supervised = job.take("loss_type") == "sft_loss"
    _read_batch(job, max(1, gpus // inner), supervised=supervised)
    read_recomputation(job)
    read_rows(job, [Row("optimizer", "optimizer", words=_OPTIMIZERS)])
    job.options.setdefault("optimizer", "adamw-fused")
    eight = not is_off(job.take("fp8_format", "fp8"))
    job.give("precision", "fp16" if job.switch("fp16") else "fp8" if eight else "bf16")
    job.take("bf16", "use_distributed_optimizer")
    read_sums(job)
    job.give("clip", job.take("clip_grad") not in (0, "0", "0.0"))
    if job.switch("optimizer_cpu_offload"):
        job.give("offload", "optimizer")
    if not supervised:
        _name_more_logits(job)
        policy_alone(job, "advantage_estimator")
        engine = "rollout_num_gpus_per_engine"
        name_rollouts(job, engine if engine in job.content else "rollout_batch_size", "SGLang")
    return job.finish()


def _name_more_logits(job: ForeignJob) -> None:
    """Keys by which the loss holds more of the fp32 logits (backends/megatron_utils/loss.py
    get_log_probs_and_entropy)."""
    for key, usual, why in (
        ("entropy_coef", 0, "the entropy's gradient holds the fp32 logits and two more tensors"),
        ("rollout_temperature", 1, "the fp32 logits are copied for it"),
    ):
        given = job.take(key)
        if isinstance(given, int | float) and given != usual:
            job.leave_out(key, why, memory=Difference.MORE, time=Difference.MORE)


def _read_model(job: ForeignJob) -> None:
    """The last part of the checkpoint's path; a variable that no line sets is asked for."""
    name = str(job.take("hf_checkpoint") or "").rstrip("/").rpartition("/")[2]
    for format in _ENGINES_FORMATS:
        name = name.removesuffix(format)
    if not name or "$" in name:
        job.refuse("model", "slime's hf_checkpoint names a variable that no line sets")
    job.give("model", name)


def _read_mesh(job: ForeignJob) -> tuple[int, int]:
    """(GPUs of the policy, ranks that share one sequence of it)."""
    sizes = {option: degree(job, key) for option, key in _DEGREES}
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    nodes, each = job.take("actor_num_nodes"), job.take("actor_num_gpus_per_node")
    gpus = world_size(job)
    if gpus is None and str(nodes or 1).isdecimal() and str(each or "").isdecimal():
        gpus = int(str(nodes or 1)) * int(str(each))
    if gpus is None or gpus % inner:
        experts = degree(job, "expert_model_parallel_size")
        within = degree(job, WITHIN) if job.content.get(WITHIN) else sizes["tp"]
        gpus = lcm(inner, experts * within * sizes["pp"]) if experts > 1 else inner
        job.note(f"the policy's GPUs not given, taken as {gpus}; add --gpus N")
    job.give("gpus", gpus)
    for option, size in sizes.items():
        job.give(option, size if size > 1 else None)
    sequence = job.switch("sequence_parallel")
    job.give("sequence_parallel", sequence if sizes["tp"] > 1 else None)
    outer = gpus // (sizes["tp"] * sizes["pp"])
    give_experts(
        job,
        "expert_model_parallel_size",
        tensor=sizes["tp"],
        data=outer,
        within=WITHIN,
        sends="allgather",
    )
    job.give("data_parallel", ["zero1"] if gpus > inner else None)
    return gpus, inner


def _read_batch(job: ForeignJob, data: int, *, supervised: bool) -> None:
    """Micro-batches of as many tokens as a GPU may have, every answer as long as it may be."""
    tokens, cp = job.take("max_tokens_per_gpu"), degree(job, "context_parallel_size")
    answer, prompt = job.take("rollout_max_response_len"), job.take("rollout_max_prompt_len")
    given, rows = job.take("seq_length"), job.take("micro_batch_size")
    dynamic = job.switch("use_dynamic_batch_size") and isinstance(tokens, int)
    most = values.count(tokens, "--max-tokens-per-gpu") * cp if dynamic else 0
    length = given
    if not supervised and answer is not None:
        length = values.count(answer, "--rollout-max-response-len")
        length += values.count(prompt, "--rollout-max-prompt-len") if prompt is not None else 0
    if length is None or (supervised and dynamic):
        length = most or 4096
        if not most:
            job.assume("ctx", length, "no length is given")
    size = values.count(length, "--rollout-max-response-len")
    number = max(1, most // size) if dynamic else values.count(rows or 1, "--micro-batch-size")
    job.give("ctx", size)
    job.give("bs", number)
    job.give("packing", True if dynamic else None)
    whole = job.take("global_batch_size")
    prompts, answers, steps = (job.take(key) or 1 for key in _ROLLOUT)
    if whole is None:
        step = values.count(prompts, "--rollout-batch-size")
        step *= values.count(answers, "--n-samples-per-prompt")
        step = max(1, step // values.count(steps, "--num-steps-per-rollout"))
    else:
        step = values.count(whole, "--global-batch-size")
    job.give("grad_accum", max(1, step // (number * data)))
    if dynamic and not supervised:
        job.leave_out(
            "use_dynamic_batch_size",
            "answers are taken as long as they may be: shorter ones fill fewer micro-batches",
            time=Difference.LESS,
        )
