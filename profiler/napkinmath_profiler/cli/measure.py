"""``estimate measure``: run a real training step here and hold it against what was predicted."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from napkinmath.base import values
from napkinmath.base.errors import InputError, NapkinError, shown
from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from napkinmath.config.hardware import Hardware
from napkinmath.estimate import estimate

from napkinmath_profiler.cli.trace import headline, model_mapping, print_text
from napkinmath_profiler.measuring.beside import Side, analytic_side, side_of_timeline, traced_side
from napkinmath_profiler.measuring.device_names import device_named
from napkinmath_profiler.measuring.measurement import Measurement
from napkinmath_profiler.measuring.partial import (
    ExtrapolatedModel,
    LayerChoice,
    plan_layers,
    whole_model,
    with_kept,
)
from napkinmath_profiler.measuring.report import MeasureReport, as_mapping, report_text
from napkinmath_profiler.measuring.room import free_bytes
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from, refuse_workload
from napkinmath_profiler.tracing.traced_timeline import timeline_of

DEFAULT_MEMORY_SHARE = 0.9
DEFAULT_STEPS = 5
CPU_PRECISION = "fp32"
OWN = (
    (("--device",), TEXT, "NAME", "cuda, cuda:N or cpu [cuda]"),
    (("--layers",), TEXT, "N", "measure N layers and write out the rest [as many as fit]"),
    (("--steps",), TEXT, "N", f"steps to time [{DEFAULT_STEPS}]"),
    (
        ("--memory-share",),
        TEXT,
        "SHARE",
        f"how much of the free memory may be taken [{DEFAULT_MEMORY_SHARE}]",
    ),
    (
        ("--snapshot",),
        TEXT,
        "FILE",
        "keep the memory history, for PyTorch's memory_viz and `estimate compare` (.pickle)",
    ),
    (("--stacks",), ON, "", "record Python call stacks with it"),
    (("--force",), ON, "", "replace files that exist"),
)
DESCRIPTION = (
    "Build the model with random weights, run real training steps on this machine's device, and"
    " compare memory and time with the prediction."
)


def run(argv: Sequence[str]) -> int:
    """Parses the flags, measures, prints; returns 1 where memory ran out."""
    given: dict[str, Any] = _parser().parse(argv)
    notes: list[str] = []
    if "job" in given:
        from napkinmath.inputs.job_file import with_job_file

        given = dict(with_job_file(given, notes))
    _refuse_existing(given)
    report = make_report(given, notes)
    if "json" in given:
        print(json.dumps(as_mapping(report), indent=2))
    else:
        print_text(report_text, report)
    _write_files(report, given)  # last: a disk that is full costs the files alone
    return report.exit_code


def _parser() -> Parser:
    return Parser(
        "estimate measure",
        DESCRIPTION,
        (*SHARED, ("measure", OWN)),
        positional=("job", "MODEL|JOB", "a model, or a job file, as for `estimate`"),
    )


def make_report(options: Mapping[str, Any], notes: list[str]) -> MeasureReport:
    """Measures what ``options`` (flag names without dashes) describe."""
    from napkinmath.inputs.options import train_config
    from napkinmath.lowering.choices import as_loaded
    from napkinmath.lowering.precision import on_gpu
    from napkinmath.models.stored_weights import stored_type

    how = _how(options)
    device = device_named(how.device)
    if device.type == "cpu" and "precision" not in options:
        options = {**options, "precision": CPU_PRECISION}
        notes.append(
            f"no --precision was given: {CPU_PRECISION}, as a CPU is slow at anything shorter"
        )
    train = train_config(options)
    refuse_workload(train)
    name, mapping = model_mapping(options)
    train = as_loaded(stored_type(mapping), str(mapping.get("model_type")), train, options)
    machine = _hardware(device, [])
    if machine is not None and "precision" not in options:
        train = on_gpu(train, machine.gpu, notes)
    chosen = options_from(train)
    config = config_from(mapping)
    available = how.memory_share * free_bytes(device)
    wanted = values.count(options["layers"], "--layers") if "layers" in options else None

    def fits(count: int) -> bool:
        return _needed(mapping, config, count, train) <= available

    plan = plan_layers(config, chosen, fits, wanted=wanted)
    measurement, plan = _measure(config, chosen, how, plan)
    whole = _whole(config, chosen, how, plan, measurement)
    shown_config = config if whole is not None or plan.is_whole else with_kept(config, plan.kept)
    return MeasureReport(
        title=f"{name}, measured",
        what=headline(chosen),
        measurement=measurement,
        measured=_measured_side(measurement, whole),
        whole=whole,
        predicted=_predictions(shown_config, train, chosen, device, options, notes),
        notes=notes,
        explain="explain" in options,
    )


def _how(options: Mapping[str, Any]) -> MeasureOptions:
    share = (
        values.number(options["memory_share"], "--memory-share", low=0.01)
        if "memory_share" in options
        else DEFAULT_MEMORY_SHARE
    )
    return MeasureOptions(
        device=values.text(options.get("device", "cuda"), "--device"),
        num_steps=(
            values.count(options["steps"], "--steps") if "steps" in options else DEFAULT_STEPS
        ),
        stacks="stacks" in options,
        memory_share=share,
    )


def _needed(mapping: Mapping[str, Any], config: Any, count: int, train: Any) -> float:
    """Bytes that ``count`` layers will reserve at most by the estimate; 0 where there is none, so
    that trying decides."""
    try:
        kept = with_kept(config, range(count)).to_dict()
        return float(estimate({**mapping, **kept}, train).memory.reserved.high)
    except NapkinError:
        return 0.0


def _measure(
    config: Any, chosen: TraceOptions, how: MeasureOptions, plan: LayerChoice
) -> tuple[Measurement, LayerChoice]:
    """The measurement of the planned layers, or of fewer where memory ran out before anything was
    learned."""
    while True:
        found = measure_step(config, chosen, dataclasses.replace(how, kept=plan.kept))
        if found.failure is None or found.result is not None or len(plan.kept) == 1:
            return found, plan
        fewer = len(plan.kept) // 2
        plan = plan_layers(config, chosen, lambda count, most=fewer: count <= most)


def _whole(
    config: Any, chosen: TraceOptions, how: MeasureOptions, plan: LayerChoice, found: Measurement
) -> ExtrapolatedModel | None:
    if plan.is_whole or found.failure is not None:
        return None
    shorter = (
        measure_step(config, chosen, dataclasses.replace(how, kept=plan.slope))
        if plan.slope
        else None
    )
    return whole_model(found, shorter, plan)


def _measured_side(found: Measurement, whole: ExtrapolatedModel | None) -> Side | None:
    """The column of what was measured, whole where it was written out."""
    if whole is not None:
        return _whole_side(whole)
    seconds = {phase: summary.seconds.median_s for phase, summary in found.phases.items()}
    if found.timeline is not None:
        side = side_of_timeline("measured", found.timeline)
    elif seconds:
        side = Side("measured", None, 0, 0, 0, None, {}, seconds)
    else:
        return None
    memory = found.memory
    if memory is None:
        return dataclasses.replace(side, seconds=seconds)
    used = memory.device_used
    return dataclasses.replace(
        side, allocated=memory.allocated, reserved=memory.reserved, device=used, seconds=seconds
    )


def _whole_side(whole: ExtrapolatedModel) -> Side:
    """The column of the whole model, written out from the layers that were measured."""
    if whole.result is not None:
        side = side_of_timeline("measured", timeline_of(whole.result, origin="measured"))
        return dataclasses.replace(side, seconds=whole.seconds)
    peak = max(whole.phase_peaks.values(), default=0)
    return Side("measured", None, peak, 0, 0, None, whole.phase_peaks, whole.seconds)


def _predictions(
    config: Any,
    train: Any,
    chosen: TraceOptions,
    device: torch.device,
    options: Mapping[str, Any],
    notes: list[str],
) -> list[Side]:
    from napkinmath.inputs.hardware_options import calibration_on

    machine = _hardware(device, notes)
    calibration = calibration_on(machine, options, notes) if machine is not None else None
    analytic, reason = analytic_side(
        config.to_dict(), train, hardware=machine, calibration=calibration
    )
    if analytic is None and reason:
        notes.append(reason)
    traced = _traced(config, chosen, device, machine, notes)
    if device.type == "cpu":
        notes.append(
            "the trace makes this CPU's choices; the analytic column is of a GPU, whose kernels"
            " keep other tensors"
        )
    sides = (traced, analytic) if device.type == "cpu" else (analytic, traced)
    return [side for side in sides if side is not None]


def _traced(
    config: Any,
    chosen: TraceOptions,
    device: torch.device,
    machine: Hardware | None,
    notes: list[str],
) -> Side | None:
    """The traced column; None, and a note, where the step cannot be traced."""
    workspace = machine.gpu.cublas_workspace_bytes if machine is not None else 0
    try:
        return traced_side(config, chosen, device, workspace_bytes=workspace)
    # torch refuses what has no code for tensors without storage
    except (NapkinError, RuntimeError) as error:
        notes.append(f"not traced: {' '.join(str(error).split())[:300]}")
        return None


def _hardware(device: torch.device, notes: list[str]) -> Hardware | None:
    """The GPU that is there, as the catalog knows it."""
    if device.type != "cuda":
        return None
    from napkinmath.catalog.gpus import find_hardware

    name = torch.cuda.get_device_name(device)
    try:
        return find_hardware(name)
    except InputError:
        notes.append(f"{name} is not in the catalog of GPUs, so no time was predicted")
        return None


def _refuse_existing(given: Mapping[str, Any]) -> None:
    """Before anything is measured: no file is replaced without --force."""
    for key in ("timeline", "snapshot"):
        if key in given and os.path.lexists(given[key]) and "force" not in given:
            raise InputError(
                f"--{key} {shown(given[key], limit=200)} exists; add --force to replace it, or name"
                " another"
            )


def _write_files(report: MeasureReport, given: Mapping[str, Any]) -> None:
    force = "force" in given
    if "timeline" in given and report.measured is not None and report.measured.timeline is not None:
        from napkinmath.report.plot import write_timeline

        write_timeline(report.measured.timeline, given["timeline"], title=report.title, force=force)
    if "snapshot" not in given:
        return
    if not given["snapshot"]:
        raise InputError(f"--snapshot {shown(given['snapshot'])} is not a file name")
    index = torch.device(_how(given).device).index
    _write_snapshot(report.measurement, given["snapshot"], device_index=index or 0, force=force)


def _write_snapshot(found: Measurement, path: str, *, device_index: int, force: bool) -> None:
    """What the allocator recorded, labelled; on a CPU, which records nothing, the timeline."""
    if found.timeline is None or found.result is None:
        print("note: no snapshot was written, since nothing was recorded", file=sys.stderr)
    elif found.snapshot is not None:
        from napkinmath_profiler.measuring.labelled_snapshot import write_labelled

        write_labelled(
            found.snapshot,
            found.result,
            path,
            found.present,
            device_index=device_index,
            force=force,
        )
    else:
        from napkinmath_profiler.snapshot.write_snapshot import write_snapshot

        write_snapshot(found.timeline, path, force=force)
