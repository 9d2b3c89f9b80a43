"""What stops a trace, said so that a person knows which op it was and how to go on."""

from __future__ import annotations

import pathlib
import re
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager

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
# torch's words where operands lie on two devices, or are sent to CUDA by name
OTHER_DEVICE = re.compile(r"not on the expected device|on the same device|not compiled with CUDA")


class TraceError(NapkinError):
    """The traced program did something that storage-less tensors cannot answer."""


def explained(error: Exception, tracker: StorageTracker) -> TraceError | None:
    """``error`` as a ``TraceError`` naming op and module, or None when it is the program's own
    mistake."""
    refused = refusal(error)
    if refused is not None:
        return refused
    text = _first_sentence(error)
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
    if OTHER_DEVICE.search(text):
        return TraceError(
            f"{where} got a tensor on another device than the model's: {text}; make the batch"
            " within step=, on next(model.parameters()).device"
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
            f" {type(error).__name__}: {text} ({place}); a real step may fail alike, or the trace"
            " alone does: run `estimate measure --device cpu`, or take the analytic estimate"
        )
    return None


def refusal(error: Exception) -> TraceError | None:
    """A library's own refusal, with its reason: an error that its code raises on purpose. None for
    what merely went wrong there."""
    frames = traceback.extract_tb(error.__traceback__)
    place = library_place(error)
    if not place or not (frames[-1].line or "").startswith("raise "):
        return None
    library = place.split("/")[0]
    return TraceError(f"{library} refuses this run: {_whole_text(error)} ({place})")


@contextmanager
def refusals_named() -> Generator[None]:
    """A library's refusal, while a model is built and set up, as a TraceError."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        refused = refusal(error) or _failed_set_up(error)
        if refused is None:
            raise
        raise refused from error


def _whole_text(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _first_sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]


def library_place(error: BaseException) -> str:
    """'transformers/models/.../file.py:450' where the error was raised by the code of a library
    that is traced, else nothing."""
    return _place(traceback.extract_tb(error.__traceback__)[-1:])


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The first of the frames if it is a traced library's, else nothing."""
    if not frames:
        return ""
    parts = pathlib.Path(frames[0].filename).parts
    owner = next(
        (
            i
            for i, part in enumerate(parts)
            if part in LIBRARIES and i and parts[i - 1].endswith("-packages")
        ),
        None,
    )
    return "" if owner is None else f"{'/'.join(parts[owner:])}:{frames[0].lineno}"


def _failed_set_up(error: Exception) -> TraceError | None:
    """An error below a library's code while a model is set up, which asks nothing of values."""
    frames = list(traceback.extract_tb(error.__traceback__))
    while frames and not _place(frames[-1:]):
        if "napkinmath" in frames[-1].filename:
            return None
        frames.pop()
    place = _place(frames[-1:])
    if not place:
        return None
    return TraceError(
        f"{place.split('/')[0]} fails to set this run up: {_whole_text(error)} ({place})"
    )
