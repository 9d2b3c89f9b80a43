"""Trainers of TRL whose step was another one before they were written anew, and what tells their
releases."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.python_values import Made
from napkinmath.inputs.trained_by import WORDS
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.python_keys import ScriptKeys

# What only the trainer of today takes (trl 0.12 trainer/ppo_trainer.py PPOTrainer.__init__).
_OF_TODAY = ("reward_model", "value_model", "train_dataset", "processing_class")
# What only the one before took: PPOTrainer(config, model, ref_model, tokenizer, dataset, ...).
_OF_BEFORE = ("config", "tokenizer", "dataset", "num_shared_layers")

# What SFTTrainer and DPOTrainer took beside their arguments until TRL 0.12 (_deprecate_arguments).
_ONCE_GIVEN = (
    *("max_seq_length", "packing", "dataset_text_field", "dataset_num_proc", "dataset_kwargs"),
    *("neftune_noise_alpha", "beta", "loss_type", "max_length", "max_prompt_length"),
    *("max_target_length", "label_smoothing", "precompute_ref_log_probs", "model_init_kwargs"),
)


def refuse_older(trainer: Made, path: str) -> None:
    """Raises InputError for the PPOTrainer before TRL 0.12: a head of values sits on its policy,
    and a loop of the script generates and scores."""
    keys = trainer.keys
    if trainer.name != "PPOTrainer" or any(key in keys for key in _OF_TODAY):
        return
    first = keys.get("model")
    if getattr(first, "kind", "") == "args" or any(key in keys for key in _OF_BEFORE):
        raise InputError(
            f"{quoted(path)} trains with the PPOTrainer of TRL before 0.12, whose policy has a head"
            " of values in place of a critic, which is not priced; give the nearest run with flags"
            " (--model and --workload ppo, `estimate --help`)"
        )


def read_release(keys: ScriptKeys, trainer: Made) -> None:
    """What later releases of the trainer refuse."""
    own, args = trainer.name.removesuffix("Trainer"), trainer.keys.get("args")
    words = [name for name in _ONCE_GIVEN if name in trainer.keys] if own in ("SFT", "DPO") else []
    if words:
        keys.set("given_to_trainer", f"{trainer.name}'s {words[0]}", trainer.lines[words[0]])
    elif "tokenizer" in trainer.keys and own.lower() in (*WORDS, ""):
        word = "a trainer's tokenizer" if own else "Trainer's tokenizer"
        keys.set("given_to_trainer", word, trainer.lines["tokenizer"])
    elif isinstance(args, Made) and args.name == "SFTConfig" and "max_seq_length" in args.keys:
        word = "SFTConfig's max_seq_length"
        keys.set("given_to_trainer", word, args.lines.get("max_seq_length", args.line))
