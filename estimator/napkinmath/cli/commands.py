"""The table of commands: a new one is a file in this folder and a line here."""

from __future__ import annotations

# name -> ("module:function", what it does); imported when called. A function takes the remaining
# arguments and returns an exit code (None: 0).
COMMANDS: dict[str, tuple[str, str]] = {
    "models": ("napkinmath.cli.list_models:run", "list the catalog of models"),
    "gpus": ("napkinmath.cli.list_gpus:run", "list the catalog of GPUs"),
    "version": ("napkinmath.cli.version:run", "print the version"),
    "trace": (
        "napkinmath_profiler.cli.trace:run",
        "run the real libraries on tensors without storage",
    ),
    "learn": (
        "napkinmath_profiler.cli.learn:run",
        "learn an architecture from the installed transformers",
    ),
    "allocator": ("napkinmath_profiler.cli.allocator:run", "what allocator settings would do"),
    "oom": ("napkinmath_profiler.cli.oom:run", "explain an out-of-memory message or snapshot"),
    "compare": (
        "napkinmath_profiler.cli.compare:run",
        "analytic, traced and measured side by side",
    ),
    "calibrate": (
        "napkinmath_profiler.cli.calibrate:run",
        "measure this device and real layers of a model",
    ),
    "calibration": (
        "napkinmath.cli.calibration_command:run",
        "show, compare or remove calibrations",
    ),
    "measure": ("napkinmath_profiler.cli.measure:run", "measure a training step on this GPU"),
    "bench": (
        "napkinmath_profiler.cli.bench:run",
        "ceilings of this device, and a model's operations under them",
    ),
    "watch": ("napkinmath_profiler.cli.watch:run", "follow a running training's memory"),
    "links": ("napkinmath.cli.links:run", "time and bandwidth of collectives by message size"),
    "plan": (
        "napkinmath.cli.plan:run",
        "what to run: the fastest, longest, cheapest configuration that fits",
    ),
    "generate": ("napkinmath.cli.generate:run", "inference on its own, in an engine"),
    "check": ("napkinmath.cli.check:run", "fail a build or a SLURM job that would not fit"),
    "sweep": ("napkinmath.cli.sweep:run", "every combination of options with several values"),
    "batch": ("napkinmath.cli.batch:run", "many jobs from a file of JSON lines"),
    "serve": ("napkinmath.cli.serve:run", "the report in a browser"),
    "page": ("napkinmath.cli.page:run", "the page as static files that need no installation"),
    "doctor": ("napkinmath.cli.doctor:run", "what is installed and what works here"),
    "completion": ("napkinmath.cli.completion:run", "tab completion for bash, zsh or fish"),
}
DEFAULT = "napkinmath.cli.estimate_command:run"
START = "napkinmath.cli.start:run"
# The parser of a command whose module takes seconds to import: its help comes without that.
PARSERS = {
    "trace": "napkinmath_profiler.cli.trace_flags:parser",
    "watch": "napkinmath_profiler.cli.watch_flags:parser",
    "learn": "napkinmath_profiler.cli.learn_flags:parser",
}
