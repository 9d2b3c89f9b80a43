"""Which fields of a config a model's form turns on: found by changing each one and recording
again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from napkinmath.base.progress import counted
from napkinmath.models.learned import rope_type

from napkinmath_profiler.tracing.meta_model import config_from

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
OWN_RULE = frozenset({"tie_word_embeddings", "pad_token_id", "rope_parameters", "rope_scaling"})
"""Fields that the family reads itself."""
ROPE_TYPES = ("linear", "yarn", "llama3", "dynamic")
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Letters that reports and other rules know, for the usual names.
LETTERS = {
    "hidden_size": "h",
    "n_embd": "h",
    "d_model": "h",
    "num_attention_heads": "a",
    "n_head": "a",
    "num_key_value_heads": "k",
    "head_dim": "dh",
    "intermediate_size": "f",
    "n_inner": "f",
    "vocab_size": "v",
    "num_local_experts": "e",
    "num_experts": "e",
    "n_routed_experts": "e",
    "num_experts_per_tok": "topk",
    "moe_intermediate_size": "fe",
    "shared_expert_intermediate_size": "fs",
    "sliding_window": "w",
}
Trial = Callable[[Mapping[str, Any]], Any]
"""The outline of a config's forward; raises where its model cannot be built or run."""


@dataclass(slots=True)
class Found:
    """`symbols`: field -> (letter, value of the base, value under which its sizes were seen to
    move). `must`: field -> values under which the form was seen to be the same. `nonzero`: fields
    of which only this matters. Other fields change nothing."""

    symbols: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    must: dict[str, list[Any]] = field(default_factory=dict)
    nonzero: dict[str, bool] = field(default_factory=dict)


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field, defaults of the class filled in."""
    return dict(config_from(copy.deepcopy(dict(config))).to_dict()) | {
        "model_type": config["model_type"]
    }


def layers_field(config: Mapping[str, Any]) -> str:
    """The field that counts layers."""
    return next((name for name in LAYER_FIELDS if isinstance(config.get(name), int)), "")


def per_layer_fields(config: Mapping[str, Any], count: int) -> list[str]:
    """Lists with an entry for each layer."""
    return [
        name
        for name, value in config.items()
        if isinstance(value, list) and len(value) == count and name not in IGNORED
    ]


def shortened(config: Mapping[str, Any], most: int = 8) -> dict[str, Any]:
    """The config with as few layers as show every kind of its per-layer lists, and what a count of
    first layers asks for."""
    name, found = layers_field(config), dict(config)
    if not name:
        return found
    total = config[name]
    lists = per_layer_fields(config, total)
    kinds = [tuple(str(config[field_][i]) for field_ in lists) for i in range(total)]
    wanted = next((n for n in range(1, total + 1) if len(set(kinds[:n])) == len(set(kinds))), total)
    leading = [
        value
        for key, value in config.items()
        if key.startswith(("first_k", "moe_layer_start", "num_dense")) and isinstance(value, int)
    ]
    wanted = min(total, max(2, wanted + 1, *(n + 2 for n in leading if n < total), 1))
    found[name] = min(wanted, total) if wanted <= most or not lists else wanted
    for field_ in lists:
        found[field_] = list(config[field_])[: found[name]]
    for key, value in config.items():  # settings of single layers, by their number
        if isinstance(value, dict) and value and all(str(k).isdigit() for k in value):
            found[key] = {k: v for k, v in value.items() if int(k) < found[name]} or None
    return found


def examine(config: Mapping[str, Any], base: Any, trial: Trial) -> Found:
    """Changes every field of a short config, one at a time."""
    found, count = Found(), layers_field(config)
    for name, value in counted(config.items(), "fields of its config", len(config)):
        if name in IGNORED or name in OWN_RULE or name == count:
            continue
        if name.endswith("_token_id") or name in per_layer_fields(config, config.get(count, -1)):
            continue
        if isinstance(value, bool) or value is None or isinstance(value, (str, list, dict)):
            _examine_plain(found, config, name, base, trial)
        elif isinstance(value, int) and "chunk" in name:
            found.must[name] = [value]  # a length is counted in it
        elif isinstance(value, int):
            _examine_size(found, config, name, base, trial)
        elif isinstance(value, float):
            _examine_number(found, config, name, base, trial)
    return found


def _examine_size(
    found: Found, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    value = int(config[name])
    for other in _other_sizes(value):
        made = _tried({**config, name: other}, trial)
        if made is None:
            continue
        if made == base:
            return
        if same_form(made, base):
            taken = {letter for letter, _, _ in found.symbols.values()}
            letter = LETTERS.get(name, name)
            found.symbols[name] = (name if letter in taken else letter, value, other)
            return
    found.must[name] = [value]


def _other_sizes(value: int) -> Iterator[int]:
    if value > 0:
        yield from (2 * value, 3 * value)
        if value % 2 == 0:
            yield value // 2


def _examine_number(
    found: Found, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    value = config[name]
    if value and not _same(config, name, value * 1.5, base, trial):
        found.must[name] = [value]
        return
    for other in (0.0, None) if value else (0.125,):
        if not _same(config, name, other, base, trial):
            found.nonzero[name] = bool(value)
            return


def _examine_plain(
    found: Found, config: Mapping[str, Any], name: str, base: Any, trial: Trial
) -> None:
    value = config[name]
    if isinstance(value, bool):
        if not _same(config, name, not value, base, trial):
            found.must[name] = [value]
        return
    others: tuple[Any, ...] = (64, 0.5, True, "none") if value is None else ()
    if others and all(_same(config, name, other, base, trial) for other in others):
        return
    found.must[name] = [value]


def _same(config: Mapping[str, Any], name: str, other: Any, base: Any, trial: Trial) -> bool:
    made = _tried({**config, name: other}, trial)
    return made is not None and made == base


def rope_types(config: Mapping[str, Any], base: Any, trial: Trial) -> list[str]:
    """The rotary types under which the form stays: the config's own and what was tried."""
    own = config.get("rope_parameters")
    if not isinstance(own, dict):
        return []
    found = [rope_type(config)]
    for kind in ROPE_TYPES if "rope_type" in own else ():
        more = {
            "rope_type": kind,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        if kind not in found and _same(config, "rope_parameters", {**own, **more}, base, trial):
            found.append(kind)
    return found


def _tried(config: Mapping[str, Any], trial: Trial) -> Any:
    try:
        return trial(config)
    except Exception:  # whatever a class raises of a value that it does not take
        return None


def same_form(one: list[Any], other: list[Any]) -> bool:
    """Whether two outlines differ in nothing but sizes."""
    return _without_sizes(one) == _without_sizes(other)


def _without_sizes(outline: list[Any]) -> Any:
    ops, weights = outline
    bare = [
        (name, module, {k: v for k, v in facts.items() if k != "window"}, names, kinds)
        for name, module, facts, names, shapes in ops
        for kinds in ([(len(shape), dtype) for shape, dtype in shapes],)
    ]
    return bare, [(name, len(shape), dtype) for name, shape, dtype in weights]


def resolves_null(given: Mapping[str, Any], name: str) -> bool:
    """Whether the class puts a size in the place of a null."""
    try:
        return type(full_config({**given, name: None}).get(name)) is int
    except Exception:  # the class refuses it
        return False


def default_samples(
    given: Mapping[str, Any], name: str, found: Found
) -> list[tuple[dict[str, int], Any]]:
    """What a class makes of a field that a config does not give: for the base, and for each other
    size changed. Empty where it gives nothing."""
    rest = {key: value for key, value in given.items() if key != name}
    samples = []
    for changed in ("", *(other for other in found.symbols if other != name)):
        values = {field_: value for field_, (_, value, _) in found.symbols.items()}
        if changed:
            values[changed] = found.symbols[changed][2]
        config = {**rest, **{k: v for k, v in values.items() if k != name}}
        try:
            made = full_config(config).get(name)
        except Exception:  # the class refuses the combination
            return []
        samples.append(({found.symbols[k][0]: v for k, v in values.items()}, made))
    return samples
