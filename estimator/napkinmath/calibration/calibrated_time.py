"""calibrated_time: a step's time where its own layers were measured: each phase as long as they
say, not as its operations add up.

At a measured batch and length the phase is intercept + slopes x layers. Elsewhere the analytic
phase is scaled by what measured over analytic was at the measured points, the nearest counting
most, so that the shape of the curve stays the analytic one.
"""

from __future__ import annotations

from napkinmath.calibration.measured_layers import counts_of, layers_key
from napkinmath.ir.ledger import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.calibration.calibration import Calibration
    from napkinmath.calibration.measured_layers import LayerPoint, MeasuredLayers
    from napkinmath.estimate import Estimate
    from napkinmath.timing.schedule import PhaseTime, StepTime

MOST_POINTS = 3
# Which phases of the estimate a measured one covers: a loop's forward ends with the loss.
COVERED = {
    Phase.FORWARD.value: (Phase.FORWARD, Phase.LOSS),
    Phase.BACKWARD.value: (Phase.BACKWARD,),
    Phase.CLIP.value: (Phase.CLIP,),
    Phase.STEP.value: (Phase.STEP,),
}


def matching_layers(calibration: Calibration, e: Estimate) -> MeasuredLayers | None:
    """The layers of a calibration that are those of this step, whatever their number; None where
    they were not measured."""
    if (
        not calibration.layers
        or not isinstance(e.config.micro_batch_size, int)
        or not isinstance(e.config.sequence_length, int)
    ):
        return None
    key = layers_key(e.spec, e.config, e.step.update.optimizer.name)
    return next(
        (
            layers
            for layers in calibration.layers
            if layers.key == key and layers.order_in(e.spec) is not None
        ),
        None,
    )


def calibrated_time(time: StepTime, layers: MeasuredLayers, e: Estimate) -> StepTime:
    """The step's time by its measured layers."""
    order = layers.order_in(e.spec)
    assert (
        order is not None
        and isinstance(e.config.micro_batch_size, int)
        and isinstance(e.config.sequence_length, int)
    )
    counts = counts_of(order, len(set(layers.order)))
    points = nearest_points(layers, e.config.micro_batch_size, e.config.sequence_length)
    factors: dict[Phase, float] = {}
    for weight, point in points:
        for phase, ratio in _ratios(point, counts, e, time).items():
            factors[phase] = factors.get(phase, 0.0) + weight * ratio
    phases = tuple(_scaled(phase, factors.get(phase.phase, 1.0)) for phase in time.phases)
    return time.replace(phases=phases, measured_s=sum(phase.seconds for phase in phases))


def measured_peaks(e: Estimate) -> dict[str, int]:
    """Requested bytes at the peak of each phase by the measured layers; empty where this batch and
    length were not measured."""
    layers = e.measured_layers
    order = layers.order_in(e.spec) if layers is not None else None
    if layers is None or order is None or e.config.gradient_accumulation_steps > 1:
        return {}
    for point in layers.points:
        if (point.micro_batch_size, point.sequence_length) == (
            e.config.micro_batch_size,
            e.config.sequence_length,
        ) and point.memory:
            return point.memory.phase_peaks(order)
    return {}


def nearest_points(
    layers: MeasuredLayers, batch: int, length: int
) -> list[tuple[float, LayerPoint]]:
    """The measured points that count at a batch and length, with weights that sum to one: the point
    itself, or by inverse square distance."""
    from math import log

    def distance(point: LayerPoint) -> float:
        tokens = log(point.micro_batch_size * point.sequence_length / (batch * length))
        return tokens**2 + log(point.sequence_length / length) ** 2

    nearest = sorted(layers.points, key=distance)[:MOST_POINTS]
    if not nearest or distance(nearest[0]) == 0.0:
        return [(1.0, point) for point in nearest[:1]]
    weights = [1.0 / distance(point) for point in nearest]
    return [(weight / sum(weights), point) for weight, point in zip(weights, nearest, strict=True)]


def _ratios(
    point: LayerPoint, counts: list[int], e: Estimate, time: StepTime
) -> dict[Phase, float]:
    """Measured over analytic seconds of one micro-step, by phase of the estimate."""
    analytic = _analytic(point, e, time)
    found: dict[Phase, float] = {}
    for name, fit in point.seconds:
        phases = [phase for phase in COVERED.get(name, ()) if phase in analytic]
        total = sum(analytic[phase] for phase in phases)
        measured = fit.at(counts)
        if total > 0 and measured > 0:
            found.update({phase: measured / total for phase in phases})
    return found


def _analytic(point: LayerPoint, e: Estimate, time: StepTime) -> dict[Phase, float]:
    """Seconds of the phases at a measured point, with one micro-step, as the operations add up."""
    own = (
        e.config.micro_batch_size == point.micro_batch_size
        and e.config.sequence_length == point.sequence_length
    )
    if own and e.config.gradient_accumulation_steps == 1:
        return {phase.phase: phase.seconds for phase in time.phases}
    from napkinmath.estimate import estimate

    config = e.config.replace(
        micro_batch_size=point.micro_batch_size,
        sequence_length=point.sequence_length,
        gradient_accumulation_steps=1,
    )
    other = estimate(e.spec, config, hardware=e.hardware, efficiency=e.speed).time
    return {} if other is None else {phase.phase: phase.seconds for phase in other.phases}


def _scaled(phase: PhaseTime, factor: float) -> PhaseTime:
    return phase.replace(
        device_s=phase.device_s * factor,
        host_s=phase.host_s * factor,
        waited_s=phase.waited_s * factor,
    )
