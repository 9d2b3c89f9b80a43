"""Fields of a learned form beside its operations: a config made ready, defaults of a class, other
classes of a type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from napkinmath.models.image_models import VISION
from napkinmath.models.tasks import ANSWERS, CAUSAL, PICTURED, SEQUENCE, TOKENS, named_task

from napkinmath_profiler.tracing.learning.config_fields import (
    FoundFields,
    default_samples,
    full_config,
)
from napkinmath_profiler.tracing.learning.image_fields import SIDE_FIELD, is_of_images, with_side
from napkinmath_profiler.tracing.learning.layer_fields import decoders_field, layers_field
from napkinmath_profiler.tracing.learning.stage_fields import (
    are_entries,
    is_depth,
    is_entry,
    with_entries,
)
from napkinmath_profiler.tracing.learning.symbols import Fitting
from napkinmath_profiler.tracing.trace_errors import TraceError


def for_learning(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every field; a classifier's number of labels as a size."""
    whole = full_config(config)
    if is_of_images(config):
        whole = with_side(whole)
    ending = str((config.get("architectures") or [""])[0])
    if named_task(ending, CAUSAL) in (SEQUENCE, TOKENS, *PICTURED):
        names = whole.pop("id2label", None) or {}
        whole.pop("label2id", None)
        whole["num_labels"] = max(len(names), 2)
    return whole


def defaults_of(whole: Mapping[str, Any], found: FoundFields) -> dict[str, Any]:
    """What a field is where a config leaves it out: an expression in the others, or a value."""
    defaults: dict[str, Any] = {}
    nested = f"{VISION}model_type"
    given = {name: whole[name] for name in ("model_type", nested) if name in whole}
    for name in (*found.symbols, *found.ties):
        if is_entry(name):
            continue
        samples = default_samples(given, name, found)
        numbers = [number for _, number in samples]
        if not numbers or not all(isinstance(n, int) for n in numbers):
            continue
        try:
            defaults[name] = Fitting([bound for bound, _ in samples]).fit(numbers)
        except TraceError:
            continue
    plain = full_config(given)
    if are_entries(whole):
        plain = with_entries(plain)
        stages = (name for name in whole if is_depth(name) or name in found.symbols)
        defaults |= {name: plain[name] for name in stages if is_entry(name)}
    counted, decoders = layers_field(plain), decoders_field(plain)
    defaults["layers"] = plain.get(counted)
    if not counted:
        del defaults["layers"]
    if decoders:
        other = full_config({**given, counted: plain[counted] + 1})
        follows = other[decoders] == other[counted]
        defaults["decoder layers"] = None if follows else plain[decoders]
    for name in (*found.must, *found.nonzero, *found.thresholds):
        defaults[name] = plain.get(name)
    if SIDE_FIELD in found.symbols:  # of a class without the field, what it is learned with
        defaults.setdefault(SIDE_FIELD, whole[SIDE_FIELD])
    return defaults


def classes_of(model_type: str) -> list[str]:
    """Tasks beside its own for which transformers has a class of a type."""
    from transformers.models.auto import modeling_auto as auto

    mappings = {
        SEQUENCE: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        TOKENS: auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        ANSWERS: auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    }
    return [task for task, mapping in mappings.items() if model_type in mapping]


def moved_names(model_type: str) -> dict[str, list[str]]:
    """The parameters to which PEFT moves adapters from modules of transformers 4, by the end of
    their paths; empty for types that it does not translate."""
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_TARGET_MODULE_MAPPING,
    )

    pattern = _MODEL_TO_CONVERSION_PATTERN.get(model_type, "")
    found: dict[str, list[str]] = {}
    for old, new in _MOE_TARGET_MODULE_MAPPING.get(pattern, {}).items():
        found.setdefault(new, []).append(old)
    return found
