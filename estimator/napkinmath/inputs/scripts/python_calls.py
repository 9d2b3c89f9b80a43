"""What the calls of training libraries make: models, adapters, arguments, trainers.

Names and defaults: transformers 5.23 modeling_utils.py from_pretrained, BitsAndBytesConfig; peft 0.18
tuners/lora/config.py, utils/other.py prepare_model_for_kbit_training; TRL 1.x trainer/*; unsloth
2026.10 models/loader.py, models/llama.py; Lightning 2.5 trainer/trainer.py; argparse.
"""

from __future__ import annotations

import ast

from napkinmath.inputs.scripts.python_adapters import (
    FAST_EMBEDDING,
    UNSLOTH,
    adapted,
    loaded_by_unsloth,
    prepared,
)
from napkinmath.inputs.scripts.python_loops import OPTIMIZERS
from napkinmath.inputs.scripts.python_values import Made, Unknown, filled, unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_NO_MODELS = ("Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor", "Scheduler", "Dataset")
_ADAPTERS = ("LoraConfig",)
_OTHER_ADAPTERS = (
    *("IA3Config", "VeraConfig", "AdaLoraConfig", "LoHaConfig", "LoKrConfig", "OFTConfig"),
    *("BOFTConfig", "PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"),
    *("AdaptionPromptConfig", "FourierFTConfig", "RandLoraConfig", "MultitaskPromptTuningConfig"),
)
ARGUMENTS = (
    *("SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "GRPOConfig", "RLOOConfig"),
    *("RewardConfig", "PPOConfig", "GKDConfig", "PRMConfig", "BCOConfig", "OnlineDPOConfig"),
    *("XPOConfig", "NashMDConfig", "GOLDConfig", "AsyncGRPOConfig", "MiniLLMConfig"),
)
"""TRL's classes of arguments."""
_LIGHTNING = ("pl", "L", "lightning", "pytorch_lightning", "lit", "light")
# Defaults of TRL's ModelConfig (trl/trainer/model_config.py).
_MODEL_CONFIG: dict[str, object] = {
    **{"use_peft": False, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    **{"lora_target_modules": None, "lora_modules_to_save": None, "use_rslora": False},
    **{"use_dora": False, "load_in_4bit": False, "load_in_8bit": False, "dtype": "float32"},
    **{"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False, "attn_implementation": None},
    **{"trust_remote_code": False, "model_revision": "main"},
}


_EXCLUSIVE = "__exclusive__"
NOTHING = Made("nothing", "None", 0)
"""A call that is known to give None."""


REST = "**"
"""Where a call takes keywords of which only a run knows the names."""
# What such keywords most likely say, which is asked for where nothing else says it.
_ASKED = {
    "args": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "adapter": ("r",),
}


def made_by(
    name: str, real: str, given: list[Any], named: dict[str, Any], node: ast.Call
) -> Made | Unknown | tuple[Any, ...] | None:
    """What a call of this name makes; `real` is where the name's first part was imported from.
    None for a call that makes nothing known."""
    plain = {key: value for key, value in named.items() if key != REST}
    found = _known(name, real, given, plain, node)
    if REST in named and isinstance(found, Made):
        for key in _ASKED.get(found.kind, ()):
            if key not in found.keys:
                found.set(key, named[REST], node.lineno)
    return found


def _known(
    name: str, real: str, given: list[Any], named: dict[str, Any], node: ast.Call
) -> Made | Unknown | tuple[Any, ...] | None:
    parts = name.split(".")
    last = real.rpartition(".")[2] if real and len(parts) == 1 else parts[-1]
    owner = parts[-2] if len(parts) > 1 else ""
    if last in ("from_pretrained", "from_config"):
        return _loaded(owner, last, given, named, node)
    if last == "get_peft_model":
        return adapted(owner, given, named, node)
    if last in ("prepare_model_for_kbit_training", "prepare_model_for_int8_training"):
        return prepared(given, named, node)
    if last in _ADAPTERS or last in _OTHER_ADAPTERS:
        return filled("adapter", last, named, node, given, ("r", "lora_alpha"))
    if last.endswith("Config") and "BitsAndBytes" in last:
        return filled("quantization", last, named, node)
    if last == "Mxfp4Config" and named.get("dequantize") is True:
        return NOTHING  # weights in the type they are loaded in (quantizer_mxfp4.py)
    if last in ARGUMENTS or last.endswith("TrainingArguments"):
        return filled("args", last, named, node, given, ("output_dir",))
    if last.endswith("Trainer") and not last.startswith("Patch"):
        return _trainer(last, parts[0], real, given, named, node)
    if "sentence_transformers" in real and (last == "SentenceTransformer" or last.endswith("Loss")):
        return _embedding(last, named, given, node)
    if last == "ArgumentParser":
        return Made("parser", last, node.lineno)
    if last in ("HfArgumentParser", "TrlParser", "H4ArgumentParser"):
        return _dataclass_parser(node)
    if last == "ModelConfig":
        return of_model_config(last, named, node)
    if last in ("get_peft_config", "get_quantization_config") and isinstance(
        config := _first(given, named), Made
    ):
        return _of_model_config(last, config, node)
    if name == "deepspeed.initialize" or real == "deepspeed.initialize":
        words = {**named, "config": named.get("config", named.get("config_params"))}
        return filled("engine", last, words, node, given, ("args", "model", "optimizer"))
    if last == "DataLoader":
        return filled("loader", last, named, node, given, ("dataset", "batch_size"))
    if last == "Accelerator":
        return filled("accelerator", last, named, node)
    if last == "autocast" and not owner.startswith("accel"):
        return filled("autocast", last, named, node, given, ("device_type", "dtype"))
    if last in OPTIMIZERS or last == "Lion":
        # bitsandbytes' own AdamW keeps its states in fp32 (bitsandbytes 0.50 optim/adamw.py)
        kept = "32bit" if last in ("Adam", "AdamW") and _is_bitsandbytes(name, real) else ""
        return filled("optimizer", last + kept, named, node)
    return None


def _is_bitsandbytes(name: str, real: str) -> bool:
    return name.startswith(("bnb.", "bitsandbytes.")) or real.startswith("bitsandbytes")


def _first(given: list[Any], named: dict[str, Any]) -> Any:
    return given[0] if given else next(iter(named.values()), None)


def _of_model_config(
    what: str, config: Made, node: ast.Call
) -> Made | Unknown | tuple[Any, ...] | None:
    """TRL's get_peft_config and get_quantization_config: NOTHING where the switch is off."""
    if what == "get_peft_config":
        use = config.keys.get("use_peft")
        if use is not True:
            return NOTHING if use is False else unknown(node)
        words = {
            "r": config.keys.get("lora_r", 16),
            "lora_alpha": config.keys.get("lora_alpha", 32),
            "lora_dropout": config.keys.get("lora_dropout", 0.05),
            "target_modules": config.keys.get("lora_target_modules"),
        }
        return filled("adapter", "LoraConfig", words, node)
    bits = [key for key in ("load_in_4bit", "load_in_8bit") if config.keys.get(key)]
    if not bits:
        return NOTHING
    words = {
        **{key: config.keys[key] for key in bits},
        "bnb_4bit_quant_type": config.keys.get("bnb_4bit_quant_type", "nf4"),
        "bnb_4bit_use_double_quant": config.keys.get("use_bnb_nested_quant", False),
        "bnb_4bit_compute_dtype": config.keys.get("dtype") or config.keys.get("torch_dtype"),
    }
    return filled("quantization", "BitsAndBytesConfig", words, node)


def _loaded(
    owner: str, how: str, given: list[Any], named: dict[str, Any], node: ast.Call
) -> Made | None:
    """A model of from_pretrained or from_config; None where it is a tokenizer or the like."""
    if owner.endswith(_NO_MODELS):
        return None
    if owner == FAST_EMBEDDING:
        return _fast_embedding(named, given, node)
    if owner in UNSLOTH:
        found = filled("model", owner, named, node, given, ("model_name", "max_seq_length"))
        return loaded_by_unsloth(found, named, node)
    place = "config" if how == "from_config" else "pretrained_model_name_or_path"
    if owner.endswith("Config"):
        return filled("config", owner, named, node, given, (place,))
    if owner.startswith("Peft") or owner.startswith("AutoPeft"):
        base = next((one for one in (*given, *named.values()) if isinstance(one, Made)), None)
        if base is not None and base.kind == "model":
            found = base.copied()
            found.set("peft", unknown(node), node.lineno)
            return found
    elif "Model" not in owner and "For" not in owner and "LMHead" not in owner:
        return None
    found = filled("model", owner, named, node, given, (place,))
    source = found.keys.get("config") if how == "from_config" else None
    if isinstance(source, Made):
        found.keys |= source.keys
    name = found.keys.pop("pretrained_model_name_or_path", unknown(node))
    found.set("model_name", name, found.lines.get(place, node.lineno))
    if "peft_config" in found.keys:  # of TRL's models with a head (models/modeling_base.py)
        found.set("peft", found.keys.pop("peft_config"), node.lineno)
    return found


def _embedding(name: str, named: dict[str, Any], given: list[Any], node: ast.Call) -> Made:
    """A model of sentence-transformers, or one of its losses (sentence-transformers 6.2
    sentence_transformer/model.py, losses/*)."""
    if name.endswith("Loss"):
        return filled("loss", name, named, node, given, ("model", "loss"))
    found = filled("model", name, named, node, given, ("model_name_or_path",))
    loading: Any = found.keys.pop("model_kwargs", None)
    words: dict[str, Any] = loading if isinstance(loading, dict) else {}  # type: ignore[reportUnknownVariableType]
    for key, value in words.items():
        found.set(key, value, node.lineno)
    model = found.keys.pop("model_name_or_path", unknown(node))
    found.set("model_name", model, node.lineno)
    return found


def _fast_embedding(named: dict[str, Any], given: list[Any], node: ast.Call) -> Made:
    """unsloth's, in bf16 unless said (models/sentence_transformer.py from_pretrained)."""
    found = filled(
        "model",
        "SentenceTransformer",
        named,
        node,
        given,
        ("model_name", "max_seq_length", "dtype"),
    )
    found.set("fast_embedding", True, node.lineno)
    wide = named.get("load_in_16bit", True) is False
    found.keys["dtype"] = found.keys.get("dtype") or ("float32" if wide else "bfloat16")
    return found


def _trainer(
    last: str, first: str, real: str, given: list[Any], named: dict[str, Any], node: ast.Call
) -> Made:
    is_lightning = first in _LIGHTNING or "lightning" in real
    if last == "Trainer" and (is_lightning or {"devices", "accelerator"} & set(named)):
        return filled("lightning", last, named, node)
    places = ("model", "ref_model" if last == "DPOTrainer" else "args")
    if last == "GRPOTrainer":
        places = ("model", "reward_funcs", "args")
    return filled("trainer", last, named, node, given, places)


# ---------------------------------------------------------------- parsers


def _dataclass_parser(node: ast.Call) -> Made:
    found = Made("parser", "dataclasses", node.lineno)
    named = (k.value for k in node.keywords if k.arg == "dataclass_types")
    inner = node.args[0] if node.args else next(named, None)
    classes = inner.elts if isinstance(inner, (ast.Tuple, ast.List)) else [inner] if inner else []
    names = [n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in classes]
    found.keys["classes"] = names
    return found


def parsed(
    parser: Made,
    name: str,
    given: list[Any],
    named: dict[str, Any],
    node: ast.Call,
    told: Mapping[str, object],
) -> Any:
    """What a parser's methods give: an object of defaults, or one for each dataclass. What a
    command line has `told` counts before a default."""
    if name == "add_argument":
        _add_argument(parser, given, named, node, told)
        return None
    if name == "add_argument_group":
        return parser
    if name == "add_mutually_exclusive_group":
        group = Made("parser", _EXCLUSIVE, node.lineno)
        group.keys, group.lines = parser.keys, parser.lines
        parser.keys.setdefault(_EXCLUSIVE, []).append([])
        return group
    if name == "set_defaults":
        for key, value in named.items():
            parser.set(key, told.get(key, value), node.lineno)
        return None
    if name == "parse_known_args":
        return [_namespace(parser, node, told), unknown(node)]
    if name == "parse_args":
        return _namespace(parser, node, told)
    if name.startswith("parse_") and "classes" in parser.keys:
        made = [_of_class(one, node) for one in parser.keys["classes"]]
        made += [unknown(node)] if named.get("return_remaining_strings") is True else []
        return made[0] if name == "parse" and len(made) == 1 else made
    return unknown(node)


def _namespace(parser: Made, node: ast.Call, told: Mapping[str, object]) -> Made:
    """What a parser gives. A switch on the line turns off those that it excludes."""
    found = Made("object", "args", node.lineno)
    own = ("classes", _EXCLUSIVE)
    found.keys = {key: value for key, value in parser.keys.items() if key not in own}
    found.lines = dict(parser.lines)
    for group in parser.keys.get(_EXCLUSIVE, ()):
        if any(key in told for key in group):
            off = [key for key in group if key not in told and isinstance(found.keys[key], bool)]
            found.keys |= dict.fromkeys(off, False)
    return found


def _add_argument(
    parser: Made,
    given: list[Any],
    named: dict[str, Any],
    node: ast.Call,
    told: Mapping[str, object],
) -> None:
    names = [one for one in given if isinstance(one, str)]
    long = next((one for one in names if one.startswith("--")), names[0] if names else "")
    key = named.get("dest") or long.lstrip("-").replace("-", "_")
    if not isinstance(key, str) or not key:
        return
    action = named.get("action")
    words = [word for name in names if (word := name.lstrip("-").replace("-", "_")) in told]
    if words and names[0].startswith("-"):
        is_off = action == "store_false" and told[words[0]] is True
        value = not is_off if told[words[0]] is True else told[words[0]]
    elif "default" in named:
        value = named["default"]
    elif action == "store_true":
        value = False
    elif action == "store_false":
        value = True
    elif named.get("required") is True or not long.startswith("-"):
        value = Unknown(source=f"args.{key}", line=node.lineno)
    else:
        value = None
    parser.set(key, value, node.lineno)
    if parser.name == _EXCLUSIVE:
        parser.keys[_EXCLUSIVE][-1].append(key)


def _of_class(name: str, node: ast.Call) -> Made:
    """What a command line fills: nothing of it stands in the script."""
    if name in ARGUMENTS or name.endswith("TrainingArguments"):
        return Made("args", name, node.lineno)
    found = Made("object", name, node.lineno)
    if name == "ModelConfig":
        return of_model_config(name, {}, node)
    return found


def of_model_config(name: str, named: dict[str, Any], node: ast.Call) -> Made:
    """TRL's ModelConfig, or a class of a script's own that extends it."""
    found = filled("object", name, named, node)
    missing = {"model_name_or_path": unknown_of("model_name_or_path", node)}
    found.keys = {**missing, **_MODEL_CONFIG, **found.keys}
    return found


def unknown_of(key: str, node: ast.Call) -> Unknown:
    """What a command line sets and no default does."""
    return Unknown(source=f"--{key}", line=node.lineno)
