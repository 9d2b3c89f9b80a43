"""Runs a recorder of whole steps, written for a GPU, on the CPU: torch.cuda's calls are answered
from the books that a GPU's allocator would keep.

    python tests/golden/record_on_cpu.py RECORDER.py OUT [CASE NUMBER ...]

The rows come out exactly as on a GPU (figures by phase, events of the allocator), of tiny shapes;
the environment says that it was a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from napkinmath_profiler.measuring.device_memory import CpuMemory

TOTAL_BYTES = 80 << 30


class Books(CpuMemory):
    """The allocator's books with the trace that PyTorch would record."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[dict[str, Any]] | None = None
        self._known: dict[int, int] = {}

    def _note(self, is_allocation: bool, address: int, nbytes: int) -> None:
        super()._note(is_allocation, address, nbytes)
        found = {segment.address: segment.size for segment in self._allocator.segments.values()}
        for start, size in found.items():
            if start not in self._known:
                self._entry("segment_alloc", start, size)
        self._known = found
        for action in ("alloc",) if is_allocation else ("free_requested", "free_completed"):
            self._entry(action, address, nbytes)

    def _entry(self, action: str, address: int, size: int) -> None:
        if self.trace is not None:
            self.trace.append(
                {
                    "action": action,
                    "addr": address,
                    "size": size,
                    "stream": 0,
                    "time_us": time.time_ns() // 1000,
                }
            )

    def segments(self) -> list[dict[str, Any]]:
        """As in a snapshot; blocks as far as a reader of sums needs them."""
        held: dict[int, list[tuple[int, int, int]]] = {}
        for block, nbytes in self._blocks.values():
            held.setdefault(block.segment.address, []).append((block.address, block.size, nbytes))
        return [
            {
                "address": s.address,
                "total_size": s.size,
                "segment_type": "small" if s.small else "large",
                "stream": 0,
                "blocks": [
                    {
                        "address": a,
                        "size": size,
                        "requested_size": asked,
                        "state": "active_allocated",
                    }
                    for a, size, asked in sorted(held.get(s.address, []))
                ],
            }
            for s in self._allocator.segments.values()
        ]


class Event:
    """torch.cuda.Event by the wall clock."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def answered_by(books: Books) -> None:
    """Have torch.cuda's calls answered by the books."""
    cuda = torch.cuda
    allocator = books._allocator

    def record(enabled: str | None = "all", **_: Any) -> None:
        books.trace = [] if enabled is not None else None

    answers = {
        "synchronize": lambda *_: None,
        "empty_cache": allocator.empty_cache,
        "reset_peak_memory_stats": books.reset_peaks,
        "reset_accumulated_memory_stats": lambda: None,
        "mem_get_info": lambda: (TOTAL_BYTES - allocator.reserved, TOTAL_BYTES),
        "memory_allocated": lambda: allocator.allocated,
        "max_memory_allocated": lambda: allocator.peak_allocated,
        "memory_reserved": lambda: allocator.reserved,
        "max_memory_reserved": lambda: allocator.peak_reserved,
        "memory_stats": dict,
        "current_device": lambda: 0,
        "Event": Event,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.memory._record_memory_history = record  # type: ignore[assignment]
    cuda.memory._snapshot = lambda: {
        "segments": books.segments(),
        "device_traces": [list(books.trace or [])],
    }  # type: ignore[assignment]
    torch._C._cuda_clearCublasWorkspaces = lambda: None  # type: ignore[attr-defined]


def loaded(path: Path) -> ModuleType:
    """The recorder as a module."""
    spec = importlib.util.spec_from_file_location("recorder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(recorder_path: str, out: str, *numbers: str) -> int:
    recorder = loaded(Path(recorder_path))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    sys.argv = [
        recorder_path,
        "--out",
        out,
        "--device",
        "cpu",
        "--only",
        "steps",
        "--skip-until",
        "1000",
    ]
    recorder.main()  # writes the environment
    stamped = json.loads((folder / "environment.json").read_text()) | {"trial": True}
    (folder / "environment.json").write_text(json.dumps(stamped, indent=1) + "\n")
    books = Books()
    answered_by(books)
    recorder.CUDA, recorder.DEADLINE = True, float("inf")
    wanted = {int(n) for n in numbers}
    cases = list(recorder.step_cases())
    with books, open(folder / "steps.jsonl", "a", encoding="utf-8") as file:
        for number, case in enumerate(cases):
            if wanted and number not in wanted:
                continue
            row = recorder.record_case(case, folder, True) | {"case": number}
            file.write(json.dumps(row) + "\n")
            print(
                number,
                case["model"],
                case["method"],
                row.get("error", row.get("oom", "")),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
