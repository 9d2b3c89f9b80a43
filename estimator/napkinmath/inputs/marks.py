"""Trainers, each found by keys that only its files have: one row each."""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.base import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Marks(NamedTuple):
    """A trainer: its reader's module in this folder, and the dotted keys that tell its files."""

    tool: str
    module: str
    keys: tuple[str, ...]
    """All the keys of one of these, separated by spaces, are in every file of the tool."""


# The first row that a file matches is its trainer.
MORE_TRAINERS: dict[str, Marks] = {
    "openrlhf": Marks(
        "OpenRLHF",
        "openrlhf",
        (
            *("actor.model_name_or_path", "model.model_name_or_path ds", "ds.zero_stage"),
            *("model.model_name_or_path ds.param_dtype", "model.model_name_or_path train"),
            *("pretrain micro_train_batch_size", "pretrain zero_stage train_batch_size"),
        ),
    ),
    "torchtitan": Marks("torchtitan", "torchtitan", ("model.flavor",)),
    "megatron-swift": Marks(
        "Megatron-SWIFT",
        "megatron_swift",
        (
            *("tuner_type micro_batch_size", "tuner_type tensor_model_parallel_size"),
            *("train_type micro_batch_size", "train_type tensor_model_parallel_size"),
        ),
    ),
    "ms-swift": Marks(
        "ms-swift",
        "ms_swift",
        (
            *("tuner_type", "train_type rlhf_type", "train_type attn_impl"),
            *("train_type lora_rank", "train_type torch_dtype", "rlhf_type torch_dtype"),
        ),
    ),
    "ms-swift-2": Marks("ms-swift", "ms_swift_2", ("sft_type model_type",)),
    "verl": Marks(
        "verl",
        "verl",
        ("actor_rollout_ref", "actor_rollout_ref.model.path", "algorithm.adv_estimator"),
    ),
    "verl-sft": Marks("verl's SFT", "verl_sft", ("model.partial_pretrain",)),
    "verl-engine-sft": Marks(
        "verl's SFT", "verl_engine_sft", ("model.path data engine", "model.path data.train_files")
    ),
    "megatron-bridge": Marks(
        "Megatron-Bridge",
        "megatron_bridge",
        ("train.train_iters", "model.seq_length train", "model.tensor_model_parallel_size train"),
    ),
    "litgpt": Marks(
        "litgpt",
        "litgpt",
        ("train.micro_batch_size", "train.lr_warmup_steps", "checkpoint_dir lora_query"),
    ),
    "gpt-neox": Marks(
        "gpt-neox",
        "gpt_neox",
        (
            *(
                "num_layers pos_emb",
                "num-layers pos-emb",
                "num_layers attention_config",
                "num_layers train_micro_batch_size_per_gpu",
            ),
            *("pipe_parallel_size", "pipe-parallel-size"),
        ),
    ),
    "nanotron": Marks(
        "nanotron",
        "nanotron",
        (
            *("model.model_config tokens", "model.model_config parallelism"),
            "model.model_config.is_llama_config",
        ),
    ),
    "oumi": Marks("oumi", "oumi", ("training.trainer_type",)),
    "nemo-rl": Marks(
        "NeMo-RL",
        "nemo_rl",
        (
            "policy.model_name",
            *(
                f"defaults {section}"
                for section in ("policy", "grpo", "cluster", "data_plane", "data", "value", "sft")
            ),
        ),
    ),
    "open-instruct": Marks(
        "open-instruct",
        "open_instruct",
        (
            *("model_name_or_path max_seq_length with_tracking", "use_qlora use_lora"),
            *("model_name_or_path max_seq_length checkpointing_steps", "num_learners_per_node"),
            *("model_name_or_path dataset_mixer_list", "num_samples_per_prompt_rollout"),
            "model_name_or_path mixer_list",
        ),
    ),
    "slime": Marks("slime", "slime", ("megatron_arguments hf_checkpoint",)),
    "llm-foundry": Marks(
        "llm-foundry",
        "llm_foundry",
        ("model train_loader", "model.name device_train_microbatch_size"),
    ),
    "olmo-core": Marks("OLMo-core", "olmo_core", ("script cluster",)),
    "olmo": Marks("OLMo", "olmo", ("model.n_layers device_train_microbatch_size",)),
    "automodel": Marks(
        "NeMo Automodel",
        "automodel",
        ("step_scheduler.local_batch_size", "step_scheduler model"),
    ),
    "prime-rl": Marks(
        "prime-rl",
        "prime_rl",
        (
            *("orchestrator trainer", "orchestrator deployment", "orchestrator inference"),
            *("model.name data optim", "model.name deployment", "model.name data.batch_size"),
            *("rollouts_per_example env", "rollouts_per_example sampling"),
        ),
    ),
    "unsloth": Marks(
        "Unsloth Studio",
        "unsloth_studio",
        ("training.max_seq_length lora.lora_r", "training.batch_size training.training_type"),
    ),
    "autotrain": Marks(
        "AutoTrain", "autotrain", ("task base_model params", "task base_model data")
    ),
    "diffusers": Marks("diffusers", "diffusers", ("script pretrained_model_name_or_path",)),
    "musubi": Marks(
        "musubi-tuner",
        "musubi",
        ("network_module dit", "model_arguments.dit", "script dit"),
    ),
    "sd-scripts": Marks(
        "sd-scripts",
        "sd_scripts",
        (
            "pretrained_model_name_or_path network_module",
            "pretrained_model_name_or_path optimizer_type",
            "model_arguments.pretrained_model_name_or_path",
            *("LoRA_type network_dim", "max_resolution train_batch_size"),
        ),
    ),
    "diffusion-pipe": Marks(
        "diffusion-pipe", "diffusion_pipe", ("dataset model.type", "model.type optimizer.type")
    ),
    "onetrainer": Marks("OneTrainer", "onetrainer", ("training_method model_type",)),
    "simpletuner": Marks(
        "SimpleTuner",
        "simpletuner",
        (
            *("model_family model_type", "--model_family --model_type"),
            "model_family data_backend_config",
        ),
    ),
    "ai-toolkit": Marks("ai-toolkit", "ai_toolkit", ("config.process job",)),
}


# Tools whose files are known and not read, by keys that only theirs have, as above; some have keys
# of a trainer that is read. Files: inclusionAI/AReaL examples/ and its training/configs/ of 2025,
# alibaba/ROLL examples/, hiyouga/EasyR1 examples/config.yaml, RLinf/RLinf examples/, rllm-org/rllm
# rllm/trainer/config/.
_NOT_READ: dict[str, tuple[str, ...]] = {
    "AReaL's": ("experiment_name trial_name",),
    "ROLL's": ("actor_train actor_infer", "actor_train.training_args"),
    "EasyR1's": ("worker.actor.global_batch_size", "worker.actor.model.model_path"),
    "RLinf's": ("cluster.component_placement",),
    "rLLM's": ("stepwise_advantage workflow", "stepwise_advantage agent"),
    "Tinker's or Fireworks'": ("tinker_base_url", "fireworks_base_url"),
}


def tool_not_read(content: Mapping[str, object]) -> str:
    """Whose file it is, in words, where none of the readers reads that tool's; '' for another."""
    for tool, rows in _NOT_READ.items():
        if any(all(_has(content, key) for key in keys.split()) for keys in rows):
            return tool
    parts = content.get("defaults")
    composed = isinstance(parts, list) and not all(
        isinstance(part, str) and part.endswith((".yaml", ".yml"))
        for part in values.listed(parts)  # pyright: ignore[reportUnknownArgumentType]
    )
    own = any(_has(content, key) for key in ("actor_rollout_ref", "policy.model_name"))
    return "a part that Hydra puts together with others" if composed and not own else ""


def kind_by_marks(content: Mapping[str, object]) -> str | None:
    """The key in MORE_TRAINERS of the trainer whose file this is."""
    for kind, row in MORE_TRAINERS.items():
        if any(all(_has(content, key) for key in keys.split()) for keys in row.keys):
            return kind
    return None


def _has(content: Mapping[str, object], key: str) -> bool:
    """Whether a dotted key is there, nested or written with its dots."""
    if key in content:
        return True
    first, _, rest = key.partition(".")
    inner = content.get(first)
    return bool(rest) and values.is_mapping(inner) and _has(values.mapping(inner, first), rest)
