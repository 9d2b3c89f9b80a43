"""`estimate calibration show|diff|remove`: the calibration files that are kept, what is in them,
how two differ, and their end."""

from __future__ import annotations

import contextlib
import os

from napkinmath.base import values
from napkinmath.base.errors import InputError, NapkinError, shown, suggest
from napkinmath.base.units import format_seconds
from napkinmath.calibration.calibration import (
    Calibration,
    cache_folder,
    cache_path,
    device_gpu,
    load_calibration,
    staleness,
)
from napkinmath.cli.flag_rows import DEBUG, ON
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napkinmath.calibration.measured_layers import MeasuredLayers

_DESCRIPTION = (
    "Show the calibrations that `estimate calibrate` keeps, one of them in full, how two differ, or"
    " remove one. WHICH is a file or a GPU's name."
)
_OWN = (
    (("--all",), ON, "", "remove: every calibration in the cache"),
    (("--json",), ON, "", "show: the file as JSON"),
    DEBUG,
)
NOTABLE = 0.02  # of a rate, below which two calibrations agree


def run(argv: Sequence[str]) -> int:
    """Does what the first word says; returns the exit code."""
    parser = Parser(
        "estimate calibration",
        _DESCRIPTION,
        (("calibration", _OWN),),
        positional=("words", "show|diff|remove [WHICH]...", "what to do, and with which"),
    )
    options = parser.parse(argv)
    words = [str(word) for word in values.listed(options.get("words", []))]
    actions: dict[str, Callable[[list[str], dict[str, object]], int]] = {
        "show": _show,
        "diff": _diff,
        "remove": _remove,
    }
    action = words[0] if words else "show"
    if action not in actions:
        raise InputError(
            f"{shown(action)} is nothing that can be done with"
            f" calibrations{suggest(action, list(actions))}; use {', '.join(actions)}"
        )
    return actions[action](words[1:], options)


def _show(which: list[str], options: dict[str, object]) -> int:
    if len(which) > 1:
        raise InputError(f"{shown(which[1])} is left over; show one calibration, or diff two")
    if not which:
        return _list(as_json=bool(options.get("json")))
    path = find(which[0])
    calibration = load_calibration(path)
    if options.get("json"):
        with open(path, encoding="utf-8") as file:
            print(file.read().rstrip())
        return 0
    for line in described(calibration):
        print(line)
    return 0


def _list(*, as_json: bool) -> int:
    paths = list(_kept())
    if as_json:
        import json

        print(json.dumps(paths))
        return 0
    for path in paths:
        print(_headline(path))
    if not paths:
        print(f"no calibration in {cache_folder()}; make one with `estimate calibrate`")
    return 0


def _headline(path: str) -> str:
    try:
        calibration = load_calibration(path)
    except NapkinError as error:
        return f"{os.path.basename(path)}: {error}"
    layers = ", ".join(measured.model for measured in calibration.layers)
    stamp = dict(calibration.stamp)
    torch, driver = stamp.get("torch", "unknown"), stamp.get("driver", "")
    stale = "   STALE: " + "; ".join(_stale(calibration)) if _stale(calibration) else ""
    what = f"   layers of {layers}" if layers else "   speeds only"
    return (
        f"{calibration.gpu}   {calibration.date or 'undated'}   torch"
        f" {torch}{f', driver {driver}' if driver else ''}{what}   {path}{stale}"
    )


def described(calibration: Calibration) -> Iterator[str]:
    """The lines of one calibration: stamp, notes, rates, layers."""
    yield f"{calibration.gpu}   {calibration.path}"
    yield from (f"  {key:<24} {value}" for key, value in calibration.stamp)
    yield from (f"  STALE: {reason}" for reason in _stale(calibration))
    yield from (f"  note: {note}" for note in calibration.notes)
    yield "rates"
    yield from (f"  {name:<36} {value:.6g}" for name, value in flat_rates(calibration).items())
    for layers in calibration.layers:
        yield f"layers of {layers.model} ({layers.what}); {len(layers.order)} in the whole model"
        yield from _layer_lines(layers)


def _layer_lines(layers: MeasuredLayers) -> Iterator[str]:
    for point in layers.points:
        for phase, fit in point.seconds:
            slopes = " + ".join(f"{format_seconds(slope)} a layer" for slope in fit.slopes)
            yield (
                f"  {point.micro_batch_size} x {point.sequence_length:<6} {phase:<18}"
                f" {format_seconds(fit.intercept)} + {slopes}"
            )


def flat_rates(calibration: Calibration) -> dict[str, float]:
    """Every number of the rates under one name: 'matmul_flops_per_s bf16', 'attention flash
    share'."""
    found: dict[str, float] = {}

    def add(name: str, value: object) -> None:
        if values.is_mapping(value):
            for key, inner in values.mapping(value, name).items():
                add(f"{name} {key}", inner)
        elif isinstance(value, (int, float)):
            found[name] = float(value)

    for name, value in calibration.rates:
        add(name, value)
    return found


def _diff(which: list[str], _: dict[str, object]) -> int:
    if len(which) != 2:
        raise InputError(
            "diff takes two calibrations, each a file or a GPU's name; write e.g. estimate"
            " calibration diff old.json H100"
        )
    old, new = (load_calibration(find(text)) for text in which)
    for line in differences(old, new):
        print(line)
    return 0


def differences(old: Calibration, new: Calibration) -> list[str]:
    """What differs: device and stamp, rates by more than two percent, and the layers' phases."""
    lines = [f"gpu: {old.gpu} -> {new.gpu}"] if old.gpu != new.gpu else []
    before, after = dict(old.stamp), dict(new.stamp)
    lines += [
        f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    rates, others = flat_rates(old), flat_rates(new)
    for name in {**rates, **others}:
        a, b = rates.get(name), others.get(name)
        if a is None or b is None:
            lines.append(f"{name}: only in the {'second' if a is None else 'first'}")
        elif abs(b / a - 1) > NOTABLE:
            lines.append(f"{name}: {a:.6g} -> {b:.6g} ({b / a - 1:+.1%})")
    for layers in new.layers:
        known = next((other for other in old.layers if other.key == layers.key), None)
        if known is None:
            lines.append(f"layers of {layers.model} ({layers.what}): only in the second")
        else:
            lines += _layer_differences(known, layers)
    keys = {layers.key for layers in new.layers}
    lines += [
        f"layers of {layers.model} ({layers.what}): only in the first"
        for layers in old.layers
        if layers.key not in keys
    ]
    return lines or [f"no difference above {NOTABLE:.0%}"]


def _layer_differences(old: MeasuredLayers, new: MeasuredLayers) -> list[str]:
    from napkinmath.calibration.measured_layers import counts_of

    counts = counts_of(new.order, len(set(new.order)))
    before = {
        (p.micro_batch_size, p.sequence_length, phase): fit.at(counts)
        for p in old.points
        for phase, fit in p.seconds
    }
    lines: list[str] = []
    for point in new.points:
        for phase, fit in point.seconds:
            a = before.get((point.micro_batch_size, point.sequence_length, phase))
            b = fit.at(counts)
            if a and abs(b / a - 1) > NOTABLE:
                place = f"{new.model} {point.micro_batch_size} x {point.sequence_length} {phase}"
                lines.append(
                    f"{place}: {format_seconds(a)} -> {format_seconds(b)} ({b / a - 1:+.1%})"
                )
    return lines


def _remove(which: list[str], options: dict[str, object]) -> int:
    if bool(options.get("all")) == bool(which):
        raise InputError(
            "remove takes calibrations by file or GPU, or --all; write e.g. estimate calibration"
            " remove H100"
        )
    paths = list(_kept()) if options.get("all") else [find(text) for text in which]
    for path in paths:
        if not options.get("all"):
            load_calibration(path)  # nothing but a calibration is ever removed
        os.unlink(path)
        print(f"removed {path}")
    if not paths:
        print(f"no calibration in {cache_folder()}")
    return 0


def find(text: str) -> str:
    """The file that a path or a GPU's name means; InputError names those that are there."""
    if os.path.exists(text):
        return text
    if text.endswith(".json") or os.sep in text:
        raise InputError(
            f"calibration file {shown(text)} does not exist; `estimate calibration show` lists"
            " those in the cache"
        )
    from napkinmath.catalog.gpus import find_hardware

    names = [text]
    with contextlib.suppress(InputError):
        names.append(find_hardware(text).gpu.name)
    for name in names:
        if os.path.exists(cache_path(name)):
            return cache_path(name)
    matching = [
        path
        for path in _kept()
        if os.path.basename(path).startswith(
            os.path.basename(cache_path(text)).removesuffix(".json")
        )
    ]
    if len(matching) == 1:
        return matching[0]
    kept = [os.path.basename(path) for path in _kept()]
    there = (
        f"there are {', '.join(kept)}"
        if kept
        else "there is none: make one with `estimate calibrate`"
    )
    raise InputError(f"no calibration of {shown(text)} is kept; {there}")


def _kept() -> Iterator[str]:
    """The files in the cache."""
    folder = cache_folder()
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    yield from (os.path.join(folder, name) for name in names if name.endswith(".json"))


def _stale(calibration: Calibration) -> tuple[str, ...]:
    try:
        return staleness(calibration, device_gpu(calibration))
    except InputError as error:
        return (str(error),)
