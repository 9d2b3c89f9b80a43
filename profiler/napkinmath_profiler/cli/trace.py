"""``estimate trace``: run the real libraries' training step on tensors without storage and report
its memory."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from napkinmath.base import values
from napkinmath.base.errors import InputError, NapkinError, plain, shown
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import Kernels, Loss, TrainConfig
from napkinmath.inputs.model_options import task_asked
from napkinmath.ir.timeline import Timeline
from napkinmath.memory.allocator_settings import parse_settings
from napkinmath.memory.replay import replay
from napkinmath.models.tasks import for_task
from napkinmath.report.screen import is_unicode, standard_output, terminal_width, wants_color

from napkinmath_profiler.cli.trace_flags import parser
from napkinmath_profiler.trace import TraceOptions, trace_options
from napkinmath_profiler.tracing.library_workspaces import with_product_workspaces
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_findings import findings
from napkinmath_profiler.tracing.trace_options import options_from, refuse_workload
from napkinmath_profiler.tracing.trace_report import TraceReport, as_mapping, report_text
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of

DEFAULT_CAPABILITY = (8, 0)
# What they warn of on import (a CPU kernel, a backend for another GPU) is no news to who asked for
# a trace.
CHATTY = (
    "bitsandbytes.backends.cpu.ops",
    "liger_kernel",
    "transformers.configuration_utils",
    "transformers.modeling_utils",
)


def run(argv: Sequence[str]) -> int:
    """Parses the flags, traces, prints; returns the exit code."""
    given: dict[str, Any] = parser().parse(argv)
    notes: list[str] = []
    options = within_positions(_with_job(given, notes), notes)
    hardware = _machine(options)
    report = make_report(options, hardware)
    _write_files(report, given)
    if "json" in given:
        print(json.dumps(as_mapping(report), indent=2))
    else:
        print_text(report_text, report)
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    return report.exit_code


def print_text(text_of: Callable[..., str], report: object) -> None:
    """Prints a report as wide and as colourful as the terminal takes it."""
    out = standard_output()
    width, color, unicode = terminal_width(out), wants_color(out), is_unicode(out)
    out.write(text_of(report, width=width, color=color, unicode=unicode))


def make_report(options: Mapping[str, Any], hardware: Hardware | None = None) -> TraceReport:
    """Traces what ``options`` (flag names without dashes) describe."""
    name, mapping, chosen, plain = _traced(options, hardware)
    result = with_product_workspaces(plain, _workspace_bytes(hardware))
    timeline = timeline_of(result)
    return TraceReport(
        title=f"{name}, traced",
        what=headline(chosen),
        result=result,
        timeline=timeline,
        books=replay(timeline, parse_settings(str(options.get("allocator", "")))),
        findings=findings(
            plain,
            chosen,
            lambda changed: trace_options(config_from(mapping), changed, all_layers=False),
            vocabulary=getattr(config_from(mapping).get_text_config(), "vocab_size", 0),
        ),
        hardware=hardware,
        num_layers_traced=_layers_text(result.num_layers_written),
    )


def _traced(
    options: Mapping[str, Any], hardware: Hardware | None
) -> tuple[str, dict[str, Any], TraceOptions, TraceResult]:
    """The model's name and config, its step as the tracer takes it, and what was recorded."""
    from napkinmath.inputs.options import train_config
    from napkinmath.lowering.choices import as_loaded
    from napkinmath.lowering.precision import on_gpu
    from napkinmath.models.stored_weights import stored_type

    _quieten()
    config = train_config(options)
    refuse_workload(config)
    name, mapping = model_mapping(options)
    config = as_loaded(stored_type(mapping), str(mapping.get("model_type")), config, options)
    if hardware is not None and "precision" not in options:
        config = on_gpu(config, hardware.gpu, [])  # the report's headline says it
    chosen = options_from(config, compute_capability=_capability(hardware))
    all_layers = bool(options.get("all_layers", False))
    return name, mapping, chosen, trace_options(config_from(mapping), chosen, all_layers=all_layers)


def _layers_text(num_written: int) -> str:
    if num_written == 0:
        return "every layer traced"
    return f"{num_written} layers written out from like ones"


def traced_timeline(options: Mapping[str, Any]) -> Timeline:
    """The timeline of what ``options`` describe, without a report."""
    _quieten()
    options = within_positions(options, [])
    hardware = _machine(options)
    *_, result = _traced(options, hardware)
    return timeline_of(with_product_workspaces(result, _workspace_bytes(hardware)))


def within_positions(options: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The options with a length that the model's learned positions allow; a longer one that was
    asked for is noted, for no trace fails of it."""
    from napkinmath.models.families import read_config

    chosen = dict(options)
    name, mapping = model_mapping(chosen)
    try:
        spec = read_config(mapping)
        longest = spec.longest_sequence
    except NapkinError:  # a family that is traced and not priced
        return chosen
    if spec.sound is not None or "audio" in chosen:
        from napkinmath.inputs.sounds import steps_asked

        steps = steps_asked(spec, chosen, notes)
        chosen |= {} if steps is None else {"ctx": steps}
    length = values.count(chosen.get("ctx", TrainConfig().sequence_length), "--ctx")
    if not 0 < longest < length:
        return chosen
    if "ctx" in chosen:
        notes.append(
            f"{name} has learned positions for {longest:,} tokens: a sequence of {length:,} fails"
            " with an index error"
        )
        return chosen
    notes.append(f"--ctx {longest}: {name} has learned positions for no more")
    return {**chosen, "ctx": longest}


def _quieten() -> None:
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def headline(chosen: TraceOptions) -> list[str]:
    """What is run, in a few words."""
    words = [
        chosen.method.value,
        f"batch {chosen.micro_batch_size} x {chosen.sequence_length}",
        f"weights {chosen.dtype}",
    ]
    if chosen.loop.autocast_dtype is not None:
        words.append(f"autocast {str(chosen.loop.autocast_dtype).removeprefix('torch.')}")
    if chosen.checkpointing:
        words.append("checkpointing" + (" (reentrant)" if chosen.use_reentrant else ""))
    if not chosen.training:
        words.append("eval mode")
    if chosen.kernels is not Kernels.HF:
        words.append(f"{chosen.kernels.value} kernels")
    if chosen.loss is not Loss.HF:
        words.append(f"{chosen.loss.value} loss")
    if chosen.optimizer:
        words.append(chosen.optimizer)
    return words


def _with_job(given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    if "job" not in given:
        return dict(given)
    from napkinmath.inputs.job_file import with_job_file

    return with_job_file(given, notes)


def _machine(options: Mapping[str, Any]) -> Hardware | None:
    from napkinmath.inputs.hardware_options import machines

    found = machines(options)
    if len(found) > 1:
        raise InputError(
            f"a trace makes one GPU's choices, not those of {len(found)}; give one --gpu"
        )
    return found[0]


def _workspace_bytes(hardware: Hardware | None) -> int:
    return hardware.gpu.cublas_workspace_bytes if hardware is not None else 0


def _capability(hardware: Hardware | None) -> tuple[int, int]:
    text = hardware.gpu.compute_capability if hardware is not None else ""
    major, _, minor = text.partition(".")
    return (
        (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else DEFAULT_CAPABILITY
    )


def model_mapping(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and Hugging Face config of the model that options name, as ``estimate`` finds it, under
    the architecture of the task they name."""
    name, mapping = _named_mapping(options)
    task = task_asked(options)
    return name, for_task(mapping, task) if task else mapping


def _named_mapping(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if "config" in options:
        return "config", dict(values.mapping(options["config"], "config"))
    if "arch" in options:
        from napkinmath.models.arch_string import read_arch

        text = values.text(options["arch"], "--arch")
        positions = values.count(options.get("ctx", 2048), "--ctx")
        return text, dict(read_arch(text, [], positions=positions))
    if "model" not in options:
        raise InputError(
            "no model was named; give --model NAME (list: `estimate models`), --arch, or a job file"
        )
    name = values.text(options["model"], "--model")
    if options.get("hub"):
        from napkinmath.inputs.hub import fetch_config

        return name, dict(fetch_config(name))
    return _model_named(name)


def _model_named(name: str) -> tuple[str, dict[str, Any]]:
    """A row of the catalog, or a config file of that name."""
    from napkinmath.catalog.models import find_row, unknown_model
    from napkinmath.models import config_file

    row = find_row(name)
    if row is not None:
        return str(row["name"]), dict(row["config"])
    path = config_file.find(name)
    if path is None:
        raise unknown_model(name)
    return config_file.model_name(path), dict(config_file.read(path))


def _write_files(report: TraceReport, given: Mapping[str, Any]) -> None:
    force = "force" in given
    if "timeline" in given:
        from napkinmath.report.plot import write_timeline

        write_timeline(report.timeline, given["timeline"], title=report.title, force=force)
    for key, writer in (("snapshot", _write_snapshot), ("chrome", _write_chrome)):
        if key in given:
            if not given[key]:
                raise InputError(f"--{key} {shown(given[key])} is not a file name")
            writer(report, given[key], force)


def _write_snapshot(report: TraceReport, path: str, force: bool) -> None:
    from napkinmath_profiler.snapshot.write_snapshot import write_snapshot

    write_snapshot(report.timeline, path, force=force)


def _write_chrome(report: TraceReport, path: str, force: bool) -> None:
    from napkinmath_profiler.snapshot.chrome_trace import write_chrome_trace

    write_chrome_trace(report.timeline, path, force=force)


if __name__ == "__main__":  # the trace printed raw, for people who write rules
    from napkinmath_profiler.cli.oracle import main

    main()
