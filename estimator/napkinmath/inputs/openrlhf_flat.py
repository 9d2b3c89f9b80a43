"""OpenRLHF's arguments before their names had dots: `--micro_train_batch_size 2`.

Source: OpenRLHF/OpenRLHF v0.8 openrlhf/cli/train_sft.py, train_dpo.py, train_rm.py,
train_ppo_ray.py, beside the names of 3c3be6234e0c for the same.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.inputs.known_keys import is_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_TELLING = ("micro_train_batch_size", "generate_max_len", "actor_num_gpus_per_node")
# The section of a name with dots -> the names before, each as it is or as `old:new`.
_SECTIONS = {
    "logger.": "logging_steps use_tensorboard:tensorboard_dir",
    "logger.wandb.": "use_wandb:key wandb_org:org wandb_group:group wandb_project:project"
    " wandb_run_name:run_name",
    "ckpt.": "save_path:output_dir save_steps ckpt_path:path save_hf_ckpt:save_hf"
    " disable_ds_ckpt:disable_ds max_ckpt_num:max_num max_ckpt_mem:max_mem"
    " load_checkpoint:load_enable",
    "eval.": "eval_steps:steps eval_dataset:dataset eval_split:split"
    " eval_temperature:temperature eval_n_samples_per_prompt:n_samples_per_prompt",
    "train.": "train_batch_size:batch_size micro_train_batch_size:micro_batch_size max_epochs"
    " num_episodes seed full_determinism:full_determinism_enable"
    " colocate_all_models:colocate_all colocate_actor_ref colocate_critic_reward"
    " async_train:async_enable async_queue_size agent_func_path enable_ema ema_beta"
    " use_dynamic_batch:dynamic_batch_enable train_max_tokens_per_gpu:max_tokens_per_gpu",
    "rollout.": "rollout_batch_size:batch_size micro_rollout_batch_size:micro_batch_size"
    " vllm_generate_batch_size n_samples_per_prompt generate_max_len:max_new_tokens top_p"
    " temperature rollout_max_tokens_per_gpu:max_tokens_per_gpu",
    "data.": "max_len max_samples dataset dataset_split prompt_data:prompt_dataset"
    " prompt_data_probs:prompt_probs dataset_probs prompt_split input_key output_key label_key"
    " chosen_key rejected_key prompt_key input_template apply_chat_template"
    " tokenizer_chat_template disable_fast_tokenizer multiturn image_key",
    "actor.": "actor_num_nodes:num_nodes actor_num_gpus_per_node:num_gpus_per_node eps_clip"
    " eps_clip_low_high dual_clip policy_loss_type entropy_loss_coef:entropy_coef",
    "critic.": "critic_num_nodes:num_nodes critic_num_gpus_per_node:num_gpus_per_node"
    " critic_pretrain:model_name_or_path freezing_actor_steps:freezing_steps value_clip"
    " save_value_network",
    "ref.": "ref_num_nodes:num_nodes ref_num_gpus_per_node:num_gpus_per_node"
    " ref_pretrain:model_name_or_path ref_offload:offload",
    "reward.": "reward_num_nodes:num_nodes reward_num_gpus_per_node:num_gpus_per_node"
    " reward_pretrain:model_name_or_path remote_rm_url:remote_url"
    " normalize_reward:normalize_enable reward_clip_range:clip_range overlong_buffer_len"
    " overlong_penalty_factor",
    "vllm.": "vllm_num_engines:num_engines vllm_tensor_parallel_size:tensor_parallel_size"
    " vllm_sync_backend:sync_backend vllm_sync_with_ray:sync_with_ray enable_prefix_caching"
    " enforce_eager vllm_enable_sleep:enable_sleep"
    " vllm_gpu_memory_utilization:gpu_memory_utilization",
    "algo.kl.": "kl_target:target kl_horizon:horizon init_kl_coef:init_coef kl_estimator:estimator"
    " use_kl_loss:use_loss",
    "algo.advantage.": "advantage_estimator:estimator lambd gamma no_advantage_std_norm:no_std_norm"
    " enable_vllm_is_correction:is_correction_enable",
    "algo.": "dynamic_filtering:dynamic_filtering_enable"
    " dynamic_filtering_reward_range:dynamic_filtering_range",
    "ds.": "zero_stage zpg adam_offload deepcompile use_liger_kernel grad_accum_dtype overlap_comm"
    " ds_tensor_parallel_size:tensor_parallel_size deepspeed_enable_sleep:enable_sleep"
    " packing_samples load_in_4bit ring_attn_size ring_head_stride:ring_attn_head_stride"
    " value_head_prefix use_ds_universal_ckpt:use_universal_ckpt attn_implementation",
    "ds.lora.": "lora_rank:rank lora_alpha:alpha lora_dropout:dropout target_modules",
    "adam.": "learning_rate:lr actor_learning_rate:lr critic_learning_rate:critic_lr"
    " adam_betas:betas l2:weight_decay",
    "model.": "beta aux_loss_coef loss:loss_type margin_loss:margin_loss_enable"
    " compute_fp32_loss:compute_fp32_loss_enable pretrain_mode:pretrain_mode_enable nll_loss_coef"
    " ipo:ipo_enable label_smoothing",
}
# Of the actor in reinforcement learning, of the model elsewhere.
_TRAINED = {
    "pretrain": "model_name_or_path",
    "gradient_checkpointing": "gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "gradient_checkpointing_reentrant",
}


def with_dots(content: Mapping[str, object]) -> dict[str, object]:
    """The arguments by their names of today; what is no name of before stays."""
    if not any(key in content for key in _TELLING):
        return dict(content)
    rolls = "generate_max_len" in content or "actor_num_gpus_per_node" in content
    names = {
        old: f"{section}{new or old}"
        for section, words in _SECTIONS.items()
        for old, _, new in (word.partition(":") for word in words.split())
    }
    names |= {old: f"{'actor' if rolls else 'model'}.{new}" for old, new in _TRAINED.items()}
    found = {names.get(key, key): value for key, value in content.items()}
    types = {kind: not is_off(found.pop(kind, None)) for kind in ("bf16", "fp16")}
    found["ds.param_dtype"] = next((kind for kind, is_on in types.items() if is_on), "fp32")
    flash = not is_off(found.pop("flash_attn", None))
    found.setdefault("ds.attn_implementation", "flash_attention_2" if flash else "eager")
    prompt = found.pop("prompt_max_len", 1024 if rolls else None)
    if prompt is not None:
        answer = values.count(found.setdefault("rollout.max_new_tokens", 1024), "generate_max_len")
        found.setdefault("data.max_len", values.count(prompt, "prompt_max_len") + answer)
    return found
