"""Choosing among tiles by timing each once, and remembering the choice beside the calibration.

The file is `kernel-choices.json` in the folder of `estimate calibrate`; a choice belongs to a GPU,
a Triton version and a key of the caller. NAPKINMATH_KERNEL_CHOICES names another file, or `off`:
then the first tile is taken and nothing is timed. A tile changes the order of sums, so results
repeat bit for bit only under one choice.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import triton

T = TypeVar("T")

VARIABLE = "NAPKINMATH_KERNEL_CHOICES"
#: Calls of each candidate that are timed, after one that compiles it.
CALLS = 5
_chosen: dict[str, str] = {}


def choices_file() -> Path | None:
    """Where choices are remembered, or None if they are switched off."""
    given = os.environ.get(VARIABLE, "")
    if given == "off":
        return None
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "napkinmath" / "calibration" / "kernel-choices.json"


@functools.cache
def _remembered(path: Path) -> dict[str, str]:
    """What the file holds; nothing if it is missing or cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _remember(path: Path, key: str, name: str) -> None:
    """Adds a choice to the file, whole or not at all; a folder that cannot be written costs a
    timing in the next process."""
    _remembered.cache_clear()  # another process may have added to it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(
            json.dumps({**_remembered(path), key: name}, indent=1, sort_keys=True) + "\n",
            encoding="utf-8",
        )
        part.replace(path)
    except OSError:
        return
    _remembered.cache_clear()


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The middle one of `CALLS` timed calls, after one that is not."""
    call()
    times = []
    for _ in range(CALLS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        torch.cuda.synchronize(device)
        times.append(before.elapsed_time(after) / 1e3)
    return sorted(times)[CALLS // 2]


def choose(
    key: str,
    candidates: Sequence[T],
    run: Callable[[T], object],
    device: torch.device,
    seconds: Callable[[Callable[[], object], torch.device], float] = median_seconds,
) -> T:
    """The fastest of `candidates` at what `key` names: remembered, or timed now by `run`, which
    must be repeatable. The first one where there is nothing to choose or timing is not allowed: no
    GPU, a graph being captured, choices switched off."""
    path = choices_file()
    if len(candidates) == 1 or path is None or device.type != "cuda":
        return candidates[0]
    key = f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}: {key}"
    by_name = {str(candidate): candidate for candidate in candidates}
    known = _chosen.get(key) or _remembered(path).get(key)
    if known in by_name:
        _chosen[key] = known
        return by_name[known]
    if torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times = {name: seconds(functools.partial(run, one), device) for name, one in by_name.items()}
    fastest = min(times, key=times.__getitem__)
    _chosen[key] = fastest
    _remember(path, key, fastest)
    return by_name[fastest]


def chosen() -> dict[str, str]:
    """What this process has chosen so far, by GPU, version and key."""
    return dict(_chosen)
