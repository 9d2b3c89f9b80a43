"""What the files of reinforcement learning's trainers share: an engine generates what the policy
is updated with."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.catalog.models import find_row
from napkinmath.config.job_keys import Difference
from napkinmath.config.workload_config import ELSEWHERE, RULES, WorkloadKind
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.parallel_options import number_and_type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob

_GENERATE = tuple(kind.value for kind, rule in RULES.items() if rule.rolls_out)
_MESH = ("tp", "pp", "cp", "ep")
# trl 1.16 grpo_config.py, rloo_config.py max_completion_length; prompts were cut to as many until
# max_prompt_length was removed, and are not cut since.
_ROLLED = 512
_OF_WORKLOADS = (
    *("workload", "reference", "reference_at", "old_logprobs", "teacher", "completion"),
    *("teacher_at", "teacher_topk"),
    *("entropy_loss", "score_bs"),
    *("rollout", "rollout_trainer", "rollout_memory", "rollout_tp", "rollout_sleep"),
    *("rollout_gpus", "rollout_sync", "rollout_bucket", "rollout_offload", "rollout_staleness"),
    *("rollout_group", "rollout_draft", "rollout_batches"),
)


def give_engine(
    job: ForeignJob,
    key: str,
    engine: object,
    trainer: str,
    settings: Mapping[str, object],
    *,
    own_gpus: int = 0,
) -> bool:
    """Prices the engine that generates what the step trains on, as its `trainer` places it with
    the file's `settings` (rollout_memory, rollout_tp, ...): on the policy's GPUs, or on so many of
    its own. Where it cannot be priced it is named, and the answer is False."""
    name = str(engine).lower()
    kind = str(job.given.get("workload", job.options.get("workload", "sft")))
    if job.given.get("rollout") == "hf" or kind not in _GENERATE:
        name_rollouts(job, key, engine)
        return False
    gpu = _type_of_gpu(job)
    tp = values.count(settings.get("rollout_tp") or 1, "rollout_tp")
    among = own_gpus or number_and_type({"gpus": job.options.get("gpus", 1), **job.given})[0]
    reason = ""
    if name not in ("vllm", "sglang"):
        reason = "; give --rollout"
    elif not gpu:
        reason = "; name their GPU with --gpu"
    elif among % tp:
        reason = f", on {tp} GPUs each, which do not divide {among}; give --rollout"
    if reason:
        name_rollouts(job, key, engine, reason)
        return False
    if own_gpus and "rollout_gpus" not in job.given:
        job.assume("rollout_gpus", f"{own_gpus}x{gpu}", "GPUs of the engines, of the policy's type")
    if "rollout" not in job.given and "rollout_trainer" not in job.given:
        job.engine = key
    job.give("rollout", name)
    job.give("rollout_trainer", trainer)
    for option, value in settings.items():
        job.give(option, value)
    return True


def shares_gpus(job: ForeignJob, *, default: str = "") -> bool:
    """Whether vLLM by the names of TRL's arguments shares the policy's GPUs, whose type is known;
    a server's GPUs are said nowhere, and unsloth's engine has the policy's own weights."""
    mode = str(job.content.get("vllm_mode") or default)
    shares = not is_off(job.content.get("use_vllm")) and mode == "colocate"
    return shares and job.options.get("kernels") != "unsloth" and bool(_type_of_gpu(job))


def leave_vllm_out(job: ForeignJob, *, default: str = "") -> None:
    """What a vLLM that is not priced generates, transformers does not. A server (`vllm_mode`) has
    GPUs of its own: the policy's hold nothing of it."""
    if is_off(job.content.get("use_vllm")):
        return
    job.options.setdefault("rollout", ELSEWHERE)
    if str(job.content.get("vllm_mode") or default) == "server":
        job.take("use_vllm", "vllm_mode", "num_generations")
        job.leave_out(
            "use_vllm",
            "a vLLM server on other GPUs generates, for a time that is not in the figures;"
            " --rollout-gpus, e.g. 1xH100, prices it",
            time=Difference.MORE,
            option="rollout",
        )


def give_vllm(job: ForeignJob, trainer: str, settings: Mapping[str, object]) -> bool:
    """Whether vLLM by the names of TRL's arguments is priced, with a trainer's own `settings`."""
    names = ("gpu_memory_utilization", "tensor_parallel_size")
    share, tp = (job.take(f"vllm_{name}") for name in names)
    group = job.take("num_generations")
    found = {"rollout_memory": share, "rollout_tp": tp, "rollout_group": group, **settings}
    is_priced = give_engine(job, "use_vllm", "vllm", trainer, found)
    if is_priced:
        job.take("use_vllm", "vllm_mode")
    return is_priced


def _type_of_gpu(job: ForeignJob) -> str:
    """The GPU given beside the file; '' where none or several are."""
    named = [str(name) for name in values.listed(job.given.get("gpu") or [])]
    kind = number_and_type(job.given)[1] if "gpus" in job.given else ""
    named = [kind] if kind else named
    return named[0] if len(named) == 1 and "," not in named[0] else ""


def name_rollouts(job: ForeignJob, key: str, engine: object, way: str = "; give --rollout") -> None:
    """Says that an engine of its own generates what the step trains on: what it holds, and how
    long it takes, are not the figures'; transformers generates nothing."""
    job.options.setdefault("rollout", ELSEWHERE)
    job.leave_out(
        key,
        f"rollouts run on {engine or 'an engine of their own'}, which holds memory of its own and"
        f" takes time of its own{way}",
        memory=Difference.EITHER,
        time=Difference.EITHER,
        option="rollout",
    )


def give_rolled_length(
    job: ForeignJob,
    prompt: tuple[str, object],
    completion: tuple[str, object],
    *,
    usual: int = _ROLLED,
    whole: object = None,
    most: object = None,
) -> None:
    """A sequence is a prompt and what is generated after it, each given as (key, value); where the
    file does not say, a completion is `usual` tokens. `whole` is what both take together where no
    prompt's length is given, `most` what they may."""
    both = None if whole is None else values.count(whole, "max_length")
    added = usual if completion[1] is None else values.count(completion[1], completion[0])
    if completion[1] is None and both is not None and prompt[1] is not None:
        added = max(1, both - values.count(prompt[1], prompt[0]))
    if both is not None and added >= both and prompt[1] is None:  # bounded by the whole alone
        added = both - min(_ROLLED, both // 2)
        job.assume("completion", added, f"of {both} tokens, beside the prompt")
    elif completion[1] is None:
        job.assume("completion", added, f"{job.tool}'s {completion[0]}")
    else:
        job.give("completion", added)
    if prompt[1] is not None:
        job.give("ctx", values.count(prompt[1], prompt[0]) + added)
    elif both is not None and both > added:
        job.give("ctx", both)
    else:
        limit = added + _ROLLED if most is None else values.count(most, "max_model_len")
        length = min(added + _ROLLED, limit) if limit > added else added + _ROLLED
        job.assume("ctx", length, f"prompts of {length - added} tokens beside completions")


def give_old_logprobs(job: ForeignJob, *, engine: object, prefix: str = "") -> None:
    """TRL's arguments, with a `prefix` of their names: the policy scores its rollouts where an
    engine generates, which computes otherwise than the trainer, or where updates and rollouts are
    not aligned (trl 1.16 grpo_trainer.py _generate_and_score_completions)."""
    corrected = job.switch(f"{prefix}vllm_importance_sampling_correction", default=True)
    more, key = f"{prefix}num_iterations", f"{prefix}steps_per_generation"
    updates = values.count(job.take(more) or 1, more)
    accumulated = values.count(job.options.get("grad_accum", 1), "gradient_accumulation_steps")
    given = values.count(job.take(key) or accumulated, key)
    if (corrected and not is_off(engine)) or accumulated % (given * updates):
        job.give("old_logprobs", True)
    name = more if updates > 1 else key
    if updates > 1 or given != accumulated:
        job.leave_out(
            name,
            f"rollouts are made once for {given * updates} micro-steps; once a step is priced",
            memory=Difference.NONE if given == accumulated else Difference.EITHER,
            time=Difference.LESS if given * updates > accumulated else Difference.MORE,
        )


def give_scored_rows(job: ForeignJob, key: str, rows: int) -> None:
    """Rollouts that are scored at a time, other than the update takes; in a pipeline they are priced
    as many as the update takes."""
    if not rows or rows == values.count(job.options.get("bs", 1), "batch size"):
        return
    if "pp" not in job.options:
        job.give("score_bs", rows)
        return
    job.leave_out(
        key,
        f"{rows} sequences are scored at once; in a pipeline as many as an update takes are priced",
        memory=Difference.EITHER,
        time=Difference.EITHER,
    )


def name_epochs(job: ForeignJob, key: str, usual: int) -> None:
    """Says that a step updates the policy several times on what it has rolled out once."""
    number = values.count(job.take(key) or usual, key)
    if number > 1:
        job.leave_out(
            key, f"{number} updates follow one rollout; one is priced", time=Difference.MORE
        )


def name_lengths(job: ForeignJob, key: str, rows: int, longest: int) -> None:
    """Says that a micro-batch without padding holds what its sequences really have, which no file
    says: at most what is priced. Sources: verl workers/actor/dp_actor.py unpad_input; OpenRLHF
    models/actor.py forward (packing_samples)."""
    if "lengths" in job.given:
        return
    job.leave_out(
        key,
        f"{rows} sequences of {longest} tokens, the most they may have, are priced; their padding is"
        " removed: give --ctx the mean of what they have",
        memory=Difference.LESS,
        time=Difference.LESS,
        option="ctx",
    )


def read_flattened(job: ForeignJob, key: str, *, default: bool = False) -> None:
    """A switch that puts the sequences of a batch into one row, without padding (trl 1.16
    SFTConfig padding_free; swift/arguments/base_args/template_args.py at 3602360a5623). Packed
    rows are full, and a single sequence has no padding."""
    if not job.switch(key, default=default) or job.options.get("packing"):
        return
    kind = WorkloadKind(str(job.options.get("workload", "sft")))
    rows = values.count(job.options.get("bs", 1), "batch size") * RULES[kind].sequences
    length = job.options.get("ctx")
    if rows > 1 and length is not None and not RULES[kind].rolls_out:
        name_lengths(job, key, rows, values.count(length, "max_length"))


def give_reward_model(job: ForeignJob, key: str) -> None:
    """The model that scores answers, by the last part of its path; one that is not known is
    named."""
    given = str(job.take(key) or "")
    name = given.rstrip("/").rpartition("/")[2]
    if not given:
        return
    if find_row(name) is not None:
        job.give("teacher", name)
        return
    job.leave_out(
        key,
        f"the reward model {shown(given)} is not in the catalog; give --teacher",
        memory=Difference.MORE,
        time=Difference.MORE,
        option="teacher",
    )


def policy_alone_in_a_mesh(job: ForeignJob, key: str) -> None:
    """Prices the policy's own update where the mesh is one with which the workload is not priced
    (lowering/workload.py check_mesh): generation by transformers in any; in a pipeline a teacher,
    and reward models, whose meshes are their own. What is held beside the policy is named by the
    key that asks for it."""
    workload = job.options.get("workload")
    if workload is None or not any(axis in job.options for axis in _MESH):
        return
    rollout = job.given.get("rollout", job.options.get("rollout", "hf"))
    if RULES[WorkloadKind(workload)].rolls_out and rollout == "hf":
        policy_alone(job, key, "with tensor, pipeline, context or expert parallelism ")
    elif "pp" in job.options and "teacher" in job.options and "teacher_topk" not in job.options:
        policy_alone(job, key, "in a pipeline ")


def policy_alone(job: ForeignJob, key: str, when: str = "") -> None:
    """Prices the policy's own update, unless a workload is asked for beside the file."""
    if job.is_settled("workload"):
        return
    asked = job.options.get("workload")
    for option in _OF_WORKLOADS:
        job.options.pop(option, None)
    job.leave_out(
        key,
        f"{when}the update of the policy alone is priced, without what {asked} holds beside it",
        memory=Difference.MORE,
        time=Difference.MORE,
    )
