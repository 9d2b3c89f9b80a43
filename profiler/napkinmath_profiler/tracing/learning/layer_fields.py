"""Which fields of a config count its layers or say what each is, and a shorter config that shows every
kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from napkinmath.models.image_models import VISION

from napkinmath_profiler.tracing.learning.stage_fields import are_entries, shortened_stages

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
ENCODER_FIELDS = (
    "encoder_layers",
    "num_encoder_layers",
    "encoder_num_hidden_layers",
    "num_layers",
)
DECODER_FIELDS = ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers")
SIDES = ("encoder", "decoder")
"""Where a model has both, words of fields that are about one of its stacks."""
FEW_OF_BOTH = 3
"""Layers of an encoder and of a decoder that tell a first one from a last one."""


def decoders_field(config: Mapping[str, Any]) -> str:
    """The field that counts the layers of a decoder that reads an encoder; '' where there is none."""
    if not config.get("is_encoder_decoder"):
        return ""
    return next((name for name in DECODER_FIELDS if isinstance(config.get(name), int)), "")


def layers_field(config: Mapping[str, Any]) -> str:
    """The field that counts layers; those of the encoder where there is a decoder too; '' where each
    stage has a field of its own."""
    if are_entries(config):
        return ""
    if decoders_field(config):
        return next((name for name in ENCODER_FIELDS if isinstance(config.get(name), int)), "")
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
    found = shortened_stages(config, more)
    for name in filter(None, (layers_field(config), decoders_field(config))):
        _shorten(found, config, name, more)
    return found


def _shorten(found: dict[str, Any], config: Mapping[str, Any], name: str, more: int) -> None:
    """The same of the layers that one field counts."""
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
    if decoders_field(config):
        side = SIDES[name == decoders_field(config)]
        steps = [
            value
            for key, value in config.items()
            if key.startswith(side) and "step" in key and type(value) is int
        ]
        leading += [FEW_OF_BOTH - 2, *steps]
    wanted = max(2, wanted + 1, *(n + 2 for n in leading if n < total), 1)
    found[name] = min(wanted + more, total)
    for field_ in lists:
        found[field_] = list(config[field_])[: found[name]]
    for field_ in indices:
        found[field_] = [index for index in config[field_] if index < found[name]]
    for key, value in config.items():  # settings of single layers, by their number
        if isinstance(value, dict) and value and all(str(k).isdecimal() for k in value):
            found[key] = {k: v for k, v in value.items() if int(k) < found[name]} or None
