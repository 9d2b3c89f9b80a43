"""calibrated_time: a step's time where its own layers were measured: each phase as long as they
say, not as its operations add up.

At a measured batch and length the phase is intercept + slopes x layers. Elsewhere the analytic
phase is scaled by what measured over analytic was at the measured points, the nearest counting
most, so that the shape of the curve stays the analytic one.
"""

from __future__ import annotations

from math import log

from napkinmath.calibration.measured_layers import counts_of, layers_key
from napkinmath.ir.ledger import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.calibration.calibration import Calibration
    from napkinmath.calibration.measured_layers import LayerPoint, MeasuredLayers
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.timing.schedule import PhaseTime, StepTime

    TimeOf = Callable[[TrainConfig], StepTime | None]

MOST_POINTS = 3
# Which phases of the estimate a measured one covers: a loop's forward ends with the loss.
COVERED = {
    Phase.FORWARD.value: (Phase.FORWARD, Phase.LOSS),
    Phase.BACKWARD.value: (Phase.BACKWARD,),
    Phase.CLIP.value: (Phase.CLIP,),
    Phase.STEP.value: (Phase.STEP,),
}


def matching_layers(
    calibration: Calibration, spec: ModelSpec, config: TrainConfig, optimizer: str
) -> MeasuredLayers | None:
    """The layers of a calibration that are those of this step, whatever their number; None where
    they were not measured.

    `optimizer` is the one that 'auto' came to.
    """
    if not isinstance(config.micro_batch_size, int) or not isinstance(config.sequence_length, int):
        return None
    key = layers_key(spec, config, optimizer)
    alike = (layers for layers in calibration.layers if layers.key == key)
    return next((layers for layers in alike if layers.order_in(spec) is not None), None)


def calibrated_time(
    time: StepTime, layers: MeasuredLayers, spec: ModelSpec, config: TrainConfig, time_of: TimeOf
) -> StepTime:
    """The step's time by its measured layers; `time_of` gives another configuration's as its
    operations add up."""
    order = layers.order_in(spec)
    assert (
        order is not None
        and isinstance(config.micro_batch_size, int)
        and isinstance(config.sequence_length, int)
    )
    counts = counts_of(order, len(set(layers.order)))
    factors: dict[Phase, float] = {}
    for weight, point in nearest_points(layers, config.micro_batch_size, config.sequence_length):
        analytic = _analytic(point, config, time, time_of)
        for phase, ratio in _ratios(point, counts, analytic).items():
            factors[phase] = factors.get(phase, 0.0) + weight * ratio
    phases = tuple(_scaled(phase, factors.get(phase.phase, 1.0)) for phase in time.phases)
    return time.replace(phases=phases, measured_s=sum(phase.seconds for phase in phases))


def measured_peaks(layers: MeasuredLayers, spec: ModelSpec, config: TrainConfig) -> dict[str, int]:
    """Requested bytes at the peak of each phase by the measured layers; empty where this batch and
    length were not measured."""
    order = layers.order_in(spec)
    if order is None or config.gradient_accumulation_steps > 1:
        return {}
    for point in layers.points:
        if _is_at(point, config) and point.memory:
            return point.memory.phase_peaks(order)
    return {}


def _is_at(point: LayerPoint, config: TrainConfig) -> bool:
    """Whether a point was measured at the configuration's batch and length."""
    return (point.micro_batch_size, point.sequence_length) == (
        config.micro_batch_size,
        config.sequence_length,
    )


def nearest_points(
    layers: MeasuredLayers, batch: int, length: int
) -> list[tuple[float, LayerPoint]]:
    """The measured points that count at a batch and length, with weights that sum to one: the point
    itself, or by inverse square distance."""

    def distance(point: LayerPoint) -> float:
        tokens = log(point.micro_batch_size * point.sequence_length / (batch * length))
        return tokens**2 + log(point.sequence_length / length) ** 2

    nearest = sorted(layers.points, key=distance)[:MOST_POINTS]
    if not nearest or distance(nearest[0]) == 0.0:
        return [(1.0, point) for point in nearest[:1]]
    weights = [1.0 / distance(point) for point in nearest]
    return [(weight / sum(weights), point) for weight, point in zip(weights, nearest, strict=True)]


def _ratios(
    point: LayerPoint, counts: list[int], analytic: dict[Phase, float]
) -> dict[Phase, float]:
    """Measured over analytic seconds of one micro-step, by phase of the estimate."""
    found: dict[Phase, float] = {}
    for name, fit in point.seconds:
        phases = [phase for phase in COVERED.get(name, ()) if phase in analytic]
        total = sum(analytic[phase] for phase in phases)
        measured = fit.at(counts)
        if total > 0 and measured > 0:
            found.update({phase: measured / total for phase in phases})
    return found


def _analytic(
    point: LayerPoint, config: TrainConfig, time: StepTime, time_of: TimeOf
) -> dict[Phase, float]:
    """Seconds of the phases at a measured point, with one micro-step, as the operations add up."""
    if not _is_at(point, config) or config.gradient_accumulation_steps > 1:
        other = time_of(
            config.replace(
                micro_batch_size=point.micro_batch_size,
                sequence_length=point.sequence_length,
                gradient_accumulation_steps=1,
            )
        )
        if other is None:
            return {}
        time = other
    return {phase.phase: phase.seconds for phase in time.phases}


def _scaled(phase: PhaseTime, factor: float) -> PhaseTime:
    return phase.replace(
        device_s=phase.device_s * factor,
        host_s=phase.host_s * factor,
        waited_s=phase.waited_s * factor,
    )
