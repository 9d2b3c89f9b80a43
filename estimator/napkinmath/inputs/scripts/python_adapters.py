"""Adapters that a script puts on a model: peft's functions and unsloth's methods.

Sources: peft 0.21 utils/other.py prepare_model_for_kbit_training; unsloth 2026.10 models/llama.py
get_peft_model, models/vision.py, models/sentence_transformer.py.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.python_values import (
    Made,
    Unknown,
    filled,
    is_plain,
    items_of,
    mapping_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from typing import Any

    from napkinmath.inputs.scripts.python_keys import ScriptKeys

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel", "FastTextModel", "FastLlamaModel")
FAST_EMBEDDING = "FastSentenceTransformer"
ADAPTS = ("LoraConfig", "get_peft_model", "get_peft_config")
"""Calls that make an adapter or put it on."""
# Texts of a function that gives the names of all linears.
_IN_LINEARS = {
    *("", ".", "lm_head", "embed_out", "score", "classifier"),
    *("mm_projector", "vision_tower", "vision_resampler", "visual", "vision_model"),
}
_PACKS = ("load_in_4bit", "load_in_8bit")
# How words about an adapter or packed weights begin.
_OF_ADAPTERS = ("lora_", "use_lora", "peft", "use_peft", "use_rslora", "use_dora", "load_in_")
# What the name of a checkpoint of packed weights says.
_PACKED_NAMES = ("gptq", "awq", "bit", "int4", "int8", "nf4", "aqlm", "eetq", "hqq")

# An argument of an adapter -> the key of a Trainer's file.
_OF_ADAPTER = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
}
_OF_BITSANDBYTES = (
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
)


def is_adapters(key: str) -> bool:
    """Whether a word of a script's own is about its adapter or packed weights."""
    return key.startswith(_OF_ADAPTERS)


def finds_linears(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function gives the names of all linears but the head, as find_all_linear_names of
    artidoro/qlora and its many copies do. It looks through the modules for a class. It names none
    but the head and parts of a picture's tower."""
    import ast

    text = ast.unparse(function)
    if "named_modules(" not in text or "isinstance(" not in text or "lm_head" not in text:
        return False
    docs = {ast.get_docstring(function, clean=False)}
    words = {
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return words - docs <= _IN_LINEARS


def adapted(owner: str, given: list[Any], named: dict[str, Any], node: ast.Call) -> Made | None:
    """A model with an adapter, of peft's function or unsloth's method."""
    model = given[0] if given else named.get("model")
    if not isinstance(model, Made) or model.kind != "model":
        return None
    found = model.copied()
    if model.keys.get("peft") is not None:
        found.set("second_adapter", True, node.lineno)
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


def loaded_by_unsloth(found: Made, named: dict[str, Any], node: ast.Call) -> Made:
    """A model of its from_pretrained: in 4 bits unless a word says otherwise. Raises InputError for
    8 bits beside them, with which it ends (models/loader.py FastModel.from_pretrained)."""
    found.keys = {"max_seq_length": 2048, "load_in_4bit": True, **found.keys}
    found.set("unsloth", True, node.lineno)
    name, config = found.keys.get("model_name"), found.keys.get("quantization_config")
    if found.keys.get("full_finetuning") is True:
        found.keys |= {"load_in_4bit": False, "load_in_8bit": False}
    elif isinstance(config, Made) and (kind := next(filter(config.keys.get, _PACKS), "")):
        found.keys |= dict.fromkeys(_PACKS, False) | {kind: True}
    elif isinstance(name, str) and name.lower().endswith("-bf16"):
        found.keys |= {"load_in_4bit": False, "load_in_8bit": False}
    elif found.keys.get("load_in_8bit") is True and found.keys["load_in_4bit"] is True:
        raise InputError(
            f"line {node.lineno} loads in 8 bits, and unsloth in 4 unless a word says otherwise: it"
            " ends with an error; write load_in_4bit=False beside it"
        )
    if found.keys["load_in_4bit"] is False:
        found.keys.pop("load_in_16bit", None)  # what it does then by itself
    return found


def with_adapter(passed: list[Made], node: ast.Call) -> Made | None:
    """What a function that is not followed gives: the model or parser that it was given, with the
    adapter beside it."""
    kept = next((one for one in passed if one.kind in ("model", "parser")), None)
    config = next((one for one in passed if one.kind == "adapter"), None)
    if kept is None or kept.kind != "model" or config is None:
        return kept
    found = kept.copied()
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
    keywords = mapping_of(named.get("gradient_checkpointing_kwargs"))
    if keywords:
        found.set("gradient_checkpointing_kwargs", keywords, node.lineno)
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


def read_quantization(keys: ScriptKeys, model: Made) -> None:
    """bitsandbytes' arguments with transformers' defaults: FP4, and products in fp32
    (transformers 5.17 utils/quantization_config.py BitsAndBytesConfig.__init__)."""
    config = model.keys.get("quantization_config")
    if isinstance(config, Made) and config.kind == "quantization":
        for key in _OF_BITSANDBYTES:
            if key in config.keys:
                keys.set(key, config.keys[key], config.lines[key])
        if config.keys.get("load_in_4bit"):
            kind = config.keys.get("bnb_4bit_quant_type", "fp4")
            keys.set("bnb_4bit_quant_type", kind, config.line)
            _read_product_type(keys, config.keys.get("bnb_4bit_compute_dtype"), config)
    elif config is not None:
        keys.set("load_in_4bit", config, model.line)
    elif model.keys.get("load_in_4bit") is True and model.name not in UNSLOTH:
        _read_product_type(keys, None, model)


def _read_product_type(keys: ScriptKeys, given: Any, made: Made) -> None:
    """One that a run works out is the precision's own."""
    if given is None:
        keys.set("default_compute_dtype", "float32", made.line)
    elif is_plain(given):
        keys.set("bnb_4bit_compute_dtype", given, made.lines["bnb_4bit_compute_dtype"])


def read_adapter(keys: ScriptKeys, adapter: Any, line: int) -> None:
    """LoRA's arguments with peft's defaults; another adapter is refused by name."""
    if not isinstance(adapter, Made):
        keys.set("use_peft", adapter, line)
        return
    if adapter.kind != "adapter":
        keys.set("use_peft", Unknown(source=adapter.name, line=line), line)
        return
    if adapter.name not in ("LoraConfig", "unsloth"):
        source = f"{adapter.name}, an adapter that is not read"
        keys.set("use_peft", Unknown(source=source, line=adapter.line), line)
        return
    keys.set("use_peft", True, line)
    defaults = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
    adapter.keys = {**defaults, **adapter.keys}
    parts = [adapter.keys.pop(f"finetune_{part}_layers", True) for part in ("vision", "language")]
    parts += [adapter.keys.pop(f"finetune_{p}_modules", True) for p in ("attention", "mlp")]
    if not all(parts):
        keys.set("finetuned_parts", "not all", line)
    if adapter.keys.get("bias") == "none":
        del adapter.keys["bias"]
    keys.take(adapter, _OF_ADAPTER)
