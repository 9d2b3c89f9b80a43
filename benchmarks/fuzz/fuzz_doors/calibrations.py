"""Calibration files: `--calibration FILE` with changed rates, curves, devices and layers."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

from napkinmath.calibration.measured_layers import (
    KindStretches,
    LayerMemory,
    LayerPoint,
    Linear,
    MeasuredLayers,
    Stretch,
    Turn,
    layers_key,
    to_json,
)
from napkinmath.catalog.gpus import find_gpu
from napkinmath.inputs.jobs import priced
from napkinmath.timing.efficiency import default_efficiency

from fuzz_doors.door import Case, Door, figures
from fuzz_doors.draw import TINY_ARCH, as_json, changed_tree, often

GPU = "T4"
_PHASES = ("forward", "backward", "optimizer step")


@functools.cache
def _key() -> str:
    """The key of the layers of the tiny model as this door asks about it."""
    options = {"arch": TINY_ARCH[1], "ctx": TINY_ARCH[3], "gpu": GPU}
    found = priced(options, [])[0]
    return layers_key(found.spec, found.config, found.step.update.optimizer.name)


@functools.cache
def _rates() -> dict[str, Any]:
    """Every rate of the GPU as its datasheet implies it."""
    found = dict(default_efficiency(find_gpu(GPU)).items())
    del found["gpu"]
    found["matmul_flops_per_s"] = dict(found["matmul_flops_per_s"])
    found["attention"] = {kernel: dict(curve.items()) for kernel, curve in found["attention"]}
    return found


def _linear(rng: Random) -> Linear:
    return Linear(intercept=rng.choice((0.0, 1e-3, 51200)), slopes=(rng.choice((0.0, 2e-3, 512)),))


def _stretch(rng: Random) -> Stretch:
    return Stretch(net=_linear(rng), high=_linear(rng))


def _layers(rng: Random) -> dict[str, Any]:
    """Layers as `estimate calibrate` writes them, of the step that is asked about."""
    kind = KindStretches(first=_stretch(rng), between=_stretch(rng), last=_stretch(rng))
    memory = LayerMemory(
        base=_linear(rng),
        turns=(
            Turn(step=0, phase="forward", layers=(kind,)),
            Turn(step=0, phase="backward", outside=_stretch(rng)),
        ),
    )
    points = tuple(
        LayerPoint(
            micro_batch_size=rng.choice((1, 2)),
            sequence_length=rng.choice((64, 128)),
            seconds=tuple((phase, _linear(rng)) for phase in _PHASES),
            memory=memory if rng.random() < 0.7 else None,
            num_runs=3,
        )
        for _ in range(rng.randrange(1, 4))
    )
    return to_json(
        MeasuredLayers(key=_key(), model="tiny", what="full", order=(0, 0), points=points)
    )


def make(rng: Random) -> Case:
    """Some rates near the GPU's own, then up to two changes of anything."""
    rates = _rates()
    kept = {key: rates[key] for key in rng.sample(list(rates), rng.randrange(5))}
    for key, value in kept.items():
        if isinstance(value, float):
            kept[key] = value * 10 ** (
                rng.gauss(0, 8) if rng.random() < 0.03 else rng.gauss(0, 0.2)
            )
    content: Any = {
        "napkinmath_calibration": 2,
        "gpu": find_gpu(GPU).name,
        "stamp": {"date": "2026-01-01"},
        "rates": kept,
        "layers": [_layers(rng)] if rng.random() < 0.3 else [],
    }
    for _ in range(rng.choice((0, 1, 1, 2))):
        content = changed_tree(rng, content)
    argv = [*TINY_ARCH, "--gpu", GPU, "--calibration", "@calibration.json"]
    argv += [*often(rng, 0.3, "--allow-stale-calibration"), *often(rng, 0.9, "--json")]
    return Case(tuple(argv), (("calibration.json", as_json(rng, content)),))


DOOR = Door("calibrations", make, figures)
