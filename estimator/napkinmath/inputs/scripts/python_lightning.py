"""Lightning's Trainer in the keys of the HF Trainer's file.

Source: Lightning 2.5 trainer/trainer.py, strategies/*.
"""

from __future__ import annotations

from napkinmath.inputs.known_keys import known_keys
from napkinmath.inputs.scripts.python_values import Made, Unknown, items_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.inputs.scripts.python_keys import ScriptKeys

GPUS = "gpus of Lightning"
"""The key of its processes, which is no key of the HF Trainer."""
_HALVES = {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16": "bf16", "16": "fp16"}


def read_lightning(keys: ScriptKeys, trainer: Made, loaders: list[Made]) -> None:
    """The arguments of Lightning's Trainer, and the batch of the last loader."""
    given = dict(trainer.keys)
    precision = str(given.pop("precision", None) or "32")
    half = _HALVES.get(precision)
    if half:
        keys.set(half, True, trainer.lines.get("precision", trainer.line))
    elif precision in ("bf16-true", "16-true"):
        keys.set("dtype", "bfloat16" if precision.startswith("bf") else "float16", trainer.line)
    steps = given.pop("accumulate_grad_batches", None)
    if steps is not None:
        keys.set("gradient_accumulation_steps", steps, trainer.lines["accumulate_grad_batches"])
    keys.set("max_grad_norm", given.pop("gradient_clip_val", None) or 0, trainer.line)
    _lightning_ranks(keys, given, trainer)
    loader = loaders[-1] if loaders else None
    size = loader.keys.get("batch_size", 1) if loader else Unknown(source="a loader", line=0)
    keys.set("per_device_train_batch_size", size, loader.line if loader else trainer.line)
    for key, value in given.items():
        if key in known_keys("scripts").known:
            keys.set(key, value, trainer.line)


def _lightning_ranks(keys: ScriptKeys, given: dict[str, Any], trainer: Made) -> None:
    """Devices, nodes and strategy; a strategy object by its class's name."""
    devices, nodes = given.pop("devices", 1), given.pop("num_nodes", 1)
    given.pop("accelerator", None)
    listed = items_of(devices)
    count = devices if listed is None else len(listed)
    line = trainer.lines.get("devices", trainer.line)
    if isinstance(count, int) and isinstance(nodes, int) and count > 0:
        if count * nodes > 1:
            keys.set(GPUS, count * nodes, line)
    elif isinstance(count, Unknown) or isinstance(nodes, Unknown):
        keys.set(GPUS, count if isinstance(count, Unknown) else nodes, line)
    strategy = given.pop("strategy", None)
    name = (strategy.name if isinstance(strategy, Made) else str(strategy or "")).lower()
    if "fsdp" in name:
        keys.set("fsdp", "full_shard", trainer.line)
    elif "deepspeed" in name:
        stage = next((digit for digit in name if digit in "123"), "2")
        zero: dict[str, object] = {"stage": int(stage)}
        if "offload" in name:
            zero["offload_optimizer"] = {"device": "cpu"}
        keys.set("deepspeed", {"zero_optimization": zero}, trainer.line)
    elif isinstance(strategy, Unknown):
        keys.set("fsdp", strategy, trainer.line)
