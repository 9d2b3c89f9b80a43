"""Calibration: speeds and layers measured on a GPU, in a file, that replace what its datasheet
implies.

The file is a JSON object: {"napkinmath_calibration": 2, "gpu": NAME, "stamp": {...}, "rates":
{FIELD: VALUE, ...}, "layers": [...], ...}. A rate is a field of `Efficiency` (FLOP/s, bytes/s,
seconds, shares); `matmul_flops_per_s` pairs a format with its rate, `attention` a kernel with its
curve. `stamp` says on what it was measured, `device` describes a machine that the catalog lacks (a
CPU, a new GPU), `layers` is what real layers took (`napkinmath.calibration.measured_layers`). What
else is in the file (single measurements, notes) is for people.
"""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import InputError, plain, shown, suggest
from napkinmath.base.record import Record
from napkinmath.calibration.plausible import contradictions
from napkinmath.catalog.gpus import find_gpu, find_hardware
from napkinmath.config.hardware import Gpu, HostLink
from napkinmath.models import config_file
from napkinmath.timing.efficiency import default_efficiency

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.calibration.measured_layers import MeasuredLayers
    from napkinmath.timing.attainable import AttentionCurve
    from napkinmath.timing.efficiency import Efficiency

VERSION = 2
# Of version 1 the host's seconds a kernel held the work of whole layers too (ir/costs.py
# LAYER_DISPATCHES): they are left out.
FORMER, FORMER_RATES = 1, ("dispatch_forward_s", "dispatch_backward_s")
WHAT = "calibration file"
NOT_RATES = ("gpu", "clock_headroom")  # what follows from the datasheet alone
# What must be as it was for a calibration to hold: key of the stamp -> how it is called.
STAMPED = {"torch": "torch", "driver": "driver"}


class Calibration(Record):
    """A calibration file that has been read: whose speeds, measured on what, and which layers
    beside."""

    path: str
    gpu: str
    stamp: tuple[tuple[str, str], ...] = ()
    rates: tuple[tuple[str, object], ...] = ()
    device: tuple[tuple[str, object], ...] = ()
    notes: tuple[str, ...] = ()
    layers: tuple[MeasuredLayers, ...] = ()
    former_pace: bool = False
    """Whether rates of the host were left out, as they are of version 1."""

    def efficiency(self, gpu: Gpu) -> Efficiency:
        """The speeds of a GPU with the measured ones in place; InputError for rates that are none,
        and for those that its datasheet rules out."""
        found = self._speeds(gpu)
        if broken := contradictions(found, gpu):
            raise InputError(
                f"{WHAT} {config_file.quoted(self.path)}: {broken[0]}; measure again on an idle"
                " machine with `estimate calibrate`"
            )
        return found

    def contradictions(self, gpu: Gpu) -> tuple[str, ...]:
        """Which of its speeds the GPU's datasheet rules out, in words."""
        return contradictions(self._speeds(gpu), gpu)

    def _speeds(self, gpu: Gpu) -> Efficiency:
        base = default_efficiency(gpu)
        return base.replace(
            **{key: _value(base, key, value, self.path) for key, value in self.rates}
        )

    @property
    def date(self) -> str:
        """When it was measured, as its stamp says; empty if it does not."""
        return dict(self.stamp).get("date", "")[:10]


def load_calibration(path: str) -> Calibration:
    """Reads a calibration file; raises InputError for a file that is not one."""
    content = config_file.parse(config_file.read_text(path, what=WHAT), path, what=WHAT)
    here = f"{WHAT} {config_file.quoted(path)}"
    version = content.get("napkinmath_calibration")
    if version not in (FORMER, VERSION):
        raise InputError(
            f'{here} does not say "napkinmath_calibration": {VERSION}; make one with `estimate'
            " calibrate`"
        )
    gpu = content.get("gpu")
    if not values.is_mapping(content.get("rates")):
        raise InputError(
            f'{here} of GPU {shown(gpu)} has no object "rates"; make one with `estimate calibrate`'
        )
    if not isinstance(gpu, str):
        raise InputError(f"{here} is of GPU {shown(gpu)}; make one with `estimate calibrate`")
    rates = _mapping(content, "rates", here)
    used = [pair for pair in rates if version == VERSION or pair[0] not in FORMER_RATES]
    return Calibration(
        path=path,
        gpu=gpu,
        stamp=tuple(
            (plain(key), plain(str(value))) for key, value in _mapping(content, "stamp", here)
        ),
        rates=tuple(used),
        former_pace=len(used) < len(rates),
        device=tuple(_mapping(content, "device", here)),
        notes=tuple(plain(str(note)) for note in values.listed(content.get("notes", []))),
        layers=_layers(content, here),
    )


def read_calibration(path: str, gpu: Gpu, *, allow_stale: bool = False) -> Calibration:
    """A calibration for this GPU and this machine; raises InputError where it is of another GPU,
    driver or torch, unless allowed."""
    calibration = load_calibration(path)
    calibration.efficiency(gpu)  # refuses rates that are none
    reasons = staleness(calibration, gpu)
    if reasons and not allow_stale:
        raise InputError(
            f"{WHAT} {config_file.quoted(path)} is stale: {'; '.join(reasons)}; measure again with"
            " `estimate calibrate`, or add --allow-stale-calibration"
        )
    return calibration


def staleness(calibration: Calibration, gpu: Gpu) -> tuple[str, ...]:
    """Why a calibration does not hold for this GPU here: another GPU, driver or torch, or speeds
    that its datasheet rules out. What is not known on this machine is not compared."""
    found: list[str] = []
    if not is_of(calibration, gpu):
        found.append(f"it is of GPU {shown(calibration.gpu)}, not of {gpu.name}")
    if calibration.former_pace:
        found.append("its host's pace is of an older version, and not used")
    stamp, here = dict(calibration.stamp), surroundings(gpu)
    for key, name in STAMPED.items():
        if stamp.get(key) and here.get(key) and stamp[key] != here[key]:
            found.append(f"{name} was {stamp[key]} and is {here[key]}")
    return (*found, *calibration.contradictions(gpu))


def surroundings(gpu: Gpu) -> dict[str, str]:
    """This machine's torch, and its driver where the GPU is one of its own."""
    from napkinmath.calibration import local_machine

    here = {"torch": local_machine.torch_version()}
    whole = gpu.name.partition(" MIG ")[0]
    if any(_same_gpu(name, whole) for name in local_machine.gpu_names()):
        here["driver"] = local_machine.driver_version()
    return here


def is_of(calibration: Calibration, gpu: Gpu) -> bool:
    """Whether a calibration was measured on this GPU; a MIG slice is not the whole GPU."""
    if calibration.gpu == gpu.name:
        return True
    try:
        return find_hardware(calibration.gpu).gpu.name == gpu.name
    except InputError:
        return False


def device_gpu(calibration: Calibration) -> Gpu:
    """The machine a calibration was measured on: a GPU of the catalog, else as the file itself
    describes it."""
    if calibration.device:
        return described_gpu(calibration.gpu, dict(calibration.device))
    return find_hardware(calibration.gpu).gpu


def described_gpu(name: str, device: Mapping[str, object]) -> Gpu:
    """A `Gpu` from a calibration's own description: memory_bytes, bandwidth_bytes_per_s,
    dense_flops, num_sms, hz, l2_bytes, host_bytes_per_s."""
    what = f"{WHAT}: device"
    rate = {
        key: _positive(device.get(key), what, key)
        for key in ("bandwidth_bytes_per_s", "hz", "host_bytes_per_s")
    }
    dense = values.mapping(device.get("dense_flops"), f"{what}: dense_flops")
    memory = values.count(device.get("memory_bytes"), f"{what}: memory_bytes", high=1 << 60)
    host_gb_per_s = rate["host_bytes_per_s"] / 1e9
    return Gpu(
        name=name,
        vendor=str(device.get("vendor", "unknown")),
        architecture="unknown",
        compute_capability=str(device.get("compute_capability", "")),
        nominal_bytes=memory,
        memory_bytes=memory,
        bandwidth_bytes_per_s=rate["bandwidth_bytes_per_s"],
        dense_flops=tuple((dtype, _positive(flops, what, dtype)) for dtype, flops in dense.items()),
        num_sms=values.count(device.get("num_sms"), f"{what}: num_sms"),
        boost_hz=rate["hz"],
        tensor_hz=rate["hz"],
        l2_bytes=values.count(device.get("l2_bytes"), f"{what}: l2_bytes"),
        tdp_w=0.0,
        host_link=HostLink(kind="memory", generation=0, gb_per_s_per_direction=host_gb_per_s),
        unified_memory=False,
    )


# ---------------------------------------------------------------- the user's cache


def cache_folder() -> str:
    """Where `estimate calibrate` keeps its files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "napkinmath", "calibration")


def cache_path(gpu_name: str) -> str:
    """The file of one GPU in the cache."""
    return os.path.join(
        cache_folder(), "".join(c if c.isalnum() else "-" for c in gpu_name.lower()) + ".json"
    )


def cached_calibration(gpu: Gpu) -> str | None:
    """The calibration file that `estimate calibrate` keeps for a GPU, if there is one."""
    path = cache_path(gpu.name)
    return path if os.path.exists(path) else None


# ---------------------------------------------------------------- single values


def _mapping(content: Mapping[str, object], key: str, here: str) -> list[tuple[str, object]]:
    return list(values.mapping(content.get(key, {}), f"{here}: {key}").items())


def _layers(content: Mapping[str, Any], here: str) -> tuple[MeasuredLayers, ...]:
    if not content.get("layers"):
        return ()
    from napkinmath.calibration.measured_layers import from_json

    return tuple(from_json(item, f"{here}: layers") for item in values.listed(content["layers"]))


def _same_gpu(name: str, known: str) -> bool:
    try:
        return name == known or find_gpu(name).name == known
    except InputError:
        return False


def _value(base: Efficiency, key: str, value: object, path: str) -> object:
    here = f"{WHAT} {config_file.quoted(path)}"
    known = [name for name, _ in base.items() if name not in NOT_RATES]
    if key not in known:
        raise InputError(f"{here}: rate {shown(key)} is unknown{suggest(key, known)}")
    if key == "attention":
        return _curves(base, value, here)
    if key != "matmul_flops_per_s":
        return _positive(value, here, key)
    if not values.is_mapping(value):
        raise InputError(
            f'{here}: {key} {shown(value)} is not an object such as {{"bf16": 2.4e14}}'
        )
    measured = {
        dtype: _positive(rate, here, f"{key} {dtype}")
        for dtype, rate in values.mapping(value, key).items()
    }
    return tuple({**dict(base.matmul_flops_per_s), **measured}.items())


def _curves(base: Efficiency, value: object, here: str) -> tuple[tuple[str, AttentionCurve], ...]:
    curves = dict(base.attention)
    for kernel, fields in values.mapping(value, f"{here}: attention").items():
        if kernel not in curves:
            raise InputError(
                f"{here}: attention kernel {shown(kernel)} is"
                f" unknown{suggest(kernel, list(curves))}"
            )
        given = values.mapping(fields, f"{here}: attention {kernel}")
        unknown = [field for field in given if field not in dict(curves[kernel].items())]
        if unknown:
            raise InputError(
                f"{here}: attention {kernel} has no field {shown(unknown[0])}; it has"
                f" {', '.join(dict(curves[kernel].items()))}"
            )
        curves[kernel] = curves[kernel].replace(
            **{
                field: _positive(number, here, f"{kernel} {field}")
                for field, number in given.items()
            }
        )
    return tuple(curves.items())


def _positive(value: object, here: str, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise InputError(
            f"{here}: {what} {shown(value)} is not a positive number; measure it again"
        )
    return float(value)
