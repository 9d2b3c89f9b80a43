"""Training programs with a command line of their own, and the words that launch a training."""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.inputs.scripts import swift
from napkinmath.inputs.trained_by import WORDS


class Program(NamedTuple):
    """A training program with a command line of its own."""

    tool: str
    kinds: tuple[str, ...]
    """The readers that may have its keys."""
    verbs: tuple[str, ...] = ()
    """Its commands that train."""
    hydra: bool = False


# Its fine-tunings with adapters of its own (finetune_adapter, finetune_adapter_v2) are not priced.
_LITGPT = ("finetune", "finetune_lora", "finetune_full", "pretrain")
PROGRAMS = {
    "llamafactory-cli": Program("LLaMA-Factory", ("llama-factory", "llama-factory-1"), ("train",)),
    "lmf": Program("LLaMA-Factory", ("llama-factory", "llama-factory-1"), ("train",)),
    "axolotl": Program("axolotl", ("axolotl",), ("train",)),
    "tune": Program("torchtune", ("torchtune",), ("run",), hydra=True),
    "swift": Program("ms-swift", swift.TODAY, swift.VERBS),
    "megatron": Program("Megatron-SWIFT", ("megatron-swift",), ("sft", "rlhf", "pt")),
    "litgpt": Program("litgpt", ("litgpt",), _LITGPT),
    "autotrain": Program("AutoTrain", ("autotrain",), ("llm",)),
    "unsloth": Program("Unsloth Studio", ("unsloth",), ("train",)),
    "trl": Program("TRL", ("trainer",), tuple(word for word in WORDS if word != "pretrain")),
}
# The first part of a module's name -> its program; verbs are the end of the name.
MODULES = {
    "axolotl": PROGRAMS["axolotl"],
    "llamafactory": PROGRAMS["llamafactory-cli"],
    "swift": PROGRAMS["swift"],
    "trl": PROGRAMS["trl"],
    "verl": Program(
        "verl",
        ("verl", "verl-sft", "verl-engine-sft"),
        ("main_ppo", "fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray"),
        hydra=True,
    ),
    "recipe": Program("verl", ("verl",), ("main_dapo", "main_ppo"), hydra=True),
    "openrlhf": Program("OpenRLHF", ("openrlhf",)),
    "nemo_rl": Program("NeMo RL", ("nemo-rl",), hydra=True),
    "torchtitan": Program("torchtitan", ("torchtitan",)),
    "torchtune": PROGRAMS["tune"],
}
HYDRA = Program("verl", ("verl",), hydra=True)
STARTERS = ("torchrun", "accelerate", "deepspeed", "composer", "python", "python3", *PROGRAMS)
