"""The words of litgpt's commands."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.scripts.words import Arguments


def name_litgpts(given: Arguments, base: Mapping[str, object], verb: str) -> None:
    """litgpt's first word is the checkpoint's folder or the model's name, and its command is the
    method (litgpt/__main__.py)."""
    key = "model_name" if verb == "pretrain" else "checkpoint_dir"
    if given.free:
        given.set(key, [given.free[0]])
    adapts = any(name.startswith("lora_") for name in (*given.content, *base))
    if verb in ("finetune", "finetune_lora") and not adapts:
        given.content["lora_r"] = 8  # finetune/lora.py setup
