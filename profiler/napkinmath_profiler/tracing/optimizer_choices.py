"""Optimizers by the names of the core's catalog, each made by the library that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Parameters = list[nn.Parameter]
Factory = Callable[[Parameters], torch.optim.Optimizer]
LEARNING_RATE = 1e-3


def _torch(name: str, **options: Any) -> Factory:
    return lambda params: getattr(torch.optim, name)(params, lr=LEARNING_RATE, **options)


def _bitsandbytes(name: str) -> Factory:
    def make(params: Parameters) -> torch.optim.Optimizer:
        from napkinmath_profiler.tracing.quantized_model import bitsandbytes_package

        return getattr(bitsandbytes_package().optim, name)(params, lr=LEARNING_RATE)

    return make


def _transformers_adafactor(params: Parameters) -> torch.optim.Optimizer:
    """As the Trainer makes it (transformers trainer_optimizer.py)."""
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Factory] = {
    "sgd": _torch("SGD", foreach=True),
    "momentum": _torch("SGD", momentum=0.9, foreach=True),
    "adamw": _torch("AdamW", foreach=False),
    "adamw-foreach": _torch("AdamW", foreach=True),
    "adamw-fused": _torch("AdamW", fused=True),
    "adagrad": _torch("Adagrad", foreach=True),
    "rmsprop": _torch("RMSprop", foreach=True),
    "adafactor": _transformers_adafactor,
    "adamw-bnb": _bitsandbytes("AdamW"),
    "adamw-8bit": _bitsandbytes("AdamW8bit"),
    "paged-adamw": _bitsandbytes("PagedAdamW"),
    "paged-adamw-8bit": _bitsandbytes("PagedAdamW8bit"),
    "ademamix": _bitsandbytes("AdEMAMix"),
    "ademamix-8bit": _bitsandbytes("AdEMAMix8bit"),
    "paged-ademamix": _bitsandbytes("PagedAdEMAMix"),
    "paged-ademamix-8bit": _bitsandbytes("PagedAdEMAMix8bit"),
    "lion-bnb": _bitsandbytes("Lion"),
    "lion-8bit": _bitsandbytes("Lion8bit"),
    "paged-lion": _bitsandbytes("PagedLion"),
    "paged-lion-8bit": _bitsandbytes("PagedLion8bit"),
    "rmsprop-bnb": _bitsandbytes("RMSprop"),
    "rmsprop-8bit": _bitsandbytes("RMSprop8bit"),
}
