"""verl's Hydra configuration of `verl.trainer.main_ppo`: nested, or keys written with their dots.

Keys and defaults: volcengine/verl verl/trainer/config/_generated_ppo_trainer.yaml and
_generated_ppo_megatron_trainer.yaml at b178a3cd56f5; what they do: verl/workers/fsdp_workers.py
(fp32 parameters, bf16 computation, fp32 reduction), verl/workers/actor/dp_actor.py. What is priced
is the update of the policy, with the reference, the critic under GAE, and the engine on its GPUs
where their type is known.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob, attention_word, dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.pins import pinned
from napkinmath.inputs.rollouts import (
    give_engine,
    give_reward_model,
    give_scored_rows,
    name_epochs,
    name_lengths,
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
from napkinmath.inputs.te_optimizer import read_precision_aware
from napkinmath.inputs.verl_fsdp import give_shards

_A, _M, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.ref."
_F, _G, _O = f"{_A}fsdp_config.", f"{_A}megatron.", "actor_rollout_ref.rollout."
_S = "reward.reward_model."
_OPTIMIZERS = {**OPTIMIZERS, "adamw": "adamw-foreach", "adam": "adamw-fused"}
_ESTIMATORS: dict[str, object] = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_passk": "grpo",
    "gdpo": "grpo",
    "opo": "grpo",
    "gpg": "grpo",
    "remax": "rloo",
    "rloo": "rloo",
    "reinforce_plus_plus": "rloo",
    "reinforce_plus_plus_baseline": "rloo",
}
# Keys of ppo_trainer.yaml in v0.1 to v0.3.0 that v0.4.0 and later refuse.
_GONE = (
    f"{_F}grad_offload",
    "critic.model.fsdp_config.grad_offload",
    "reward_model.model.fsdp_config.min_num_params",
    "trainer.remove_previous_ckpt_in_save",
    "trainer.val_generations_to_log_to_wandb",
)
# Hydra takes a key with a plus in front where a release has none of that name: v0.4.0 has these.
_NEWER = ("trainer.val_before_train", "trainer.rollout_data_dir", "trainer.validation_data_dir")
_OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer")
_ROWS = (
    Row("model", f"{_M}path"),
    Row("workload", "algorithm.adv_estimator", "ppo", _ESTIMATORS),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a verl file."""
    appends = any(key.lstrip("+") in _NEWER and key[0] == "+" for key in job.content)
    job.content = {key.lstrip("+"): value for key, value in job.content.items()}
    job.flatten()
    read_rows(job, _ROWS)
    _read_adapter(job)
    trainer, named = _release(job, appends=appends), _read_config_name(job)
    megatron = _is_megatron(job, named)
    gpus = world_size(job, per_node="trainer.n_gpus_per_node", nodes="trainer.nnodes") or 8
    job.give("gpus", gpus)
    data = _read_megatron(job, gpus) if megatron else _read_fsdp(job, gpus)
    _read_batch(job, data, removes=trainer == "verl")
    _read_step(job, megatron=megatron)
    _read_reference(job, always=trainer != "verl")
    skips = job.switch("algorithm.rollout_correction.bypass_mode")
    job.give("old_logprobs", not skips)  # trainer/ppo/ray_trainer.py fit
    name_epochs(job, f"{_A}ppo_epochs", 1)
    _read_entropy(job, 0 if trainer == "verl" else 0.001, megatron=megatron)
    _read_log_probs(job, data)
    _read_engine(job, trainer, megatron=megatron)
    shards = job.take(f"{_M}tiled_mlp.num_shards")
    if job.switch(f"{_M}tiled_mlp.enabled"):  # workers/config/model.py HFModelConfig.tiled_mlp
        job.give("mlp_tiles", shards or 4)
    policy_alone_in_a_mesh(job, "algorithm.adv_estimator")
    return job.finish()


def _is_megatron(job: ForeignJob, named: str) -> bool:
    """Whether Megatron trains, or FSDP. Raises InputError for another engine of verl's."""
    engine, strategy = job.take("model_engine"), job.take(f"{_A}strategy")
    strategy = str(strategy or (engine if engine not in (None, "dp") else "fsdp"))
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise InputError(
            f"verl trains this with {shown(strategy)}, an engine that is not read (fsdp, fsdp2 and"
            " megatron are); give its sharding with flags (`estimate --help`)"
        )
    return "megatron" in (strategy + named) or any(key.startswith(_G) for key in job.content)


def _release(job: ForeignJob, *, appends: bool) -> str:
    """The row of the releases that the file is for (catalog/rollout_trainers.py): as is asked for,
    as the file or its neighbours pin it, or as the file's own keys tell."""
    given = str(job.given.get("rollout_trainer", ""))
    where, version = pinned(job, "verl")
    old = [key for key in _GONE if job.take(key) is not None]
    if given.startswith("verl"):
        return given
    is_pinned_early = bool(version) and tuple(map(int, version.split("."))) < (0, 4)
    if not is_pinned_early and (version or not (old or appends)):
        return "verl"
    key = old[0] if old else f"+{_NEWER[0]}"
    why = f"{where} pins verl {version}" if version else f"{key} is of verl up to 0.3"
    job.note(
        f"{why}: --rollout-trainer verl-0.3, with its defaults (a reference, the entropy in the loss)"
    )
    return "verl-0.3"


def _read_entropy(job: ForeignJob, usual: float, *, megatron: bool) -> None:
    """The entropy of all tokens in the loss (workers/actor/dp_actor.py update_policy)."""
    factor = job.take(f"{_A}entropy_coeff")
    if is_off(usual if factor is None else factor):
        return
    if not megatron:
        job.give("entropy_loss", True)
        return
    job.leave_out(
        f"{_A}entropy_coeff",
        "Megatron's entropy of split logits is not priced",
        memory=Difference.MORE,
        time=Difference.MORE,
    )


def _read_config_name(job: ForeignJob) -> str:
    """The file below the overrides: verl's own for FSDP or Megatron, or one that is not here."""
    name = str(job.take("config-name", "config_name") or "ppo_trainer").removesuffix(".yaml")
    job.take("config-path", "config_path")
    if name not in _OWN_FILES:
        job.leave_out(
            "config-name",
            f"the file {shown(name)} is not read; put it where the script finds it",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    return name


def _read_engine(job: ForeignJob, trainer: str, *, megatron: bool) -> None:
    """The engine on the policy's GPUs: trainer/config/rollout/rollout.yaml; what waits on the host
    while it generates: workers/fsdp_workers.py rollout_mode, trainer_mode."""
    names = ("gpu_memory_utilization", "tensor_model_parallel_size", "n")
    share, tp, group = (job.take(f"{_O}{name}") for name in names)
    frees = job.switch(f"{_O}free_cache_engine", default=True)
    layered = job.switch(f"{_O}layered_summon")
    bucket = job.take(f"{_O}checkpoint_engine.update_weights_bucket_megabytes")
    at = _G if megatron else _F
    moves, states = job.switch(f"{at}param_offload"), job.switch(f"{at}optimizer_offload")
    settings = {
        "rollout_memory": share,
        "rollout_tp": tp,
        "rollout_group": group,
        # workers/rollout/vllm_rollout/vllm_rollout.py sleep_level
        "rollout_sleep": None if frees and not layered else int(frees),
        # utils/fsdp_utils.py layered_summon_lora_params, of adapters alone
        "rollout_sync": "layer" if layered and job.options["method"] == "lora" else None,
        "rollout_bucket": None if bucket is None or layered else f"{bucket}MiB",
        "rollout_offload": "policy" if moves else "optimizer" if states else None,
    }
    name = job.take(f"{_O}name") or "vllm"
    own = 0
    if (
        "rollout.n_gpus_per_node" in job.content
    ):  # experimental/one_step_off_policy, fully_async_policy
        own = degree(job, "rollout.n_gpus_per_node") * degree(job, "rollout.nnodes")
        job.take("actor_rollout_ref.hybrid_engine")
        settings |= {"rollout_sleep": None, "rollout_offload": None}
    give_engine(job, "actor_rollout_ref.rollout", name, trainer, settings, own_gpus=own)
    job.give("rollout_trainer", trainer)  # whose update it is, whoever generates


def _read_log_probs(job: ForeignJob, data: int) -> None:
    """Rows of the forwards that score answers: the most of the policy's and the reference's."""
    rows = [_scored(job, section, data) for section in (_O, _R)]
    give_scored_rows(job, f"{_O}log_prob_micro_batch_size_per_gpu", max(rows))


def _scored(job: ForeignJob, section: str, data: int) -> int:
    """Rows of a section's forward; 0 where nothing is said."""
    each = job.take(f"{section}log_prob_micro_batch_size_per_gpu")
    whole = job.take(f"{section}log_prob_micro_batch_size")
    tokens = job.take(f"{section}log_prob_max_token_len_per_gpu")
    by_tokens = job.take(f"{section}log_prob_use_dynamic_bsz")
    length = values.count(job.options["ctx"], "ctx")
    if by_tokens is None:
        by_tokens = job.content.get(f"{_A}use_dynamic_bsz", False)
    if values.switch(by_tokens, "log_prob_use_dynamic_bsz"):
        return _rows(tokens, length)
    return _rows(each) if each is not None else _rows(whole, data)


def _rows(given: object, divided: int = 1) -> int:
    return 0 if is_off(given) else values.count(given, "log_prob_micro_batch_size") // divided


def _read_adapter(job: ForeignJob) -> None:
    rank = job.take(f"{_M}lora_rank", f"{_M}lora.rank")
    alpha = job.take(f"{_M}lora_alpha", f"{_M}lora.alpha")
    targets = job.take(f"{_M}target_modules", f"{_M}lora.target_modules") or "all-linear"
    job.give("method", "full" if is_off(rank) else "lora")
    if not is_off(rank):
        job.give("rank", rank)
        job.give("alpha", alpha)
        job.give("targets", targets)


def _read_fsdp(job: ForeignJob, gpus: int) -> int:
    """Ranks that get data of their own. FSDP wraps the model on one GPU too
    (workers/fsdp_workers.py _build_model_optimizer), and computes as it does on several."""
    second = str(job.content.get(f"{_A}strategy", "fsdp")) == "fsdp2"
    ulysses = degree(
        job, f"{_A}ulysses_sequence_parallel_size", f"{_F}ulysses_sequence_parallel_size"
    )
    give_shards(job, _F, gpus, ulysses, second=second)
    if job.switch(f"{_F}offload_policy") and second:
        job.give("offload", "optimizer,parameters")
    return max(1, gpus // ulysses)


def _read_megatron(job: ForeignJob, gpus: int) -> int:
    """Ranks that get data of their own."""
    job.give("stack", "megatron")
    names = ("tensor_model", "pipeline_model", "context")
    sizes = [degree(job, f"{_G}{name}_parallel_size") for name in names]
    for option, size in zip(("tp", "pp", "cp"), sizes, strict=True):
        job.give(option, size if size > 1 else None)
    sequence = job.switch(f"{_G}sequence_parallel", default=True)
    job.give("sequence_parallel", sequence if sizes[0] > 1 else None)
    chunks = job.take(f"{_G}virtual_pipeline_model_parallel_size")
    if not is_off(chunks) and values.count(chunks, "virtual_pipeline") > 1 and sizes[1] > 1:
        job.give("pp_chunks", chunks)
        job.give("pp_schedule", "interleaved")
    outer = max(1, gpus // (sizes[0] * sizes[1]))
    experts = f"{_G}expert_model_parallel_size"
    give_experts(job, experts, tensor=sizes[0], data=outer, within=f"{_G}{WITHIN}")
    job.give("precision", dtype_word(job.take(f"{_G}dtype")) or "bf16")
    data = max(1, gpus // (sizes[0] * sizes[1] * sizes[2]))
    distributed = job.switch(f"{_G}use_distributed_optimizer", default=True)
    job.give("data_parallel", ["zero1" if distributed else "ddp"] if data > 1 else None)
    return data


def _lengths(job: ForeignJob) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, which turns of RAGEN share: it writes null for both, and
    an answer of `response_length` ends a sequence of `max_model_len`."""
    keys = ("data.max_prompt_length", "data.max_response_length")
    prompt, answer = (values.count(job.take(key) or 512, key) for key in keys)
    if any(job.content.get(key, key) is not None for key in keys):
        return prompt, answer
    most, turn = (job.take(f"{_O}{name}") for name in ("max_model_len", "response_length"))
    if most is None:
        job.refuse("ctx", "the file gives null for the lengths of prompts and of answers")
        return prompt, answer
    whole = values.count(most, "max_model_len", low=2)
    answer = min(whole - 1, values.count(turn or whole // 2, "response_length"))
    job.note(
        f"sequences of max_model_len, {whole} tokens, of which the last {answer} are an answer"
    )
    return whole - answer, answer


def _read_batch(job: ForeignJob, data: int, *, removes: bool) -> None:
    """Micro-batches of the update: so many sequences of prompt and answer, or so many tokens."""
    prompt, answer = _lengths(job)
    job.give("ctx", prompt + answer)
    job.give("completion", answer)
    each = job.take(f"{_A}ppo_micro_batch_size_per_gpu")
    whole = job.take(f"{_A}ppo_micro_batch_size")
    tokens = job.take(f"{_A}ppo_max_token_len_per_gpu")
    prompts = job.take(f"{_A}ppo_mini_batch_size") or 256
    answers = degree(job, "actor_rollout_ref.rollout.n")
    asked, drawn = values.count(prompts, "ppo_mini_batch_size"), job.take("data.train_batch_size")
    if drawn is not None:  # an update has no more prompts than were drawn
        asked = min(asked, values.count(drawn, "data.train_batch_size"))
    update = -(-asked * answers // data)
    if job.switch(f"{_A}use_dynamic_bsz"):
        most = values.count(16384 if tokens is None else tokens, "ppo_max_token_len_per_gpu")
        # utils/seqlen_balancing.py rearrange_micro_batches: as few as hold what there really is
        rows = max(1, most // (prompt + answer))
        each_of = f"{min(rows, update)} sequences of {prompt + answer} tokens"
        job.note(f"{each_of} are a micro-batch of at most {most} tokens")
    elif each is not None:
        rows = values.count(each, "ppo_micro_batch_size_per_gpu")
    elif whole is not None:
        rows = max(1, values.count(whole, "ppo_micro_batch_size") // data)
    else:
        rows = 1
        job.assume("bs", rows, "ppo_micro_batch_size_per_gpu is asked for by verl")
    rows = min(rows, update)
    if job.switch(f"{_M}use_remove_padding", default=removes) and rows > 1:
        name_lengths(job, "data.max_response_length", rows, prompt + answer)
    job.give("bs", rows)
    job.give("grad_accum", -(-update // rows))


def _read_step(job: ForeignJob, *, megatron: bool) -> None:
    read_rows(job, [Row("optimizer", f"{_A}optim.optimizer", words=_OPTIMIZERS)])
    job.options.setdefault("optimizer", "adamw-fused" if megatron else "adamw-foreach")
    if megatron:
        own = job.section(f"{_A}optim.override_optimizer_config")
        if own.switch("optimizer_cpu_offload"):
            job.give("offload", "optimizer")
            own.take("use_precision_aware_optimizer")  # which the offloading asks for
        else:
            read_precision_aware(own)
    clip = job.take(f"{_A}optim.clip_grad", f"{_A}grad_clip")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    on = job.switch(f"{_M}enable_gradient_checkpointing", default=not megatron)
    way = job.take(f"{_G}override_transformer_config.recompute_granularity")
    job.give("checkpointing", "full" if on or way == "full" else "none")
    if job.switch(f"{_M}enable_activation_offload"):
        job.give("offload", "activations")
    attention = job.take(f"{_M}override_config.attn_implementation") or "flash_attention_2"
    job.give("attention", attention_word(attention))
    if job.switch(f"{_M}use_liger"):
        job.give("kernels", "liger")
    if job.switch(f"{_M}use_fused_kernels"):
        job.give("loss", "fused")


def _read_reference(job: ForeignJob, *, always: bool) -> None:
    """A reference where its divergence is in the loss or the reward, or always (v0.3.0
    trainer/main_ppo.py)."""
    wanted = always | job.switch(f"{_A}use_kl_loss") | job.switch("algorithm.use_kl_in_reward")
    job.give("reference", wanted)
    offloaded = job.switch(f"{_R}fsdp_config.param_offload", f"{_R}megatron.param_offload")
    if offloaded and wanted and job.options["method"] == "full":
        job.give("reference_at", "offload")
    critic, policy = job.take("critic.model.path"), job.options.get("model")
    job.dismiss_alike(_R, _A)
    job.dismiss_alike("critic.", _A)
    job.dismiss_alike("critic.model.", _M)
    if job.options.get("workload") != "ppo":
        job.dismiss("critic.", "no critic is trained")
    elif critic not in (None, policy):
        job.leave_out(
            "critic.model.path",
            f"the critic {shown(critic)} is priced as a copy of the policy",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    _read_served_reward(job)
    if job.switch("reward_model.enable"):
        give_reward_model(job, "reward_model.model.path")
    else:
        job.dismiss("reward_model.", "reward_model.enable is off")
    if not wanted:
        job.dismiss(_R, "no reference is run")


def _read_served_reward(job: ForeignJob) -> None:
    """The reward model of releases with a section `reward`: an engine serves it, on the policy's
    GPUs or on its own (verl/trainer/config/reward/reward.yaml)."""
    if not job.switch(f"{_S}enable"):
        job.dismiss(_S, f"{_S}enable is off")
        return
    apart = job.switch(f"{_S}enable_resource_pool")
    where = "on GPUs of its own" if apart else "on the policy's GPUs"
    job.leave_out(
        f"{_S}model_path",
        f"the reward model {shown(job.content.get(f'{_S}model_path'))} is served by an engine"
        f" {where}, which is not priced",
        memory=Difference.NONE if apart else Difference.MORE,
        time=Difference.MORE,
    )
