"""What stops a trace, said so that a person knows which op it was and how to go on."""

from __future__ import annotations

from napkinmath.errors import NapkinError

from napkinmath_profiler.tracing.storage_tracker import StorageTracker

VALUE_NEEDED = ("nonzero", "masked_select", "unique", "item", "_local_scalar_dense", "repeat_interleave", "bincount")
NO_DATA = ("meta", "data pointer", "data_ptr", "doesn't have storage", "no storage", "pin_memory", "is_cuda", "CUDA tensor", "on cuda")


class TraceError(NapkinError):
    """The traced program did something that storage-less tensors cannot answer."""


def explained(error: Exception, tracker: StorageTracker) -> TraceError | None:
    """``error`` as a ``TraceError`` naming op and module, or None when it is the program's own mistake."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
    where = f"{tracker.current_op or 'before the first op'} in {tracker.current_module or 'the root module'} ({tracker.phase.value})"
    wants_values = any(f".{name}." in f"{tracker.current_op}." or f"torch.{name}(" in text or f"::{name}" in text for name in VALUE_NEEDED)
    if wants_values and isinstance(error, (NotImplementedError, RuntimeError)):
        return TraceError(
            f"the shape of {where} depends on values, which a meta tensor has not: {text}; for mixture-of-experts use "
            'experts_implementation="grouped_mm", otherwise observe a real step on the CPU (device_type="cpu")'
        )
    if isinstance(error, NotImplementedError):
        return TraceError(
            f"{where} has no meta kernel: {text}; register one with torch.library.register_fake, or switch that kernel off for the trace"
        )
    if isinstance(error, (RuntimeError, ValueError, TypeError)) and any(mark in text for mark in NO_DATA):
        return TraceError(f"{where} wants real data or a real device: {text}; a custom CUDA extension must be switched off for the trace")
    return None
