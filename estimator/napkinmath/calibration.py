"""Calibration: speeds measured on a GPU, in a file, that replace those its datasheet implies.

The file is a JSON object: {"napkinmath_calibration": 1, "gpu": NAME, "rates": {FIELD: VALUE, ...}} where a field is one of
`Efficiency` (FLOP/s, bytes/s, seconds, shares) and `matmul_flops_per_s` pairs a format with its rate.
"""

from __future__ import annotations

import os

from napkinmath.catalog import config_file
from napkinmath.errors import InputError, shown, suggest
from napkinmath.inputs import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.efficiency import Efficiency
    from napkinmath.hardware import Gpu

VERSION = 1
_NOT_RATES = ("gpu", "attention")


def read_calibration(path: str, gpu: Gpu) -> Efficiency:
    """The speeds of a GPU with those of a calibration file in place; raises InputError for a file that is not one, or of another GPU."""
    from napkinmath.efficiency import default_efficiency

    what = "calibration file"
    content = config_file.parse(config_file.read_text(path, what=what), path, what=what)
    if content.get("napkinmath_calibration") != VERSION:
        raise InputError(
            f'{what} {config_file.quoted(path)} does not say "napkinmath_calibration": {VERSION}; make one with `estimate calibrate`'
        )
    _check_gpu(content, path, gpu)
    rates = content.get("rates")
    if not values.is_mapping(rates):
        raise InputError(f'{what} {config_file.quoted(path)} has no object "rates"; make one with `estimate calibrate`')
    base = default_efficiency(gpu)
    return base.replace(**{key: _value(base, key, value, path) for key, value in values.mapping(rates, what).items()})


def cached_calibration(gpu: Gpu) -> str | None:
    """The calibration file that `estimate calibrate` keeps for a GPU, if there is one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(home, "napkinmath", "calibration", "".join(c if c.isalnum() else "-" for c in gpu.name.lower()) + ".json")
    return path if os.path.exists(path) else None


def _check_gpu(content: dict[str, Any], path: str, gpu: Gpu) -> None:
    from napkinmath.catalog.gpus import find_gpu

    name = content.get("gpu")
    if not isinstance(name, str) or find_gpu(name).name != gpu.name.partition(" MIG ")[0]:
        raise InputError(
            f"calibration file {config_file.quoted(path)} is of GPU {shown(name)}, not of {gpu.name}; name that GPU, or calibrate this one"
        )


def _value(base: Efficiency, key: str, value: object, path: str) -> object:
    known = [name for name, _ in base.items() if name not in _NOT_RATES]
    if key not in known:
        raise InputError(f"calibration file {config_file.quoted(path)}: rate {shown(key)} is unknown{suggest(key, known)}")
    if key != "matmul_flops_per_s":
        return _positive(value, key, path)
    if not values.is_mapping(value):
        raise InputError(f'calibration file {config_file.quoted(path)}: {key} {shown(value)} is not an object such as {{"bf16": 2.4e14}}')
    measured = {dtype: _positive(rate, f"{key} {dtype}", path) for dtype, rate in values.mapping(value, key).items()}
    return tuple({**dict(base.matmul_flops_per_s), **measured}.items())


def _positive(value: object, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise InputError(f"calibration file {config_file.quoted(path)}: {key} {shown(value)} is not a positive number; measure it again")
    return float(value)
