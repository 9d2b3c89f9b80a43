"""The host's part of eager mode: steps of a model so small that the device waits for the host, over
the kernels they launch; and what checkpointing adds to them."""

from __future__ import annotations

from typing import Any

from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import Precision, RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase
from napkinmath.models.families import read_config
from napkinmath.timing.efficiency import Efficiency
from napkinmath.timing.schedule import PhaseTime

from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.devices import Device
from napkinmath_profiler.calibration.layer_runs import NUM_WARMUP_STEPS, medians
from napkinmath_profiler.measuring.measurement import Measurement
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.tracing.trace_options import options_from

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
}
NUM_STEPS = 10
LEAST_S = 1e-7
LEAST_SHARE = 0.01
BOTH = (Phase.FORWARD, Phase.BACKWARD)


def measured_dispatch(
    speed: Efficiency, device: Device, allowed: Allowance, notes: list[str]
) -> Efficiency:
    """``speed`` with the host's seconds per kernel, forward and backward, as a tiny Llama's steps
    show them, and with the share of a checkpoint's bookkeeping that the same steps show.

    On a CPU the "device" is the host, whose kernels take time too: their part, as priced, is taken
    off.
    """
    precision = Precision.BF16 if device.is_cuda else Precision.FP32
    train = TrainConfig(micro_batch_size=1, sequence_length=8, precision=precision)
    found = _measured_phases(train, device, allowed, notes)
    if found is None:
        return speed
    priced = _priced_phases(train, speed)
    changes: dict[str, float] = {}
    for phase in BOTH:
        name = f"dispatch_{phase.value}_s"
        kernels = priced[phase].host_s / getattr(speed, name)
        own = 0.0 if device.is_cuda else priced[phase].device_s
        changes[name] = max(LEAST_S, (found[phase] - own) / kernels)
    speed = speed.replace(**changes)
    again = train.replace(recompute=RecomputeConfig(kind=RecomputeKind.FULL))
    found = _measured_phases(again, device, allowed, notes)
    if found is None:
        return speed
    whole = _priced_phases(again, speed)
    bare = _priced_phases(again, speed.replace(bookkeeping_share=LEAST_S))
    own = 0.0 if device.is_cuda else sum(whole[phase].device_s for phase in BOTH)
    kept = sum(whole[phase].host_s - bare[phase].host_s for phase in BOTH)
    rest = sum(found[phase] - bare[phase].host_s for phase in BOTH) - own
    return speed.replace(bookkeeping_share=max(LEAST_SHARE, rest / kept))


def _measured_phases(
    train: TrainConfig, device: Device, allowed: Allowance, notes: list[str]
) -> dict[Phase, float] | None:
    """Median seconds by phase, the loss with the forward; None, with a note, where there are none."""
    checkpointed = " under checkpointing" if train.recompute.kind is RecomputeKind.FULL else ""
    what = f"the host's part of a step{checkpointed} was not measured"
    if allowed.seconds_left < 2.0:
        notes.append(f"{what}, the budget was spent")
        return None
    found = measured_tiny(train, device)
    if found.failure is not None:
        notes.append(f"{what}: out of memory")
        return None
    seconds = medians(found.steps[NUM_WARMUP_STEPS:])
    seconds[Phase.FORWARD] += seconds.get(Phase.LOSS, 0.0)
    return seconds


def measured_tiny(train: TrainConfig, device: Device) -> Measurement:
    """Steps of the tiny Llama, timed alone."""
    how = MeasureOptions(
        device=str(device.torch_device),
        attribute=False,
        num_steps=NUM_STEPS,
        num_warmup_steps=NUM_WARMUP_STEPS,
    )
    return measure_step(dict(TINY), options_from(train), how)


def _priced_phases(train: TrainConfig, speed: Efficiency) -> dict[Phase, PhaseTime]:
    """The phases of the tiny Llama's step, as priced."""
    hardware = Hardware(gpu=speed.gpu, memory_bytes=speed.gpu.memory_bytes)
    model = read_config(dict(TINY))
    priced = estimate(model, train, hardware=hardware, efficiency=speed).time
    assert priced is not None
    return {phase.phase: phase for phase in priced.phases}
