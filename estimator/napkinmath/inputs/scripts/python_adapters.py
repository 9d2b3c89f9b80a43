"""Adapters that a script puts on a model: peft's functions and unsloth's methods.

Sources: peft 0.21 utils/other.py prepare_model_for_kbit_training; unsloth 2026.10 models/llama.py
get_peft_model, models/vision.py, models/sentence_transformer.py.
"""

from __future__ import annotations

from napkinmath.inputs.scripts.python_values import Made, filled, items_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from typing import Any

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel", "FastTextModel", "FastLlamaModel")
FAST_EMBEDDING = "FastSentenceTransformer"
_PACKS = ("load_in_4bit", "load_in_8bit")
# What the name of a checkpoint of packed weights says.
_PACKED_NAMES = ("gptq", "awq", "bit", "int4", "int8", "nf4", "aqlm", "eetq", "hqq")


def adapted(owner: str, given: list[Any], named: dict[str, Any], node: ast.Call) -> Made | None:
    """A model with an adapter, of peft's function or unsloth's method."""
    model = given[0] if given else named.get("model")
    if not isinstance(model, Made) or model.kind != "model":
        return None
    found = model.copied()
    if owner in (*UNSLOTH, FAST_EMBEDDING) or model.keys.get("unsloth"):
        words = _whole_embeddings({key: it for key, it in named.items() if key != "model"})
        adapter = filled("adapter", "unsloth", words, node, given[1:], ("r", "target_modules"))
        usual = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
        adapter.keys = {**usual, **adapter.keys}
        checkpoints = False if owner == FAST_EMBEDDING else "unsloth"
        checkpointing = adapter.keys.pop("use_gradient_checkpointing", checkpoints)
        line = adapter.lines.get("use_gradient_checkpointing", node.lineno)
        found.set("gradient_checkpointing", checkpointing, line)
        found.set("peft", adapter, node.lineno)
        return found
    config = given[1] if len(given) > 1 else named.get("peft_config")
    found.set("peft", config, node.lineno)
    return found


def _whole_embeddings(words: dict[str, Any]) -> dict[str, Any]:
    """unsloth trains embeddings that are targets whole (models/llama.py get_peft_model)."""
    targets = words.get("target_modules")
    if not isinstance(targets, (list, tuple)) or "embed_tokens" not in targets:
        return words
    saved: list[Any] = list(items_of(words.get("modules_to_save")) or ())
    return {
        **words,
        "target_modules": [one for one in targets if one != "embed_tokens"],  # type: ignore[misc]
        "modules_to_save": [*saved, "embed_tokens"],
    }


def prepared(given: list[Any], named: dict[str, Any], node: ast.Call) -> Made | None:
    """A model after peft's preparation of packed weights."""
    model = given[0] if given else named.get("model")
    if not isinstance(model, Made) or model.kind != "model":
        return None
    found = model.copied()
    if not _may_be_quantized(model):
        found.set("dtype", "float32", node.lineno)
        found.keys.pop("torch_dtype", None)
        return found
    second = given[1] if len(given) > 1 else True
    value = named.get("use_gradient_checkpointing", second)
    found.set("gradient_checkpointing", value, node.lineno)
    return found


def _may_be_quantized(model: Made) -> bool:
    """Whether a model may hold packed weights: of any other, peft's preparation makes all weights
    fp32 and turns no checkpointing on."""
    config = model.keys.get("quantization_config")
    held = config.keys if isinstance(config, Made) and config.kind == "quantization" else None
    if config is not None and held is None:
        return True
    asked = [keys.get(key) for keys in (model.keys, held or {}) for key in _PACKS]
    name = str(model.keys.get("model_name")).lower()
    return any(asked) or any(word in name for word in _PACKED_NAMES)
