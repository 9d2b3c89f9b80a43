"""OpenRLHF's arguments by their dotted names: train_sft, train_dpo, train_rm and train_ppo_ray, and
train_ppo, which ended with 0.6.2.

Keys and defaults: OpenRLHF/OpenRLHF openrlhf/cli/train_*.py at 3c3be6234e0c; the settings of
DeepSpeed: openrlhf/utils/deepspeed/deepspeed_utils.py. Keys that only one script has say which
script runs.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs import deepspeed
from napkinmath.inputs.foreign import ForeignJob, attention_word, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.openrlhf_flat import with_dots
from napkinmath.inputs.pins import is_pinned_before
from napkinmath.inputs.rollouts import (
    give_engine,
    give_reward_model,
    give_scored_rows,
    name_epochs,
    name_lengths,
    name_rollouts,
    policy_alone_in_a_mesh,
)
from napkinmath.inputs.rows import Row, degree, read_rows, world_size
from napkinmath.inputs.trained_by import give_workload

_ESTIMATORS: dict[str, object] = {
    "gae": "ppo",
    "reinforce": "rloo",
    "reinforce_baseline": "rloo",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr-grpo",
}
_OPTIMIZERS: dict[str, object] = {"adam": "adamw-fused", "muon": "muon"}
_LORA = (
    Row("rank", "ds.lora.rank"),
    Row("alpha", "ds.lora.alpha", 16),
    Row("dropout", "ds.lora.dropout"),
    Row("targets", "ds.lora.target_modules", "all-linear"),
)
_RAY = ("actor.", "algo.", "critic.", "reward.", "vllm.", "train.colocate")
_ONE_PROCESS = "ppo"  # train_ppo, without Ray: all models in each rank's process
_REWARD = ("model.loss_type", "model.margin_loss_enable", "ds.value_head_prefix")
_PAIRS = ("data.chosen_key", "data.rejected_key", "model.beta", "ref.model_name_or_path")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of OpenRLHF's arguments."""
    job.flatten()
    job.content = with_dots(job.content)
    by_ray = any(key.startswith(_RAY) for key in job.content)
    job.give("model", job.take("actor.model_name_or_path", "model.model_name_or_path"))
    rows = (
        Row("ctx", "data.max_len", 2048),
        Row("bs", "train.micro_batch_size", 1 if by_ray else 8),
        Row("completion", "rollout.max_new_tokens"),
        Row("optimizer", "actor.optim optim", words=_OPTIMIZERS),
    )
    read_rows(job, rows)
    job.options.setdefault("optimizer", "adamw-fused")
    clip = job.take("actor.max_norm", "max_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    _read_adapter(job)
    prefix = "actor." if by_ray else "model."
    on = job.switch(f"{prefix}gradient_checkpointing_enable")
    reentrant = job.switch(f"{prefix}gradient_checkpointing_reentrant")
    job.give("checkpointing", "full" if on else "none")
    job.give("reentrant", reentrant if on else None)
    attention = job.take("ds.attn_implementation") or "flash_attention_2"
    job.give("attention", attention_word(attention))
    if job.switch("ds.use_liger_kernel"):
        job.give("kernels", "liger")
    packs = job.switch("ds.packing_samples")
    job.give("packing", packs or None)
    rows = values.count(job.options["bs"], "train.micro_batch_size")
    if packs and by_ray and rows > 1:
        name_lengths(job, "data.max_len", rows, values.count(job.options["ctx"], "data.max_len"))
    _read_mesh(job)
    if by_ray:
        _read_ray(job)
    else:
        _read_pairs(job)
    return job.finish()


def _read_adapter(job: ForeignJob) -> None:
    rank, quantizes = job.take("ds.lora.rank"), job.switch("ds.load_in_4bit")
    job.give("method", "full" if is_off(rank) else "lora")
    if is_off(rank):
        for row in _LORA:
            job.take(row.keys)
        return
    read_rows(job, _LORA)
    if quantizes:
        job.give("quant", "nf4")
        job.give("double_quant", True)


def _read_mesh(job: ForeignJob) -> None:
    """ZeRO over the GPUs of the actor, or over those given beside the file."""
    stage = job.take("ds.zero_stage")
    offloads, second = job.switch("ds.adam_offload"), degree(job, "ds.zpg")
    kind = dtype_word(job.take("ds.param_dtype")) or "bf16"
    zero: dict[str, object] = {"stage": 2 if stage is None else stage}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
    if second > 1:
        zero["zero_hpz_partition_size"] = second
    content: dict[str, object] = {"zero_optimization": zero, kind: {"enabled": True}}
    if summed := job.take("ds.grad_accum_dtype"):
        content["data_types"] = {"grad_accum_dtype": dtype_word(summed)}
    inner = ForeignJob("DeepSpeed", content, job.notes, keys="deepspeed")
    found = deepspeed.read(inner)
    for option in ("data_parallel", "zero_options", "offload", "precision", "reduce_dtype"):
        job.give(option, found.get(option))
    ring, tensor = degree(job, "ds.ring_attn_size"), degree(job, "ds.tensor_parallel_size")
    job.give("cp", ring if ring > 1 else None)
    job.give("tp", tensor if tensor > 1 else None)
    gpus = world_size(job, per_node="actor.num_gpus_per_node", nodes="actor.num_nodes")
    placed = any(key.startswith(_RAY) for key in job.content) and job.trained_by != _ONE_PROCESS
    if gpus is None and placed:
        gpus = 8  # actor.num_gpus_per_node
    job.give("gpus", gpus)
    whole = job.take("train.batch_size")
    if whole is not None and gpus is not None:
        rows = values.count(job.options["bs"], "train.micro_batch_size")
        data = max(1, gpus // (ring * tensor))
        job.give("grad_accum", max(1, values.count(whole, "train.batch_size") // (rows * data)))


def _read_pairs(job: ForeignJob) -> None:
    """Preferences or a reward model: by the program's name, or the keys that only their scripts
    have."""
    job.take(*_REWARD, *_PAIRS[:3])
    if job.trained_by:
        give_workload(job, "the program", job.trained_by)
    elif any(key in job.content for key in _REWARD):
        job.give("workload", "reward")
    elif any(key in job.content for key in _PAIRS):
        job.give("workload", "dpo")
        job.note("keys of pairs: taken as train_dpo; add --workload for another")
    if job.switch("ref.offload") and job.options.get("workload") == "dpo":
        job.give("reference_at", "offload" if job.options["method"] == "full" else None)
    reference = job.take("ref.model_name_or_path")
    if reference not in (None, job.options.get("model")):
        job.leave_out(
            "ref.model_name_or_path",
            f"the reference {shown(reference)} is priced as a copy of the model itself",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )


def _read_ray(job: ForeignJob) -> None:
    """Actor, critic, reference and reward model: on the actor's GPUs, or on their own."""
    read_rows(job, [Row("workload", "algo.advantage.estimator", "ppo", _ESTIMATORS)])
    shares = job.switch("train.colocate_all")
    divergence = job.take("algo.kl.init_coef")
    wanted = not is_off(0.01 if divergence is None else divergence)
    job.give("reference", wanted)
    job.give("old_logprobs", True)  # trainer/ppo_utils/experience_maker.py action_log_probs
    name_epochs(job, "train.max_epochs", 1)
    job.give("entropy_loss", not is_off(job.take("actor.entropy_coef")) or None)
    give_reward_model(job, "reward.model_name_or_path")
    if job.options.get("workload") != "ppo":
        job.dismiss("critic.", "no critic is trained")
    if job.trained_by == _ONE_PROCESS:
        _generate_with_actor(job)
        return
    if not shares:
        job.give("reference_at", "apart" if wanted and job.options["method"] == "full" else None)
        job.give("teacher_at", "apart" if "teacher" in job.options else None)
    _read_engines(job, shares=shares)
    scored = job.take("rollout.micro_batch_size")
    if scored is not None:
        give_scored_rows(job, "rollout.micro_batch_size", values.count(scored, "micro_batch_size"))
    early = is_pinned_before(job, "openrlhf", (0, 6))
    job.give("rollout_trainer", "openrlhf-0.5" if early else "openrlhf")  # whoever generates
    policy_alone_in_a_mesh(job, "algo.advantage.estimator")


def _generate_with_actor(job: ForeignJob) -> None:
    """train_ppo generates with transformers, so many sequences at a time, beside a critic, a
    reference and a reward model that ZeRO shards from stage 3 on (v0.6.1
    trainer/ppo_utils/experience_maker.py generate_samples, utils/deepspeed/deepspeed.py
    get_ds_eval_config). 15d31511 of March 2025 ends it."""
    job.give("rollout", "hf")
    job.give("rollout_trainer", "openrlhf-0.5")
    job.take("rollout.n_samples_per_prompt")  # of one prompt each is generated on its own
    job.give("score_bs", job.take("rollout.micro_batch_size") or 8)


def _read_engines(job: ForeignJob, *, shares: bool) -> None:
    """Engines on the actor's GPUs with train.colocate_all, unless they run beside the training
    (cli/train_ppo_ray.py), which on GPUs of their own is a step behind."""
    number = values.count(job.take("vllm.num_engines") or 0, "vllm.num_engines", low=0)
    names = ("gpu_memory_utilization", "tensor_parallel_size")
    share, tp = (job.take(f"vllm.{name}") for name in names)
    apart = job.switch("train.async_enable") or not shares
    ahead, sleeps = job.take("train.async_queue_size"), job.switch("vllm.enable_sleep")
    moves = job.switch("ds.enable_sleep")
    settings: dict[str, object] = {
        "rollout_memory": 0.95 if share is None else share,
        "rollout_tp": 1 if tp is None else tp,
        "rollout_group": job.take("rollout.n_samples_per_prompt"),
    }
    if apart:
        late = job.switch("train.async_enable")
        settings["rollout_staleness"] = (1 if ahead is None else ahead) if late else None
    else:
        settings["rollout_sleep"] = int(sleeps)  # trainer/ray/vllm_engine.py sleep: level 1
        # utils/deepspeed/deepspeed_utils.py offload_deepspeed_states: not the parameters
        settings["rollout_offload"] = (
            "optimizer" if moves and "offload" not in job.options else None
        )
    if not number:
        name_rollouts(job, "vllm.num_engines", "vLLM")
        return
    own = number * values.count(settings["rollout_tp"], "vllm.tensor_parallel_size")
    give_engine(job, "vllm.num_engines", "vllm", "openrlhf", settings, own_gpus=own if apart else 0)
