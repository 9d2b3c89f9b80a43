"""Checkpoint units against the trace of torch.utils.checkpoint around the same layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lowering.both_ways import CLOSE, LLAMA, by_rules, differences, traced, train_config
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import RecomputeConfig, RecomputeKind
from napkinmath.lowering.recompute import LayerGroup, arrange, unit_size
from napkinmath.models.families import read_config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
MM = torch.ops.aten.mm.default


class CheckpointedLayers(nn.Module):
    """Layers run in a row inside one checkpoint."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def _run(self, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **rest)
        return x

    def forward(self, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        return checkpoint(partial(self._run, **rest), x, use_reentrant=False)


def grouped(size: int, model: Any) -> None:
    """Replaces the model's layers by checkpointed groups of `size`."""
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList(
        CheckpointedLayers(layers[i : i + size]) for i in range(0, len(layers), size)
    )
    model.model.config.num_hidden_layers = len(model.model.layers)


def every_kth(every: int, model: Any) -> None:
    """transformers' checkpointing of every k-th layer."""
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)


def selective(ops: list[Any], model: Any) -> None:
    """torch's selective activation checkpointing, saving the outputs of `ops`."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


@pytest.mark.parametrize("every", [2, 3, 5])
def test_units_of_k_layers(every: int) -> None:
    rules = by_rules(train_config(recompute=RecomputeConfig(kind=RecomputeKind.EVERY, every=every)))
    for phase, difference in differences(rules, traced(change=partial(grouped, every))).items():
        assert abs(difference) < CLOSE, (phase, difference)


@pytest.mark.parametrize("every", [2, 3])
def test_every_kth_layer_checkpointed(every: int) -> None:
    rules = by_rules(
        train_config(recompute=RecomputeConfig(kind=RecomputeKind.INTERLEAVED, every=every))
    )
    for phase, difference in differences(rules, traced(change=partial(every_kth, every))).items():
        assert abs(difference) < CLOSE, (phase, difference)


@pytest.mark.parametrize(
    ("keep", "ops"), [(("sdpa",), [FLASH]), (("linear",), [MM]), (("sdpa", "linear"), [FLASH, MM])]
)
def test_selective_policies(keep: tuple[str, ...], ops: list[Any]) -> None:
    rules = by_rules(
        train_config(recompute=RecomputeConfig(kind=RecomputeKind.SELECTIVE, keep=keep))
    )
    for phase, difference in differences(rules, traced(change=partial(selective, ops))).items():
        assert abs(difference) < CLOSE, (phase, difference)


def one_by_one(model: Any) -> None:
    """NeMo-RL 0.6 models/dtensor/parallelize.py: a layer's modules are checkpointed, not the layer."""
    for layer in model.model.layers:
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))


# The rule makes a whole layer anew at once, where the wrapper makes one module: at the backward's peak
# attention's activations are there too, beside those of the MLP.
A_LAYER_AT_ONCE = 0.06


def test_modules_that_are_checkpointed_one_by_one_keep_their_inputs() -> None:
    rules = by_rules(
        train_config(recompute=RecomputeConfig(kind=RecomputeKind.SELECTIVE, keep=("inputs",)))
    )
    found = differences(rules, traced(change=one_by_one))
    assert abs(found["forward"]) <= CLOSE
    assert 0 <= found["backward"] <= A_LAYER_AT_ONCE


def test_group_of_one_is_full() -> None:
    one, full = (
        by_rules(train_config(recompute=RecomputeConfig(kind=kind)))
        for kind in (RecomputeKind.EVERY, RecomputeKind.FULL)
    )
    assert one.peak().nbytes == full.peak().nbytes
    assert one.phase_peaks() == full.phase_peaks()


def test_remainder_forms_a_smaller_last_unit() -> None:
    stages = arrange(
        read_config({**LLAMA, "num_hidden_layers": 7}),
        RecomputeConfig(kind=RecomputeKind.EVERY, every=3),
    )
    groups = [(len(s.part.parts), s.count) for s in stages if isinstance(s.part, LayerGroup)]
    assert groups == [(3, 2), (1, 1)]


@pytest.mark.parametrize(("layers", "size"), [(1, 1), (4, 2), (16, 4), (32, 6), (80, 9)])
def test_square_root_units(layers: int, size: int) -> None:
    assert unit_size(RecomputeConfig(kind=RecomputeKind.SQRT), layers) == size


def test_selective_needs_the_nonreentrant_form() -> None:
    with pytest.raises(InputError, match="use_reentrant=False"):
        RecomputeConfig(kind=RecomputeKind.SELECTIVE, reentrant=True)
