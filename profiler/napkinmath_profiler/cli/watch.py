"""``estimate watch SCRIPT.py [ARGS ...]``: run a training script and follow its memory step by
step."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.estimate import Estimate

from napkinmath_profiler.cli.watch_flags import USAGE, parser, split
from napkinmath_profiler.measuring.device_memory import CpuMemory, CudaMemory, DeviceMemory
from napkinmath_profiler.measuring.device_names import device_named
from napkinmath_profiler.measuring.watch_defaults import DEFAULT_REPORT
from napkinmath_profiler.watch import watch

MODEL_OPTIONS = ("model", "arch", "config")


def run(argv: Sequence[str]) -> int:
    """Runs the script; its exit code, or 1 where memory ran out."""
    own, script = split(argv)
    try:
        options: dict[str, Any] = parser().parse(own)
    except InputError as error:
        if script or "is left over" not in str(error):
            raise
        raise InputError(f"no script was named; write {USAGE}, or -- before its name") from None
    if not script:
        raise InputError(f"no script was named; write {USAGE}")
    limit = values.size(options["limit"], "--limit") if "limit" in options else None
    books, note = _books(options, limit)
    if note:
        _say(note)
    how: dict[str, Any] = {"predicted": _predicted(options), "limit_bytes": limit, "warn": _say}
    with watch(memory=books, report=options.get("report", DEFAULT_REPORT), **how) as watching:
        try:
            code = _execute(script)
        except torch.OutOfMemoryError as error:
            _say(" ".join(str(error).split()))
            code = 1
    print(watching.summary(), file=sys.stderr)
    return code


def _execute(script: list[str]) -> int:
    before = sys.argv
    try:
        if script[0] == "-m":
            sys.argv = script[1:]
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = script
            runpy.run_path(script[0], run_name="__main__")
    except FileNotFoundError as error:
        if error.filename == script[0]:
            raise InputError(
                f"{shown(script[0], limit=200)} is not there; name a script that is"
            ) from None
        raise
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    finally:
        sys.argv = before
    return 0


def _books(options: dict[str, Any], limit: int | None) -> tuple[DeviceMemory, str]:
    if "device" not in options and not torch.cuda.is_available():
        return (
            CpuMemory(limit_bytes=limit),
            (
                "no GPU is visible: these are the books that its allocator would keep of the"
                " script's CPU tensors"
            ),
        )
    device = device_named(values.text(options.get("device", "cuda"), "--device"))
    return (CpuMemory(limit_bytes=limit), "") if device.type == "cpu" else (CudaMemory(device), "")


def _predicted(options: dict[str, Any]) -> Estimate | None:
    if not any(key in options for key in MODEL_OPTIONS):
        return None
    from napkinmath.cli.estimate_command import make_estimates

    own = {key: value for key, value in options.items() if key not in ("device", "report", "limit")}
    return make_estimates(own, [])[0]


def _say(text: str) -> None:
    print(f"watch: {text}", file=sys.stderr, flush=True)
