"""A live optimizer by the name that the catalogue of optimizers has for it."""

from __future__ import annotations

from typing import Any

import torch
from napkinmath.base.errors import InputError
from napkinmath.catalog.optimizers import find_optimizer

from napkinmath_profiler.tracing.trace_errors import TraceError

TORCH = {"SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop", "Muon": "muon"}
# bitsandbytes' class names without "Paged", "8bit" and "32bit"
BITSANDBYTES = {
    "Adam": "adamw",
    "AdamW": "adamw",
    "Lion": "lion",
    "AdEMAMix": "ademamix",
    "RMSprop": "rmsprop",
}
OTHERS = {
    "GaLoreAdamW": "galore",
    "Adafactor": "adafactor",
    "Lion": "lion",
    "AnyPrecisionAdamW": "anyprecision-adamw",
    "APOLLOAdamW": "apollo",
    "AdamWScheduleFree": "schedule-free-adamw",
    "RAdamScheduleFree": "schedule-free-radam",
    "SGDScheduleFree": "schedule-free-sgd",
}
MOST_WRAPPERS = 16  # around an optimizer or a model; a mock has one in another without end


def layers_of(optimizer: Any) -> list[Any]:
    """The optimizer and what is in it, outermost first: accelerate's and DeepSpeed's wrappers hold
    another. Raises TraceError where they never end."""
    layers = [optimizer]
    while hasattr(layers[-1], "optimizer"):
        if len(layers) > MOST_WRAPPERS:
            raise TraceError(
                f"optimizer {type(optimizer).__name__} holds an optimizer that holds another without"
                " end; give the torch optimizer itself"
            )
        layers.append(layers[-1].optimizer)
    return layers


def optimizer_name(optimizer: Any) -> str:
    """The catalogue's name of ``optimizer``; raises TraceError for one that it lacks."""
    optimizer = layers_of(optimizer)[-1]
    kind, home = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if home == "bitsandbytes":
        return _known(_of_bitsandbytes(kind, optimizer), optimizer)
    if home == "torch" and kind in ("Adam", "AdamW", "NAdam", "RAdam"):
        return _torch_adam(optimizer)
    if home == "torch" and kind == "SGD" and optimizer.defaults.get("momentum"):
        return "momentum"
    return _known(TORCH.get(kind) or OTHERS.get(kind) or kind.lower(), optimizer)


def _torch_adam(optimizer: Any) -> str:
    """foreach is torch's choice on CUDA where neither is said."""
    defaults = optimizer.defaults
    if defaults.get("fused"):
        return "adamw-fused"
    return "adamw" if defaults.get("foreach") is False else "adamw-foreach"


def _of_bitsandbytes(kind: str, optimizer: Any) -> str:
    plain = kind.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    base = BITSANDBYTES.get(plain, plain.lower())
    is_paged = bool(getattr(optimizer, "is_paged", False))
    is_8bit = (
        kind.endswith("8bit") or getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8
    )
    if is_8bit:
        return f"{'paged-' if is_paged else ''}{base}-8bit"
    return f"paged-{base}" if is_paged else base if base == "ademamix" else f"{base}-bnb"


def _known(name: str, optimizer: Any) -> str:
    try:
        return find_optimizer(name).name
    except InputError as unknown:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise TraceError(
            f"optimizer {kind} is not in the catalogue; say which is nearest with"
            " optimizer='adamw-fused' or another name"
        ) from unknown


def state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's states on an accelerator; 0 of one that has made none yet, or is only
    a name."""
    optimizer = layers_of(optimizer)[-1]
    states = getattr(optimizer, "state", None) or {}
    tensors = [
        value
        for state in states.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cuda")
