"""Which trainer a script makes, by its class's name, and what a class of its own does otherwise."""

from __future__ import annotations

import ast

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.older_trl import refuse_older
from napkinmath.inputs.scripts.python_commands import methods_of
from napkinmath.inputs.scripts.python_values import Made
from napkinmath.inputs.trained_by import PLAIN_TRAINER, WORDS
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.python_keys import ScriptKeys

_OTHER_TRAINERS = ("CrossEncoderTrainer", "SetFitTrainer")
_SUBCLASSES = {
    "unsloth": "sft",
    "seq2seq": PLAIN_TRAINER,
    "": PLAIN_TRAINER,
    "unslothvision": "sft",
    "onlinedpo": "online-dpo",
    "nashmd": "nash-md",
}
# Words in the name of a script's own trainer, which extends the Trainer itself.
_OWN = ("grpo", "dpo", "kto", "orpo", "simpo", "reward", "ppo")
# Words with which a method leaves the optimizer to the Trainer.
_LEFT = ("super()", "optimizer_cls", "get_optimizer_cls_and_kwargs")


def keep_own_methods(trainer: Made, own: ast.ClassDef) -> None:
    """Says which of the Trainer's methods a script's class has anew: its loss, and an optimizer that
    is not the one its arguments name."""
    trainer.set("own_class", own.name, own.lineno)
    methods = methods_of(own)
    if (loss := methods.get("compute_loss")) is not None:
        trainer.set("own_loss", own.name, loss.lineno)
    made = methods.get("create_optimizer")
    if made is not None and not any(word in ast.unparse(made) for word in _LEFT):
        trainer.set("own_optimizer", own.name, made.lineno)


def trained_by_of(trainer: Made, path: str) -> str:
    """The word of a trainer's method. Raises InputError for one whose step is not priced."""
    if trainer.name in _OTHER_TRAINERS:
        raise InputError(
            f"{quoted(path)} trains with {trainer.name}, whose step is not priced; give a script"
            " that trains a language model"
        )
    refuse_older(trainer, path)
    word = trainer.name.removesuffix("Trainer").lower()
    args = trainer.keys.get("args")
    if word == "cpo" and isinstance(args, Made) and args.keys.get("loss_type") != "simpo":
        return word
    found = _SUBCLASSES.get(word, word)
    told = args.name.removesuffix("Config").lower() if isinstance(args, Made) else ""
    if "own_class" in trainer.keys and found == PLAIN_TRAINER and WORDS.get(told, "sft") != "sft":
        return told  # with the lengths and defaults of TRL's own arguments
    if found in WORDS or found == PLAIN_TRAINER:
        return found
    if not (isinstance(args, Made) and args.name.endswith("Config")) and any(
        own in word for own in _OWN
    ):
        return PLAIN_TRAINER  # a class that is imported: its name tells
    if isinstance(args, Made):  # a class of the script's own: its arguments tell
        other = args.name.removesuffix("Config").lower()
        return other if other in WORDS else PLAIN_TRAINER if "Arguments" in args.name else found
    return found


def read_own_trainer(keys: ScriptKeys, trainer: Made, trained_by: str) -> None:
    """A trainer class of the script's own: what its name says, and that its loss is another."""
    own = str(trainer.keys.get("own_class") or trainer.name).lower()
    if "own_optimizer" in trainer.keys:
        made = trainer.keys["own_optimizer"]
        keys.set("create_optimizer", made, trainer.lines["own_optimizer"])
    if "unread_class" in trainer.keys:
        keys.set("trainer_class", trainer.keys["unread_class"], trainer.line)
    told = next((word for word in _OWN if word in own), None)
    if told is not None and trained_by == PLAIN_TRAINER:
        keys.set("own_trainer", told, trainer.line)
    elif "own_loss" in trainer.keys:
        keys.set("compute_loss", trainer.keys["own_loss"], trainer.lines["own_loss"])
