"""``estimate oom [FILE]``: what a CUDA out-of-memory message (or a snapshot with one) means, and
what would have fitted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from napkinmath.base.errors import InputError, NapkinError, shown
from napkinmath.base.opener import without_waiting
from napkinmath.base.units import MIB, format_bytes
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser

from napkinmath_profiler.snapshot.oom_message import OutOfMemoryMessage, read_messages

if TYPE_CHECKING:
    from napkinmath.estimate import Estimate
    from napkinmath.ir.timeline import Timeline

MAX_MESSAGE_BYTES = MIB
MOST_TENSORS = 5
MOST_MESSAGES = 8
SAME_SIZE = 0.005  # sizes in a message are printed with two decimals
DESCRIPTION = (
    "Explain a pasted PyTorch out-of-memory message or a log with several (CUDA, HIP, XPU or MPS;"
    " from FILE or standard input) or a memory_snapshot.pickle. With the flags of `estimate` it says"
    " also what the request was for and which change would have made it fit."
)
MODEL_OPTIONS = ("model", "arch", "config", "job")


def run(argv: Sequence[str]) -> int:
    """Reads, explains, prints."""
    what = "message text, or a snapshot (.pickle); '-' or nothing: standard input"
    parser = Parser("estimate oom", DESCRIPTION, SHARED, positional=("file", "FILE", what))
    options: dict[str, Any] = parser.parse(argv)
    source = options.pop("file", "-")
    if source.endswith((".pickle", ".pkl")):
        lines = explain_snapshot(source)
    else:
        lines = _explained(read_messages(_text(source)), options)
    as_json = json.dumps({"schema": 1, "lines": lines}, indent=2)
    print(as_json if "json" in options else "\n".join(lines))
    return 0


def _text(source: str) -> str:
    try:
        if source == "-":
            if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  # closed: `<&-`
                raise InputError(
                    "standard input is closed; give a file or the message itself, as one argument"
                )
            if sys.stdin.isatty():
                print("paste the message, then end the input (Ctrl-D):", file=sys.stderr)
            return sys.stdin.read(MAX_MESSAGE_BYTES)
        if not os.path.exists(source):
            return source  # the message itself, as one argument
        with open(source, encoding="utf-8", errors="replace", opener=without_waiting) as file:
            return file.read(MAX_MESSAGE_BYTES)
    except OSError as error:
        raise InputError(
            f"{shown(source)} cannot be read: {error.strerror or error}; check the path"
        ) from None


def _explained(messages: list[OutOfMemoryMessage], options: dict[str, Any]) -> list[str]:
    """Every message under its rank; the model's part is about the largest request."""
    lines: list[str] = []
    for message in messages[:MOST_MESSAGES]:
        if len(messages) > 1:
            rank = "" if message.rank is None else f"rank {message.rank}, "
            lines.append(f"{rank}GPU {'?' if message.gpu is None else message.gpu}:")
        lines += explain(message)
    if len(messages) > MOST_MESSAGES:
        lines.append(f"{len(messages) - MOST_MESSAGES} more messages are left out")
    if any(key in options for key in MODEL_OPTIONS):
        lines += explain_with_model(max(messages, key=lambda message: message.tried), options)
    return lines


def explain(message: OutOfMemoryMessage) -> list[str]:
    """The message's figures in plain words, and the first thing to try."""
    lines = [f"asked for {format_bytes(message.tried)} in one piece"]
    for text, value in (
        ("the GPU has", message.capacity),
        ("PyTorch's tensors hold", message.allocated),
        (
            "of that, private pools (CUDA graphs, MemPool) keep for themselves",
            message.private_pools,
        ),
        ("PyTorch has cached, but cannot use for this request,", message.unallocated),
        (
            "this process holds outside PyTorch (CUDA context, NCCL, other libraries)",
            message.outside_pytorch,
        ),
        ("the driver keeps in the host's memory", message.paged_to_host or None),
        ("other processes hold", message.other_processes or None),
        ("a memory limit of this process allows", message.limit),
        ("free", message.free),
    ):
        if value is not None:
            lines.append(f"  {text} {format_bytes(value)}")
    return [*lines, _verdict(message)]


def _verdict(message: OutOfMemoryMessage) -> str:
    free, cached = message.free or 0, message.unallocated or 0
    pools = message.private_pools or 0
    if message.paged_to_host:
        return (
            f"{format_bytes(message.paged_to_host)} more than the GPU has are in the host's memory"
            " already, which is slow: what is held has to shrink by that and by the request"
        )
    if message.limit is not None and free >= message.tried:
        return (
            "the GPU has the memory; the limit set by set_per_process_memory_fraction is what"
            " stops it"
        )
    if message.kind == "mps" and message.missing:
        return f"{format_bytes(message.missing)} too little below the limit, which Metal recommends"
    if free >= message.tried and pools < message.tried:
        return (
            f"more is free than the {format_bytes(message.tried)} asked for, yet the driver refused"
            " one piece of that size: a limit of the driver or of the system, or another process"
            " gave memory back meanwhile"
        )
    if cached + free >= message.tried and cached > free:
        name = "PYTORCH_NPU_ALLOC_CONF" if message.kind == "npu" else "PYTORCH_ALLOC_CONF"
        enough = "enough is cached" if cached >= message.tried else "cached and free are enough"
        return (
            f"fragmentation: {enough}, but in pieces; {name}=expandable_segments:True makes the"
            " pieces one"
        )
    if pools and pools >= message.tried - free:
        return (
            f"private pools keep {format_bytes(pools)} that nothing else can use: capture fewer or"
            " smaller CUDA graphs, or none (torch.compile's mode 'reduce-overhead', vLLM's sleep"
            " mode and an engine's graphs make such pools)"
        )
    if message.other_processes >= message.tried - free:
        return "another process holds what is missing: stop it, or choose another GPU"
    missing = message.missing
    if missing is None:
        return (
            "the message does not say how much is free; name the model and its flags to see what"
            " would fit"
        )
    return (
        f"at least {format_bytes(missing)} too little, and likely more, as the step goes on after"
        " this request"
    )


def explain_with_model(message: OutOfMemoryMessage, options: dict[str, Any]) -> list[str]:
    """What in the step described by ``options`` has the size of the request, and which changes
    would make room."""
    from napkinmath.cli.estimate_command import make_estimates

    estimate = make_estimates(options, [])[0]
    names = _tensors_of_size(estimate, message.tried)[:MOST_TENSORS]
    lines = [f"a request of that size in this step: {', '.join(names)}"] if names else []
    needed, room = estimate.peak.nbytes, message.room
    beside = "" if room is None else f", of {format_bytes(room)} that PyTorch can have"
    lines.append(f"the step needs {format_bytes(needed)} requested at its peak{beside}")
    for change in estimate.changes:
        fits = change.saved_bytes > (message.missing or 0) and (
            room is None or needed - change.saved_bytes <= room
        )
        enough = "enough" if fits else "not enough alone"
        lines.append(
            f"  {change.flag}: -{format_bytes(change.saved_bytes)} ({enough})  {change.meaning}"
        )
    return lines


def _tensors_of_size(estimate: Estimate, num_bytes: int) -> list[str]:
    """Names of the step's tensors of about this size, those of like layers once."""
    names: dict[str, None] = {}
    for tensor in estimate.timeline.tensors:
        if tensor.requested and abs(tensor.requested - num_bytes) <= SAME_SIZE * num_bytes:
            parts = ["*" if part.isdecimal() else part for part in tensor.module.split(".") if part]
            place = ".".join(parts)
            names[f"{tensor.name} of {place}" if place else tensor.name] = None
    return list(names)


def explain_snapshot(path: str) -> list[str]:
    """What was alive when a recorded run failed, or at its peak."""
    from napkinmath_profiler.snapshot.read_snapshot import read_snapshot

    recorded = read_snapshot(path)
    timeline = recorded.timeline
    if not timeline.segments:
        raise NapkinError(
            f"{shown(path)} holds no events; record with torch.cuda.memory._record_memory_history()"
            " before the step"
        )
    lines = []
    for event in recorded.out_of_memory:
        free = event.get("device_free")
        beside = f" with {format_bytes(free)} free" if free is not None else ""
        lines.append(f"out of memory: asked for {format_bytes(event['size'])}{beside}")
    lines.append(
        f"at the peak {format_bytes(timeline.peak().nbytes)} were requested,"
        f" {format_bytes(recorded.peak_reserved)} reserved; the largest, by call stack:"
    )
    return lines + _largest_at_peak(timeline)


def _largest_at_peak(timeline: Timeline) -> list[str]:
    """Bytes and tensors alive at the peak by call stack, the largest first."""
    groups: dict[str, list[int]] = {}
    counts = timeline.live_counts(timeline.peak())
    for tensor, count in zip(timeline.tensors, counts, strict=True):
        if count:
            group = groups.setdefault(tensor.name, [0, 0])
            group[0] += count
            group[1] += count * tensor.requested
    ranked = sorted(groups.items(), key=lambda item: -item[1][1])[: 2 * MOST_TENSORS]
    return [f"  {format_bytes(size)} in {count}  {name}" for name, (count, size) in ranked]
