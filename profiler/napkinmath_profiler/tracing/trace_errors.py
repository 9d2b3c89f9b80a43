"""What stops a trace, said so that a person knows which op it was and how to go on."""

from __future__ import annotations

import pathlib
import traceback

from napkinmath.base.errors import NapkinError

from napkinmath_profiler.tracing.storage_tracker import StorageTracker

VALUE_NEEDED = (
    "nonzero",
    "masked_select",
    "unique",
    "item",
    "_local_scalar_dense",
    "repeat_interleave",
    "bincount",
)
LIBRARIES = ("transformers", "peft", "bitsandbytes", "trl", "accelerate", "liger_kernel")
NO_DATA = (
    "meta",
    "data pointer",
    "data_ptr",
    "doesn't have storage",
    "no storage",
    "pin_memory",
    "is_cuda",
    "CUDA tensor",
    "on cuda",
)


class TraceError(NapkinError):
    """The traced program did something that storage-less tensors cannot answer."""


def explained(error: Exception, tracker: StorageTracker) -> TraceError | None:
    """``error`` as a ``TraceError`` naming op and module, or None when it is the program's own
    mistake."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
    where = (
        f"{tracker.current_op or 'before the first op'} in"
        f" {tracker.current_module or 'the root module'} ({tracker.phase.value})"
    )
    wants_values = any(
        f".{name}." in f"{tracker.current_op}." or f"torch.{name}(" in text or f"::{name}" in text
        for name in VALUE_NEEDED
    )
    if wants_values and isinstance(error, (NotImplementedError, RuntimeError)):
        return TraceError(
            f"the shape of {where} depends on values, which a meta tensor lacks: {text}; for"
            ' mixture-of-experts use experts_implementation="grouped_mm", otherwise observe a real'
            ' step on the CPU (device_type="cpu")'
        )
    if isinstance(error, NotImplementedError):
        return TraceError(
            f"{where} has no meta kernel: {text}; register one with torch.library.register_fake, or"
            " switch that kernel off for the trace"
        )
    if isinstance(error, (RuntimeError, ValueError, TypeError)) and any(
        mark in text for mark in NO_DATA
    ):
        return TraceError(
            f"{where} wants real data or a real device: {text}; a custom CUDA extension must be"
            " switched off for the trace"
        )
    place = library_place(error)
    if place:
        return TraceError(
            f"the code of {place.split('/')[0]} fails in"
            f" {tracker.current_module or 'the root module'} ({tracker.phase.value}) with"
            f" {type(error).__name__}: {text} ({place}); a real step most likely fails alike:"
            " change the configuration, or take the analytic estimate"
        )
    return None


def library_place(error: BaseException) -> str:
    """'transformers/models/.../file.py:450' where the error was raised by the code of a library
    that is traced, else nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    parts = pathlib.Path(frames[-1].filename).parts
    owner = next(
        (
            i
            for i, part in enumerate(parts)
            if part in LIBRARIES and i and parts[i - 1].endswith("-packages")
        ),
        None,
    )
    return "" if owner is None else f"{'/'.join(parts[owner:])}:{frames[-1].lineno}"
