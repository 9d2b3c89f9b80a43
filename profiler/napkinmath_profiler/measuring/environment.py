"""What a measurement must be stamped with, and what makes one doubtful."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping

import torch
from napkinmath.base.units import GIB, format_bytes

from napkinmath_profiler.measuring.device_memory import MemoryFigures
from napkinmath_profiler.measuring.measured_loop import TimeSpread
from napkinmath_profiler.tracing.observation import installed_versions

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# a step's 10th to 90th percentile over its median; a quiet GPU at a fixed clock stays within a few
# hundredths
UNSTEADY = 0.15
SMI_FIELDS = {
    "driver": "driver_version",
    "clock": "clocks.sm",
    "maximum clock": "clocks.max.sm",
    "throttling": "clocks_throttle_reasons.active",
    "mig": "mig.mode.current",
    "temperature": "temperature.gpu",
}
SHARED_FACTS = ("driver", "mig")  # of a machine with several GPUs, the same for all of them
SMI_TIMEOUT_S = 10
LARGEST_CONTEXT = GIB  # CUDA's own memory of a process on the GPU: some hundreds of MiB
BUSY_SHARE = 0.01
DISTURBED_SHARE = 0.001
# nvml.h: nvmlClocksThrottleReason*; idle and application clocks are no slowing down
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def describe_environment(device: torch.device) -> dict[str, str]:
    """Device, driver and library versions, as text."""
    found = {"device": "cpu", "python": platform.python_version(), **installed_versions()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["memory"] = str(properties.total_memory)
        found["cuda"] = str(torch.version.cuda)
        found.update(smi_facts(device))
    else:
        found["threads"] = str(torch.get_num_threads())
    for variable in ALLOCATOR_VARIABLES:
        if os.environ.get(variable):
            found["allocator"] = os.environ[variable]
    return found


def smi_facts(device: torch.device) -> dict[str, str]:
    """Driver, clocks and MIG mode as nvidia-smi reports them; empty on a CPU, or where it is missing
    or says nothing.

    It knows a MIG slice by no id of PyTorch's: then driver and mode are those of the first GPU, and
    nothing is said of clocks.
    """
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return _smi_answer([])
    found = _smi_answer([f"--id=GPU-{uuid}"])
    return found or {name: value for name, value in _smi_answer([]).items() if name in SHARED_FACTS}


def _smi_answer(which: list[str]) -> dict[str, str]:
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(SMI_FIELDS.values())}",
        "--format=csv,noheader,nounits",
        *which,
    ]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return smi_values(answer)


def smi_values(answer: str) -> dict[str, str]:
    """The first line of nvidia-smi's answer, by our names of its fields."""
    values = [value.strip() for value in answer.partition("\n")[0].split(",")]
    return dict(zip(SMI_FIELDS, values, strict=False))


def throttling_notes(facts: Mapping[str, str]) -> list[str]:
    """What the driver says about slowed clocks, right after the steps."""
    try:
        active = int(facts.get("throttling", "0"), 16)
    except ValueError:
        return []
    reasons = [name for bit, name in THROTTLE_REASONS.items() if active & bit]
    if not reasons:
        return []
    clock = (
        f" (clock {facts['clock']} of {facts['maximum clock']} MHz)"
        if "clock" in facts and "maximum clock" in facts
        else ""
    )
    return [f"the driver slowed the GPU while it was measured: {', '.join(reasons)}{clock}"]


def spread_notes(step: TimeSpread | None) -> list[str]:
    """What the spread of the steps says about the clock."""
    if step is None or step.num_samples < 3 or step.relative <= UNSTEADY:
        return []
    return [
        f"steps took {step.low_s:.4g} to {step.high_s:.4g} s: a spread of {step.relative:.0%}, more"
        " than a steady clock gives; another process, clock throttling or a cold start may be"
        " in it"
    ]


def busy_notes(before: MemoryFigures | None) -> list[str]:
    """What others hold of the GPU: their work slows the steps, and their memory is part of the
    device's figure."""
    if before is None or before.device_used is None or before.device_total is None:
        return []
    others = before.device_used - before.reserved
    if others < max(LARGEST_CONTEXT, BUSY_SHARE * before.device_total):
        return []
    return [
        f"{format_bytes(others)} of the GPU were taken before anything was built, more than a"
        " context needs: another process is on it"
    ]


def slice_notes(device_name: str) -> list[str]:
    """What a MIG slice means for the figures."""
    _, is_slice, profile = device_name.partition(" MIG ")
    if not is_slice:
        return []
    return [
        f"this is a MIG slice ({profile}): memory and speed are the slice's, and neighbours share"
        " its GPU's power and clock"
    ]


def disturbance_notes(attributed: int, undisturbed: int) -> list[str]:
    """Whether taking notes changed what was allocated: the attributed steps ask for no more than
    the others have booked."""
    if not attributed or not undisturbed or attributed <= (1 + DISTURBED_SHARE) * undisturbed:
        return []
    more = attributed - undisturbed
    return [
        f"the attributed steps asked for {format_bytes(more)} more than the undisturbed ones"
        " booked: the notes taken, or the run, changed the step"
    ]
