"""The forms that a class runs by the types that a policy computes in and by its attention, each
recorded at several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from napkinmath.base.progress import counted
from torch import nn

from napkinmath_profiler.tracing.learning.blocks import cut
from napkinmath_profiler.tracing.learning.composites import Recorded
from napkinmath_profiler.tracing.learning.image_fields import fitting_of
from napkinmath_profiler.tracing.learning.landmarks import built, landmarks
from napkinmath_profiler.tracing.learning.pieces import ModelPieces
from napkinmath_profiler.tracing.learning.recording import outline, record
from napkinmath_profiler.tracing.learning.samples import (
    BASE,
    SampleSizes,
    Sizes,
    chunks_of,
    telling_apart,
)
from napkinmath_profiler.tracing.learning.single_rows import SINGLE
from napkinmath_profiler.tracing.learning.symbols import (
    Fitting,
    Recognising,
    UnknownSizeError,
    joined,
)

# name -> (type of the weights, autocast): the types that a policy computes in.
VARIANTS: dict[str, tuple[str, torch.dtype | None]] = {
    "half": ("bf16", None),
    "fp32": ("fp32", None),
    "autocast": ("fp32", torch.bfloat16),
    "autocast over quantized": ("fp32", torch.bfloat16),
}
OVER_QUANTIZED = "autocast over quantized"
"""Quantized linears hand back the type that they are given, whatever autocast says (bitsandbytes
nn/modules.py Linear4bit.forward)."""
MODES: dict[str, tuple[str, Recorded]] = {
    "rows": ("sdpa", Recorded()),
    "heads": ("eager", Recorded()),
    "eager": ("eager", Recorded(attention=False)),
}
"""Attention and what is recorded of it. Fused kernels leave the gradients of queries and keys with
the rows outside, other kernels with the heads; eager attention is operations like any other."""
RAW = Recorded(attention=False, masks=False)


def variants_of(
    samples: SampleSizes, modes: Mapping[str, tuple[str, Recorded]]
) -> tuple[dict[str, Any], list[int]]:
    """Every form by variant and mode, and the kind of each layer of the recorded model."""
    fittings = [
        fitting_of([one.bound for one in sizes], chunks_of(samples.short))
        for sizes in (samples.alone, samples.single_alone)
    ]
    variants: dict[str, Any] = {variant: {} for variant in VARIANTS}
    runs = [(variant, mode, False) for variant in VARIANTS for mode in modes]
    for mode, what in modes.items():
        if _is_other_at_one(samples.short, what):
            runs += [(variant, mode, True) for variant in VARIANTS]
    for variant, mode, single in counted(runs, "forms recorded", len(runs)):
        form = _form(samples, fittings[single], (variant, *modes[mode]), single=single)
        variants[variant][SINGLE * single + mode] = form
    return variants, merge_layers([form for modes in variants.values() for form in modes.values()])


def _form(
    samples: SampleSizes, fitting: Fitting, run: tuple[str, str, Recorded], *, single: bool
) -> dict[str, Any]:
    """One form: by few samples where those that moved alone have shown every size already."""
    few = samples.single_few if single else samples.few
    alone = samples.single_alone if single else samples.alone
    if fitting.expressions():
        few = telling_apart(few, alone, fitting.expressions())
        try:
            return _joined(few, Recognising([one.bound for one in few], fitting), run)
        except (UnknownSizeError, ValueError):
            pass
    return _joined(alone, fitting, run)


def _is_other_at_one(config: Mapping[str, Any], mode: tuple[str, Recorded]) -> bool:
    """Whether a batch of one row runs other operations."""
    model = built(config, "bf16", mode[0])
    names = [
        [(op[0], op[1]) for op in outline(model, batch=rows, length=BASE[1], how=mode[1])[0]]
        for rows in (1, BASE[0])
    ]
    return names[0] != names[1]


def _joined(
    sizes: Sequence[Sizes], fitting: Fitting, run: tuple[str, str, Recorded]
) -> dict[str, Any]:
    pieces = _samples(sizes, *run)
    return joined([plain(one) for one in pieces], fitting)  # type: ignore[return-value]


def merge_layers(forms: Sequence[dict[str, Any]]) -> list[int]:
    """Keeps one layer of each kind, alike in all forms; returns the kind of each layer."""
    seen: list[Any] = []
    kinds: list[int] = []
    for layer in zip(*(form["layers"] for form in forms), strict=True):
        if layer not in seen:
            seen.append(layer)
        kinds.append(seen.index(layer))
    for index, form in enumerate(forms):
        form["layers"] = [layer[index] for layer in seen]
    return kinds


def _samples(
    sizes: Sequence[Sizes], variant: str, attention: str, recorded: Recorded
) -> list[ModelPieces]:
    dtype = VARIANTS[variant][0]
    models: list[tuple[Mapping[str, Any], nn.Module]] = []
    found: list[ModelPieces] = []
    for one in sizes:
        model = next((m for config, m in models if config == one.config), None)
        if model is None:
            model = built(one.config, dtype, attention)
            if variant == OVER_QUANTIZED:
                _load_buffers_in_half(model, one.config, attention)
            models.append((one.config, model))
        found.append(_pieces(model, one.place, variant, recorded))
    return found


def _load_buffers_in_half(model: nn.Module, config: Mapping[str, Any], attention: str) -> None:
    """The buffers that have the type in which a model is loaded: preparing it for training over
    quantized weights widens its parameters alone (peft prepare_model_for_kbit_training)."""
    for (name, loaded), (_, kept) in zip(
        built(config, "bf16", attention).named_buffers(), model.named_buffers(), strict=True
    ):
        if kept.dtype is not loaded.dtype:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, kept.to(loaded.dtype))


def _pieces(
    model: nn.Module, place: tuple[int, ...], variant: str, recorded: Recorded
) -> ModelPieces:
    batch, length, *target = place
    recording = record(
        model,
        batch=batch,
        length=length,
        target=sum(target),
        autocast=VARIANTS[variant][1],
        how=replace(recorded, keeps_type=variant == OVER_QUANTIZED),
    )
    return cut(recording, model, landmarks(model))


def plain(pieces: ModelPieces) -> dict[str, Any]:
    """A model's blocks as data."""
    return {
        "entrance": pieces.entrance.plain(),
        "layers": [layer.plain() for layer in pieces.layers],
        **({"end": pieces.end.plain()} if pieces.end else {}),
        **({"middle": pieces.middle.plain()} if pieces.middle else {}),
        **({"between": [one.plain() for one in pieces.between]} if pieces.between else {}),
        "exit": pieces.exit.plain(),
        "after": pieces.after.plain() if pieces.after else None,
        "head": {"rows": pieces.head["rows"]} if pieces.head else {},
    }
