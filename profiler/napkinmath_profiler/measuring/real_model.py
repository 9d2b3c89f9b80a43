"""The traced model with real tensors: the same builders, random weights, nothing downloaded."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from napkinmath_profiler.trace import TraceOptions, build, optimizer_of, prepared
from napkinmath_profiler.tracing.kernel_patches import forward_arguments, libraries_restored
from napkinmath_profiler.tracing.meta_model import SEED, TrainMethod, example_inputs
from napkinmath_profiler.tracing.real_values import value_of

WEIGHT_STD = 0.02


@contextmanager
def real_model(config: Any, options: TraceOptions, device: str) -> Generator[nn.Module]:
    """``config``'s model on ``device`` as the user's libraries set it up for training; what patches
    changed is undone after the block.

    Weights that are to be quantized are made one at a time, so building takes little more memory
    than the finished model.
    """
    for library in ("bitsandbytes", "transformers"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    torch.manual_seed(SEED)
    with _linears_without_data() if options.method is TrainMethod.QLORA else nullcontext():
        model = build(config, options, device=device)
    with libraries_restored(model):
        model = prepared(model, options, device=device)
        _fill_in(model, device)
        yield model


def _fill_in(model: nn.Module, device: str) -> None:
    """Give data to the linears that were not quantized; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in made:
                    data = torch.empty_like(parameter.data, device=device).normal_(0.0, WEIGHT_STD)
                    made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])


@contextmanager
def _linears_without_data() -> Generator[None]:
    """``nn.Linear`` is born on meta inside the block."""
    original = nn.Linear.__init__

    def initialize(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "device": "meta"})

    with mock.patch.object(nn.Linear, "__init__", initialize):
        yield


def real_inputs(
    model: nn.Module, config: Any, options: TraceOptions, device: str
) -> dict[str, Any]:
    """A random batch with labels, of the shapes that the trace takes."""
    generator = torch.Generator().manual_seed(SEED)
    shaped = example_inputs(
        model,
        config,
        micro_batch_size=options.micro_batch_size,
        sequence_length=options.sequence_length,
        attention_mask=options.attention_mask,
        media=options.media,
    )
    batch: dict[str, Any] = {}
    for name, like in shaped.items():
        made = value_of(like)
        if made is None:
            made = torch.randn(like.shape, generator=generator).to(like.dtype)
        batch[name] = made.to(device, copy=True)
    return {**batch, **forward_arguments(options.loss)}


__all__ = ["optimizer_of", "real_inputs", "real_model"]
