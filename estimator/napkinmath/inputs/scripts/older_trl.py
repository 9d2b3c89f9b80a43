"""Trainers of TRL whose step was another one before they were written anew."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.python_values import Made

# What only the trainer of today takes (trl 0.12 trainer/ppo_trainer.py PPOTrainer.__init__).
_OF_TODAY = ("reward_model", "value_model", "train_dataset", "processing_class")
# What only the one before took: PPOTrainer(config, model, ref_model, tokenizer, dataset, ...).
_OF_BEFORE = ("config", "tokenizer", "dataset", "num_shared_layers")


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
            " (--workload ppo, `estimate --help`)"
        )
