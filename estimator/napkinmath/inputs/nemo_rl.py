"""NeMo-RL's YAML: the policy of SFT, DPO, a reward model, distillation, GRPO or PPO, over DTensor
or Megatron.

Keys: NVIDIA-NeMo/RL examples/configs at 7ea279abfbeb, merged with the files that `defaults` names
(nemo_rl/utils/config.py). What they do: nemo_rl/models/automodel/setup.py (fp32 parameters under
FSDP 2, computed in `precision`, reduced in fp32), models/policy/workers/dtensor_policy_worker_v2.py
and megatron_policy_worker.py use_reference_model (the reference lies in host memory between uses, and
takes the policy's place for them), models/megatron/setup.py.
"""

from __future__ import annotations

from math import prod

from napkinmath.base import values
from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, dtype_word
from napkinmath.inputs.inheritance import with_parents
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rollouts import (
    give_engine,
    give_scored_rows,
    name_epochs,
    name_rollouts,
    policy_alone,
    policy_alone_in_a_mesh,
)
from napkinmath.inputs.rows import (
    OPTIMIZERS,
    WITHIN,
    Row,
    degree,
    give_experts,
    read_rows,
    world_size,
)
from napkinmath.inputs.te_optimizer import (
    is_transformer_engine,
    read_fused_adam,
    read_precision_aware,
)

_P, _D, _G = "policy.", "policy.dtensor_cfg.", "policy.megatron_cfg."
# The section of an algorithm -> our workload.
_ALGORITHMS = {
    "sft": "sft",
    "dpo": "dpo",
    "rm": "reward",
    "distillation": "distill",
    "on_policy_distillation": "distill",
    "ppo": "ppo",
    "grpo": "grpo",
}
# Attention, MLP and norms of a dense layer are checkpointed one by one (models/dtensor/parallelize.py;
# Automodel's apply_submodule_checkpointing); layers of its own experts are whole.
_BY_MODULES = "selective:inputs"
# An engine generates; without one the step that is priced is the policy's.
_REINFORCED = ("grpo", "ppo", "rloo")
_ROWS = (
    Row("model", f"{_P}model_name"),
    Row("ctx", f"{_P}max_total_sequence_length", 1024),
    Row("teacher", "teacher.model_name"),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a NeMo-RL file."""
    job.content = with_parents(job.content, job.path, job.tool)
    policy = job.content.get("policy")
    rollouts = values.mapping(policy, "policy").get("generation") if policy else None
    teachers, teacher = job.content.get("teachers"), job.content.get("teacher")
    job.flatten()
    read_rows(job, _ROWS)
    _read_teachers(job, teachers)
    workload = _workload(job)
    megatron = job.switch(f"{_G}enabled")
    job.take(f"{_D}enabled")
    gpus = _gpus(job, rollouts)
    job.give("gpus", gpus)
    data = _read_megatron(job, gpus) if megatron else _read_dtensor(job, gpus)
    unused, other = (_D, "DTensor") if megatron else (_G, "Megatron")
    job.dismiss(unused, f"{other}'s part of the file, which is off", whole=True)
    if megatron:
        for part in ("optimizer", "max_grad_norm"):
            job.dismiss(f"{_P}{part}", "DTensor's; Megatron has an own one", whole=True)
    _read_batch(job, data)
    _read_reference(job, workload)
    is_priced = workload in _REINFORCED and _read_engine(job, rollouts)
    if workload in _REINFORCED and not is_priced:
        policy_alone(job, _section(job))
    if workload == "distill":
        _read_distillation(job, teachers, teacher)
    policy_alone_in_a_mesh(job, _section(job))
    if workload == "distill":
        name_rollouts(job, "policy.generation", _inner(rollouts, "backend") or "vLLM")
    return job.finish()


def _read_teachers(job: ForeignJob, teachers: object) -> None:
    """The list of examples/configs/xtoken_off_policy_distillation.yaml: each entry is a whole
    policy of its own. The first one is priced."""
    names = [str(_inner(one, "model_name")) for one in values.listed(teachers or [])]
    if not names or is_off(names[0]) or "teacher" in job.options:
        return
    job.give("teacher", names[0])
    if len(names) > 1:
        job.leave_out(
            "teachers",
            f"{names[0]} is priced alone; {', '.join(names[1:])} score the batch too",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def _read_distillation(job: ForeignJob, teachers: object, teacher: object) -> None:
    """A single teacher hands on its largest logits (algorithms/distillation.py); those of a list hand
    on all (algorithms/xtoken_off_policy_distillation.py). Its mesh is its own."""
    kept = job.take("distillation.topk_logits_k")
    if teachers:
        return
    job.give("teacher_topk", 64 if kept is None else kept)
    job.dismiss("teacher.", "a teacher trains nothing, and has the student's mesh", whole=True)
    part, sizes = _D, ("tensor", "context")
    if job.options.get("stack") in ("nemo-rl", "nemo-rl-0.3"):
        part, sizes = _G, ("tensor_model", "pipeline_model", "context")
    names, of_teacher = [f"{name}_parallel_size" for name in sizes], part.split(".")[1]
    own = [_count(job.content.get(f"{part}{name}"), name) for name in names]
    its = [_count(_inner(teacher, of_teacher, name), name) for name in names]
    if own != its:
        splits = [prod(row[:2]) if part is _G else row[0] for row in (own, its)]
        less = splits[1] > splits[0] or (splits[0] == splits[1] and its[-1] > own[-1])
        job.leave_out(
            f"teacher.{of_teacher}",
            f"the teacher is priced on the student's mesh ({' x '.join(map(str, own))}), not its own"
            f" ({' x '.join(map(str, its))})",
            memory=Difference.LESS if less else Difference.MORE,
            time=Difference.EITHER,
        )
    rows = _count(_inner(teacher, "logprob_batch_size"), "logprob_batch_size")
    trained = _count(job.content.get(f"{_P}train_micro_batch_size"), "train_micro_batch_size")
    if rows != trained:
        job.leave_out(
            "teacher.logprob_batch_size",
            f"the teacher is priced at the student's {trained} rows at a time",
            memory=Difference.MORE if rows > trained else Difference.LESS,
        )


def _count(value: object, what: str) -> int:
    return values.count(value or 1, what)


def _read_engine(job: ForeignJob, rollouts: object) -> bool:
    """Whether the engine is priced, as it lies: on the policy's GPUs, or on its own, where it may
    run ahead of the training."""
    names = ("gpu_memory_utilization", "tensor_parallel_size")
    share, tp = (_inner(rollouts, "vllm_cfg", name) for name in names)
    own, ahead = _own_gpus(job, rollouts), job.content.get("grpo.async_grpo")
    settings: dict[str, object] = {
        "rollout_memory": share,
        "rollout_tp": 1 if tp is None else tp,
        "rollout_group": job.content.get(f"{_section(job)}.num_generations_per_prompt"),
    }
    if own and _inner(ahead, "enabled"):
        late = _inner(ahead, "max_trajectory_age_steps")
        settings["rollout_staleness"] = 1 if late is None else late
    engine = str(_inner(rollouts, "backend") or "vllm")
    for name in ("pipeline_parallel_size", "expert_parallel_size"):
        if _inner(rollouts, "vllm_cfg", name) not in (None, 1):
            engine = f"{engine} with {name}"
    return give_engine(job, "policy.generation", engine, "nemo-rl", settings, own_gpus=own)


def _section(job: ForeignJob) -> str:
    """The key that stands for the algorithm's section."""
    return next(name for name in _ALGORITHMS if _has(job, name))


def _has(job: ForeignJob, name: str) -> bool:
    on = not is_off(job.content.get(name, ""))
    return on or any(key.startswith(f"{name}.") for key in job.content)


def _workload(job: ForeignJob) -> str:
    named = next((name for name in _ALGORITHMS if _has(job, name)), None)
    if named is None:
        job.refuse("workload", "the algorithm of this NeMo-RL file is not one that is priced")
    found = _ALGORITHMS.get(named or "", "sft")
    if job.content.get("grpo.adv_estimator.name") == "reinforce_plus_plus":
        found = "rloo"
    if found != "sft":
        job.give("workload", found)
    return found


def _inner(section: object, *names: str) -> object:
    """A value within sections; None where one of them is not there."""
    for name in names:
        section = values.mapping(section, name).get(name) if values.is_mapping(section) else None
    return section


def _gpus(job: ForeignJob, rollouts: object) -> int:
    """GPUs of the training: those of the cluster, without those that only generate."""
    each = "cluster.gpus_per_node"
    gpus = world_size(job, per_node=each, nodes="cluster.num_nodes") or 1
    return gpus if "gpus" in job.given else max(1, gpus - _own_gpus(job, rollouts))


def _own_gpus(job: ForeignJob, rollouts: object) -> int:
    """GPUs that only generate."""
    if _inner(rollouts, "colocated", "enabled") in (None, True):
        return 0
    their_gpus, their_nodes = (
        _inner(rollouts, "colocated", "resources", name) for name in ("gpus_per_node", "num_nodes")
    )
    each = job.content.get("cluster.gpus_per_node")
    number = values.count(their_gpus or each or 1, "gpus_per_node")
    return number * values.count(their_nodes or 1, "num_nodes")


def _read_dtensor(job: ForeignJob, gpus: int) -> int:
    """Ranks that get data of their own."""
    job.give("stack", "nemo-rl-dtensor-0.3" if _is_early(job) else "nemo-rl-dtensor")
    tp, cp = (degree(job, f"{_D}{name}_parallel_size") for name in ("tensor", "context"))
    for option, size in (("tp", tp), ("cp", cp)):
        job.give(option, size if size > 1 else None)
    give_experts(job, f"{_D}expert_parallel_size", tensor=tp, data=max(1, gpus // tp))
    sequence = job.switch(f"{_D}sequence_parallel")
    job.give("sequence_parallel", sequence if tp > 1 else None)
    copies, offloads = degree(job, f"{_D}dp_replicate_size"), job.switch(f"{_D}cpu_offload")
    used = dtype_word(job.take(f"{_P}precision") or "bfloat16")
    job.give("precision", used if gpus > 1 or used == "fp32" else f"{used}-amp")
    if gpus > 1:
        job.give("data_parallel", ["fsdp2"])
        job.give("sync_each_batch", True)  # each backward of the workers reduces
        job.give("sharded_dtype", "fp32")
        job.give("reduce_dtype", "fp32")
        # rank 0 reads the model, the others make it of meta tensors; offloading pins nothing
        # (models/policy/workers/dtensor_policy_worker.py, models/automodel/setup.py)
        job.give("broadcast_loading", True)
        job.give("offload", "optimizer,parameters" if offloads else None)
        job.give("pinned", False if offloads else None)
        if copies > 1:
            job.give("sharding", "hybrid")
            job.give("shard_size", max(1, gpus // (tp * copies)))
    on = job.switch(f"{_D}activation_checkpointing")
    job.give("checkpointing", ("full" if "ep" in job.options else _BY_MODULES) if on else "none")
    if on and _is_early(job):
        job.leave_out(
            f"{_D}activation_checkpointing",
            "before release 0.4 the MLPs alone are checkpointed",
            memory=Difference.MORE,
            time=Difference.LESS,
        )
    _read_adapter(job, f"{_D}lora_cfg", job.switch(f"{_D}lora_cfg.match_all_linear", default=True))
    _read_optimizer(job)
    return max(1, gpus // (tp * cp))


def _is_early(job: ForeignJob) -> bool:
    """Whether the file is of a release before 0.4, by a key that all files dropped there."""
    return f"{_P}fsdp_offload_enabled" in job.content


def _read_adapter(job: ForeignJob, at: str, every: bool) -> None:
    on = job.switch(f"{at}.enabled")
    targets = values.listed(job.take(f"{at}.target_modules") or [])
    rows = (
        Row("rank", f"{at}.dim", 8),
        Row("alpha", f"{at}.alpha", 32),
        Row("dropout", f"{at}.dropout"),
    )
    job.give("method", "lora" if on else "full")
    if not on:
        job.dismiss(f"{at}.", "no adapters are trained")
        for row in rows:
            job.take(row.keys)
        return
    read_rows(job, rows)
    named = [str(name).lstrip("*").rpartition(".")[2] for name in targets]
    job.give("targets", "all-linear" if every or not named else named)


def _read_optimizer(job: ForeignJob) -> None:
    name = str(job.take(f"{_P}optimizer.name") or "torch.optim.AdamW")
    fused = job.switch(f"{_P}optimizer.kwargs.fused") or "fusedadam" in name.lower()
    foreach = job.take(f"{_P}optimizer.kwargs.foreach")
    found = OPTIMIZERS.get(name.rpartition(".")[2].lower())
    if found is None and not fused:
        job.refuse("optimizer", f"optimizer {shown(name)} of NeMo-RL is not modelled")
    adam = "adamw-fused" if fused else "adamw" if foreach is False else "adamw-foreach"
    job.give("optimizer", adam if found in (None, "adamw") else found)
    if is_transformer_engine(name):
        read_fused_adam(job, f"{_P}optimizer.kwargs.")
    clip = job.take(f"{_P}max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))


def _read_megatron(job: ForeignJob, gpus: int) -> int:
    """Ranks that get data of their own."""
    job.give("stack", "nemo-rl-0.3" if _is_early(job) else "nemo-rl")
    names = ("tensor_model", "pipeline_model", "context")
    tp, pp, cp = (degree(job, f"{_G}{name}_parallel_size") for name in names)
    for option, size in (("tp", tp), ("pp", pp), ("cp", cp)):
        job.give(option, size if size > 1 else None)
    experts, outer = f"{_G}expert_model_parallel_size", max(1, gpus // (tp * pp))
    give_experts(job, experts, tensor=tp, data=outer, within=f"{_G}{WITHIN}")
    sequence = job.switch(f"{_G}sequence_parallel")
    job.give("sequence_parallel", sequence if tp > 1 else None)
    used = dtype_word(job.take(f"{_P}precision") or "bfloat16")
    job.give("precision", "fp8" if job.switch(f"{_G}fp8_cfg.enabled") else used)
    data = max(1, gpus // (tp * pp * cp))
    distributed = job.switch(f"{_G}optimizer.use_distributed_optimizer", default=True)
    job.give("data_parallel", ["zero1" if distributed else "ddp"] if data > 1 else None)
    summed = job.take(f"{_G}distributed_data_parallel_config.grad_reduce_in_fp32")
    job.give("reduce_dtype", None if summed is None else "fp32" if summed else "bf16")
    on = job.switch(f"{_G}activation_checkpointing")
    way = str(job.take(f"{_G}recompute_granularity") or "full")
    job.give("checkpointing", "full" if on and way == "full" else "none")
    if on and way != "full":
        job.leave_out(
            f"{_G}recompute_modules",
            "which modules are recomputed is not read; give --checkpointing",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="checkpointing",
        )
    _read_adapter(job, f"{_G}peft", every=False)
    words: dict[str, object] = {"adam": "adamw-fused", "sgd": "sgd", "muon": "muon"}
    read_rows(job, [Row("optimizer", f"{_G}optimizer.optimizer", words=words)])
    job.options.setdefault("optimizer", "adamw-fused")
    read_precision_aware(job, f"{_G}optimizer.", job.content.get(f"{_G}fp8_cfg.fp8_recipe"))
    clip = job.take(f"{_G}optimizer.clip_grad")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    return data


def _read_batch(job: ForeignJob, data: int) -> None:
    """Micro-batches of whole rows, or packs and mixes of as many tokens."""
    length = values.count(job.options["ctx"], "max_total_sequence_length")
    rows = values.count(job.take(f"{_P}train_micro_batch_size") or 1, "train_micro_batch_size")
    scored = values.count(job.take(f"{_P}logprob_batch_size") or 1, "logprob_batch_size")
    key = f"{_P}logprob_batch_size"
    for section in ("sequence_packing", "dynamic_batching"):
        at = f"{_P}{section}."
        tokens, scores = job.take(f"{at}train_mb_tokens"), job.take(f"{at}logprob_mb_tokens")
        if not job.switch(f"{at}enabled"):
            job.dismiss(at, f"{section} is off")
        elif isinstance(tokens, int):
            rows = max(1, tokens // length)
            key = f"{at}logprob_mb_tokens"
            scored = scores // length if isinstance(scores, int) else rows
            job.give("packing", True if section == "sequence_packing" else None)
    job.give("bs", rows)
    if _has(job, "grpo"):
        give_scored_rows(job, key, scored)
    whole = job.take(f"{_P}train_global_batch_size")
    step = rows * data if whole is None else values.count(whole, "train_global_batch_size")
    job.give("grad_accum", max(1, step // (rows * data)))


def _read_reference(job: ForeignJob, workload: str) -> None:
    """A reference of reinforcement where its divergence counts; DPO has one always."""
    if workload in _REINFORCED:
        factor = job.take("loss_fn.reference_policy_kl_penalty")
        skipped = job.switch(f"{_section(job)}.skip_reference_policy_logprobs_calculation")
        job.give("reference", not is_off(0.01 if factor is None else factor) and not skipped)
        # algorithms/grpo.py skip_prev_logprobs
        aligned = job.switch("loss_fn.force_on_policy_ratio")
        checked = job.content.get("grpo.seq_logprob_error_threshold") is not None
        job.give("old_logprobs", checked or not aligned)
        if workload == "ppo":
            name_epochs(job, "ppo.ppo_epochs", 1)
    if job.options.get("reference") is not False and job.options.get("method") == "full":
        holds = workload in (*_REINFORCED, "dpo")
        job.give("reference_at", "swap" if holds else None)
