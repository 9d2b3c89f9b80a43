"""Which linears quantization leaves whole: counted against the modules that the installed
transformers would replace."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from agreement.tiny_configs import LLAMA_LIKE, TINY
from napkinmath.base.expr import Bindings, product
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import (
    AdapterConfig,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config
from napkinmath_profiler.tracing.meta_model import build_model, config_from

TIED_OLMO: dict[str, Any] = {"model_type": "olmo", **LLAMA_LIKE, "tie_word_embeddings": True}
# Ways whose parts are put together anew: layers in units, and every second layer.
KINDS = (RecomputeKind.NONE, RecomputeKind.SQRT, RecomputeKind.INTERLEAVED)


def packed(
    config: dict[str, Any],
    *,
    stack: str = "hf-bare",
    form: str = "nf4",
    kind: RecomputeKind = RecomputeKind.NONE,
) -> int:
    """Parameters in packed weights, by the rules."""
    settings = TrainConfig(
        micro_batch_size=2,
        sequence_length=64,
        adapter=AdapterConfig(targets=("none",)),
        quantization=QuantizationConfig(format=form),
        recompute=RecomputeConfig(kind=kind, every=2),
    )
    step = build_step(read_config(config), Policy(settings, STACKS[stack]))
    total = 0
    for run in step.runs:
        bindings = Bindings({**dict(step.spec.symbols), **dict(run.stage.symbols)})
        total += run.count * sum(
            int(bindings(product(w.axes))) for w in run.block.weights if w.constants
        )
    return total


def replaced_by_transformers(config: dict[str, Any]) -> int:
    """Parameters of the linears that replace_with_bnb_linear replaces."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_model(config_from(config), dtype="bf16", attn_implementation=None)
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, None, getattr(model, "_keep_in_fp32_modules", None)
    )
    modules = [
        (name, m)
        for name, m in model.named_modules()
        if type(m) is torch.nn.Linear or isinstance(m, Conv1D)
    ]
    return sum(m.weight.numel() for name, m in modules if should_convert_module(name, skipped))


# Mamba multiplies by dt_proj's weight itself, which fails where it is packed: the rules leave it
# whole.
READ_DIRECTLY = ("mamba", "jamba")


@pytest.mark.parametrize(
    "family", [name for name in (*TINY, "olmo tied") if name not in READ_DIRECTLY]
)
def test_packed_weights_are_those_that_transformers_replaces(family: str) -> None:
    config = dict(TINY.get(family, TIED_OLMO))
    assert packed(config) == replaced_by_transformers(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_head_behind_norms_without_weights_leaves_the_last_projection_whole(
    kind: RecomputeKind,
) -> None:
    whole = packed({**TIED_OLMO, "tie_word_embeddings": False}, kind=kind)
    down = int(LLAMA_LIKE["intermediate_size"]) * int(LLAMA_LIKE["hidden_size"])
    assert packed(TIED_OLMO, kind=kind) == whole - down


def test_transformers_4_left_a_classifier_with_a_bias_whole() -> None:
    config = dict(TINY["vit"])
    now, before = packed(config), packed(config, stack="hf-2023")
    assert now - before == int(config["hidden_size"]) * int(config.get("num_labels", 2))


def test_quantizers_that_walk_the_layers_leave_the_classifier_and_take_every_projection() -> None:
    vit = dict(TINY["vit"])
    assert packed(vit, form="gptq-int4") < packed(vit)
    untied = {**TIED_OLMO, "tie_word_embeddings": False}
    assert packed(TIED_OLMO, form="gptq-int4") == packed(untied, form="gptq-int4")
