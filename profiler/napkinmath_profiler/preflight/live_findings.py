"""Findings that only the live objects show: whose parameters the optimizer has, what is trained,
and the mode."""

from __future__ import annotations

from typing import Any

from napkinmath.answers.figures import Finding
from napkinmath.config.train_config import TrainConfig
from torch import nn

from napkinmath_profiler.preflight.live_optimizer import layers_of


def live_findings(model: nn.Module, optimizer: Any, config: TrainConfig) -> list[Finding]:
    """What makes the step train something else than what was priced, or nothing."""
    texts: list[str] = []
    trained = any(p.requires_grad for p in model.parameters())
    if not trained:
        texts.append(
            "no parameter requires a gradient, so nothing is trained: call"
            " requires_grad_(True) on what should be"
        )
    else:
        texts += _of_optimizer({id(p) for p in model.parameters()}, optimizer)
    if not config.training_mode:
        texts.append("the model is in eval mode, without dropout: call model.train()")
    return [Finding(text=text) for text in texts]


def _of_optimizer(all_of_model: set[int], optimizer: Any) -> list[str]:
    layers = layers_of(optimizer)
    if any(map(_is_deepspeed, layers)):
        return []  # it steps flat partitions of its own
    groups = getattr(layers[-1], "param_groups", None)
    if not groups:
        return []  # none, or a name of the catalogue's
    parameters = [p for group in groups for p in group["params"]]
    if any(type(p).__name__ == "FlatParameter" for p in parameters):
        return []  # FSDP's, which stand for the model's
    held = {id(p) for p in parameters}
    if not held & all_of_model:
        return [
            "the optimizer holds no parameter of this model, so its steps change nothing here:"
            " make it from model.parameters()"
        ]
    return []


def _is_deepspeed(optimizer: Any) -> bool:
    kind = type(optimizer)
    return "deepspeed" in f"{kind.__module__}.{kind.__name__}".lower()
