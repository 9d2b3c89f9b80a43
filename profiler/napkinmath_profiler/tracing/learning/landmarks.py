"""A model built to be learned from, and where its repeated layers and its head are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath.models.tasks import CAUSAL, PICTURED, SEQ2SEQ, named_task
from torch import nn

from napkinmath_profiler.tracing.layer_stacks import LayerStack, find_stacks
from napkinmath_profiler.tracing.learning.stage_fields import paths_of_stages
from napkinmath_profiler.tracing.learning.weight_rows import Landmarks
from napkinmath_profiler.tracing.meta_model import build_model, config_from, set_use_cache
from napkinmath_profiler.tracing.trace_errors import TraceError


def built(config: Mapping[str, Any], dtype: str, attention: str) -> nn.Module:
    """The model of a config, without storage, ready to be trained."""
    whole = config_from(copy.deepcopy(dict(config)))
    model = build_model(whole, dtype=dtype, attn_implementation=attention)
    set_use_cache(model, False)
    model.learned_stages = paths_of_stages(model, config)  # type: ignore[assignment]
    return model.train()


def landmarks(model: Any) -> Landmarks:
    """Where the repeated layers and the head are, and which task the class is of."""
    stacks = find_stacks(model)
    task = task_of(model)
    if task in PICTURED and getattr(model, "learned_stages", ()):
        return Landmarks("", "", task, stages=model.learned_stages)
    if task in PICTURED:
        apart = [x for x in stacks if len(x.kinds) == len(stacks[0].kinds)]
        return Landmarks(stacks[0].path if len(apart) == 1 else "", "", task)
    if not stacks:
        raise TraceError("it has no list of layers that repeat")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    paths = [path for path, module in model.named_modules() if module is head]
    if task == CAUSAL and (head is None or not paths):
        raise TraceError("it has no head over a vocabulary")
    layers, decoder = _both(stacks) if task == SEQ2SEQ else (stacks[0].path, "")
    return Landmarks(layers, paths[0] if head is not None and paths else "", task, decoder)


def task_of(model: Any) -> str:
    """The task of a model's class: of one that encodes and decodes, text from text."""
    task = named_task(type(model).__name__, CAUSAL)
    both = task == CAUSAL and getattr(model.config, "is_encoder_decoder", False)
    return SEQ2SEQ if both else task


def _both(stacks: Sequence[LayerStack]) -> tuple[str, str]:
    """Paths of the layers of an encoder and of a decoder, the longest of each."""
    decoders = [one.path for one in stacks if "decoder" in one.path]
    encoders = [one.path for one in stacks if "encoder" in one.path and one.path not in decoders]
    if not encoders or not decoders:
        raise TraceError("its encoder and its decoder have no lists of layers that repeat")
    return encoders[0], decoders[0]
