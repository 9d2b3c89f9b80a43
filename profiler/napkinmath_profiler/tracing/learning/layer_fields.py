"""Which fields of a config count its layers or say what each is, and a shorter config that shows every
kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from napkinmath.models.image_models import VISION

# What transformers writes into every config and no forward of a causal model reads.
IGNORED = frozenset(
    {
        "transformers_version",
        "architectures",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "dtype",
        "torch_dtype",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "_name_or_path",
        "model_type",
        "use_cache",
        "initializer_range",
        "auto_map",
        "quantization_config",
        "_attn_implementation",
        "is_encoder_decoder",
    }
)
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


def layers_field(config: Mapping[str, Any]) -> str:
    """The field that counts layers."""
    names = (*LAYER_FIELDS, *(VISION + name for name in LAYER_FIELDS))
    return next((name for name in names if isinstance(config.get(name), int)), "")


def per_layer_fields(config: Mapping[str, Any], count: int) -> list[str]:
    """Lists with an entry for each layer."""
    return [
        name
        for name, value in config.items()
        if isinstance(value, list) and len(value) == count and name not in IGNORED
    ]


def index_fields(config: Mapping[str, Any], count: int) -> list[str]:
    """Lists of the numbers of some layers."""
    return [
        name
        for name, value in config.items()
        if "layer" in name and isinstance(value, list) and 0 < len(value) < count
        if all(type(index) is int and 0 <= index < count for index in value)
    ]


def shortened(config: Mapping[str, Any], more: int = 0) -> dict[str, Any]:
    """The config with as few layers as show every kind of its per-layer lists, and what a count of
    first layers asks for; `more` of them where it has more."""
    name, found = layers_field(config), dict(config)
    if not name:
        return found
    total = config[name]
    lists, indices = per_layer_fields(config, total), index_fields(config, total)
    kinds = [
        (*(str(config[one][i]) for one in lists), *(i in config[one] for one in indices))
        for i in range(total)
    ]
    wanted = next((n for n in range(1, total + 1) if len(set(kinds[:n])) == len(set(kinds))), total)
    leading = [
        value
        for key, value in config.items()
        if key.startswith(("first_k", "moe_layer_start", "num_dense")) and isinstance(value, int)
    ]
    wanted = max(2, wanted + 1, *(n + 2 for n in leading if n < total), 1)
    found[name] = min(wanted + more, total)
    for field_ in lists:
        found[field_] = list(config[field_])[: found[name]]
    for field_ in indices:
        found[field_] = [index for index in config[field_] if index < found[name]]
    for key, value in config.items():  # settings of single layers, by their number
        if isinstance(value, dict) and value and all(str(k).isdigit() for k in value):
            found[key] = {k: v for k, v in value.items() if int(k) < found[name]} or None
    return found
