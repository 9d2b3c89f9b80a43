"""``estimate calibrate``: measure this device, and one to three real layers of a model, and keep it
for later estimates."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.base.whole_file import refuse_existing
from napkinmath.calibration.calibration import cache_path, load_calibration
from napkinmath.cli.flag_rows import TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from rich.console import Console

from napkinmath_profiler.calibration.allowance import Allowance, allowance, hold_to
from napkinmath_profiler.calibration.calibrate import Calibrated, ModelToMeasure, calibrate
from napkinmath_profiler.calibration.devices import Device, choose_device
from napkinmath_profiler.calibration.layer_runs import LayerOptions
from napkinmath_profiler.calibration.progress import progress
from napkinmath_profiler.calibration.report import print_calibrated
from napkinmath_profiler.calibration.steady import refuse_doubtful
from napkinmath_profiler.calibration.store import merged_layers, save

DEFAULT_BUDGET_S = 75.0  # with the libraries loaded before and a run begun at its end, under 90 s
DEFAULT_SHARE = 0.5
CPU_PRECISION = "fp32"
OWN = (
    (("--device",), TEXT, "NAME", "cuda, cuda:N or cpu [cuda]"),
    (("--budget",), TEXT, "S", f"seconds it may take [{DEFAULT_BUDGET_S:g}]"),
    (("--share",), TEXT, "SHARE", f"how much of the free memory may be taken [{DEFAULT_SHARE:g}]"),
    (
        ("--out",),
        TEXT,
        "FILE",
        "where to write the calibration [the cache, where `estimate` finds it]",
    ),
)
DESCRIPTION = (
    "Measure this device: copies, matrix products, attention, launches; with --model also one to"
    " three real layers of it, for each phase of a step."
)


def run(argv: Sequence[str]) -> int:
    """Parses the flags, measures, writes the calibration, prints what was found."""
    given = Parser("estimate calibrate", DESCRIPTION, (*SHARED, ("calibration", OWN))).parse(argv)
    quieten_libraries()
    notes: list[str] = []
    device = chosen_device(given)
    if "out" in given:
        refuse_other_file(values.text(given["out"], "--out"))
    found = measured(given, device, allowance_of(given, device, notes), notes)
    wanted = values.text(given["out"], "--out") if "out" in given else cache_path(found.gpu.name)
    refuse_doubtful(
        found.points, found.speed, found.gpu, device, what="the calibration is not saved"
    )
    content = merged_layers(found.content(), wanted)
    path, refused = _written(content, wanted)
    if "json" in given:
        print(json.dumps({**content, "path": path}, indent=1))
    else:
        print_calibrated(found, Console(), path, in_cache="out" not in given and not refused)
    if refused:
        raise InputError(f"{refused}; it is in {shown(path, limit=200)}")
    return 0


def refuse_other_file(path: str) -> None:
    """Raises InputError, before anything is measured, for a file that is there and is no
    calibration."""
    refuse_existing(path, force=True, what="--out")
    if os.path.exists(path):
        try:
            load_calibration(path)
        except InputError as reason:
            raise InputError(
                f"--out {shown(path)} exists and is no calibration ({reason}); name another file"
            ) from None


def quieten_libraries() -> None:
    """What the libraries say below an error is no news to who measures them."""
    for library in ("transformers", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


def chosen_device(given: Mapping[str, Any]) -> Device:
    """The device of --device."""
    return choose_device(values.text(given["device"], "--device") if "device" in given else None)


def _written(content: dict[str, Any], path: str) -> tuple[str, InputError | None]:
    """Where the calibration lies, and why that is not ``path``."""
    try:
        save(content, path)
    except InputError as reason:
        return elsewhere(content, path, reason), reason
    return path, None


def elsewhere(content: Mapping[str, Any], path: str, reason: InputError) -> str:
    """Where a calibration lies that could not be written to ``path``: what took a minute to measure
    is not thrown away. Raises ``reason`` where nothing takes it."""
    other = os.path.join(tempfile.mkdtemp(prefix="napkinmath-"), os.path.basename(path))
    try:
        save(dict(content), other)
    except InputError:
        os.rmdir(os.path.dirname(other))
        raise reason from None
    return other


def allowance_of(given: Mapping[str, Any], device: Device, notes: list[str]) -> Allowance:
    """The seconds and bytes that the flags allow."""
    share = (
        values.number(given["share"], "--share", low=0.01) if "share" in given else DEFAULT_SHARE
    )
    budget = (
        values.number(given["budget"], "--budget", low=1.0, high=86400.0)
        if "budget" in given
        else DEFAULT_BUDGET_S
    )
    allowed = allowance(device, share=share, seconds=budget, notes=notes)
    hold_to(device, allowed)
    return allowed


def measured(
    given: Mapping[str, Any], device: Device, allowed: Allowance, notes: list[str]
) -> Calibrated:
    """The measurement that the flags describe."""
    if "gpu" in given:
        raise InputError(
            f"--gpu {shown(given['gpu'][0])} names what an estimate is for; a calibration measures"
            " what is here: --device cuda:N"
        )
    model = named_model(given, device, notes)
    share = (
        values.number(given["share"], "--share", low=0.01) if "share" in given else DEFAULT_SHARE
    )
    with progress(allowed) as advance:
        return calibrate(
            device, allowed, model, how=LayerOptions(share=share), notes=notes, advance=advance
        )


def named_model(
    given: Mapping[str, Any], device: Device, notes: list[str]
) -> ModelToMeasure | None:
    """The model that the flags name, with its training step; None where they name none."""
    if not {"model", "arch"} & given.keys():
        notes.append(
            "no --model was named: speeds only; with a model its real layers are measured too"
        )
        return None
    from napkinmath.inputs.model_options import model_spec
    from napkinmath.inputs.options import train_config
    from napkinmath.lowering.choices import as_loaded
    from napkinmath.lowering.precision import on_gpu

    from napkinmath_profiler.cli.trace import model_mapping

    if not device.is_cuda and "precision" not in given:
        given = {**given, "precision": CPU_PRECISION}
        notes.append(f"no --precision was given: {CPU_PRECISION} on a CPU")
    _, config = model_mapping(given)
    spec = model_spec(given, notes)
    train = as_loaded(spec.stored_type, spec.family, train_config(given), given)
    if "precision" not in given:
        train = on_gpu(train, device.catalogued, notes)
    return ModelToMeasure(config, spec, train)
