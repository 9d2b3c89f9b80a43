"""calibrate: everything `estimate calibrate` measures, as the content of a calibration file."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from napkinmath.base.errors import NapkinError
from napkinmath.calibration.calibration import VERSION, Calibration
from napkinmath.calibration.measured_layers import MeasuredLayers, to_json
from napkinmath.config.hardware import Gpu, Hardware
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.timing.efficiency import Efficiency, default_efficiency

from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.device_facts import gpu_of
from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.dispatch import measured_dispatch
from napkinmath_profiler.calibration.layer_runs import LayerOptions, measure_layers
from napkinmath_profiler.calibration.op_curves import fitted, rates_of
from napkinmath_profiler.calibration.op_plan import planned
from napkinmath_profiler.calibration.op_points import OpPoint, measure_ops
from napkinmath_profiler.calibration.stamp import stamp_of
from napkinmath_profiler.tracing.trace_options import options_from

OPS_SHARE = 0.4  # of the budget where layers are measured too


@dataclass(frozen=True, slots=True)
class ModelToMeasure:
    """A model as the user named it: its Hugging Face config, and the step the estimator prices."""

    config: dict[str, Any]
    spec: ModelSpec
    train: TrainConfig


@dataclass(slots=True)
class Calibrated:
    """What was measured: single operations, the rates fitted to them, and layers."""

    device: Device
    gpu: Gpu
    facts: dict[str, Any]
    points: list[OpPoint]
    speed: Efficiency
    layers: MeasuredLayers | None
    stamp: dict[str, str]
    notes: list[str] = field(default_factory=list[str])

    def content(self) -> dict[str, Any]:
        """The calibration file as a JSON object."""
        return {
            "napkinmath_calibration": VERSION,
            "gpu": self.gpu.name,
            "stamp": self.stamp,
            **({"device": self.facts} if self.facts else {}),
            "notes": self.notes,
            "rates": rates_of(self.speed),
            "layers": [to_json(self.layers)] if self.layers is not None else [],
            "ops": [point.as_row() for point in self.points],
        }

    def calibration(self, path: str = "") -> Calibration:
        """The same as a later estimate reads it."""
        return Calibration(
            path=path,
            gpu=self.gpu.name,
            stamp=tuple(self.stamp.items()),
            rates=tuple(rates_of(self.speed).items()),
            device=tuple(self.facts.items()),
            notes=tuple(self.notes),
            layers=(self.layers,) if self.layers is not None else (),
        )


def calibrate(
    device: Device,
    allowed: Allowance,
    model: ModelToMeasure | None = None,
    *,
    how: LayerOptions | None = None,
    notes: list[str] | None = None,
    advance: Callable[[str], object] = lambda _: None,
) -> Calibrated:
    """Measure a device, and a model's layers if one is given, within an allowance of memory and
    seconds.

    What could not be measured is in the result's notes; nothing measured is lost to it.
    """
    notes = notes if notes is not None else []
    known = device.catalogued
    priced = _priced(model, known)
    ops_allowed = allowed.part(OPS_SHARE if model is not None else 0.9)
    points = measure_ops(planned(device, priced), device, ops_allowed, notes, advance)
    gpu, facts = gpu_of(device, points)
    speed = fitted(default_efficiency(gpu), points)
    advance("host's part of a step")
    # libraries, drivers and compilers have errors of their own types: what was measured is kept
    with _noted("the host's part of a step was not measured", notes):
        speed = measured_dispatch(speed, device, allowed, notes)
    layers = None
    if model is not None:
        priced = priced or _priced(model, gpu)
        assert priced is not None
        options = options_from(model.train, compute_capability=_capability(gpu))
        with _noted("no layers were measured", notes):
            layers = measure_layers(
                model.config, options, priced, device, allowed, notes, how=how, advance=advance
            )
    return Calibrated(device, gpu, facts, points, speed, layers, stamp_of(device), notes)


@contextmanager
def _noted(what: str, notes: list[str]) -> Generator[None]:
    """An error inside the block becomes a note."""
    try:
        yield
    except Exception as reason:
        notes.append(f"{what}: {_said(reason)}")


def _said(reason: Exception) -> str:
    """Our own refusals as they are, others by their type and first line."""
    if isinstance(reason, NapkinError):
        return str(reason)
    return f"{type(reason).__name__}: {next(iter(str(reason).splitlines()), '')}"[:300]


def _priced(model: ModelToMeasure | None, gpu: Gpu | None) -> Estimate | None:
    if model is None or gpu is None:
        return None
    return estimate(
        model.spec, model.train, hardware=Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes)
    )


def _capability(gpu: Gpu) -> tuple[int, int]:
    major, _, minor = gpu.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (8, 0)
