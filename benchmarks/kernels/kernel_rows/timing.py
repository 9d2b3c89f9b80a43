"""Timing contestants in turn over rotated inputs: medians with their spread, peak memory, rows
written as they come."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_rows.goals import Goal

# : Input sets together exceed this many bytes, twice the L2 of an H200, so that no call finds its
# inputs in the cache.
ROTATED_BYTES = 120 * 2**20
FEWEST_SETS, MOST_SETS = 4, 32


@dataclass
class Case:
    """One comparison: how to make a set of inputs, and what each contestant does with one. Ours is
    named `napkinmath`.

    `traffic_bytes` and `flops` of one call turn seconds into shares of the ceilings. A contestant
    that cannot run here is in `absent` with the reason. `goals` maps a contestant's name to what
    our speed over it should be; `copy` and `memory:NAME` are shares of the copy bandwidth and of a
    contestant's peak memory.
    """

    op: str
    shape: str
    make_inputs: Callable[[], Any]
    contestants: dict[str, Callable[[Any], Any]]
    input_bytes: int
    traffic_bytes: int = 0
    flops: int = 0
    goals: dict[str, Goal] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    graphed: bool = False
    """Replay CUDA graphs: for ops of some ten microseconds, which launching from Python would
    hide."""


class Rows:
    """Rows of a run: appended to a JSONL file at once, and kept for the table at the end. A file
    that is there already is added to; of its rows those of the same device count."""

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._common = common
        self.rows = [
            row for row in _whole_rows(path) if all(row.get(key) == common[key] for key in common)
        ]
        self._file = path.open("a")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a line that was cut off gets its end

    def is_measured(self, op: str, shape: str) -> bool:
        """Whether an earlier run timed ours at this size."""
        return any(
            (row.get("op"), row.get("shape")) == (op, shape)
            and (row.get("contestant"), row.get("status")) == ("napkinmath", "measured")
            for row in self.rows
        )

    def add(self, **row: Any) -> None:
        """Writes and keeps one row. A trial on a CPU meets and misses no goal."""
        if self._common.get("trial") and row.get("status") in ("met", "missed"):
            row["status"] = "trial only"
        self.rows.append(row)
        self._file.write(json.dumps({**self._common, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a line that a crash cut off; none if it is not there."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


class Clock:
    """Seconds of calls on a device: CUDA events on a GPU, the wall clock on a CPU."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device = device
        self._end = time.monotonic() + budget_s

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return self._end - time.monotonic()

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_calls(
        self, call: Callable[[Any], Any], sets: list[Any], seconds: float, most: int = 100
    ) -> list[float]:
        """Seconds of single calls, the sets in turn, for up to `seconds` or `most` calls, after
        warming up on each set."""
        for inputs in sets[:3]:
            call(inputs)
        self.synchronize()
        start = time.perf_counter()
        call(sets[0])
        self.synchronize()
        count = max(3, min(most, int(seconds / max(1e-6, time.perf_counter() - start))))
        if self.device.type != "cuda":
            return [self._wall(call, sets[i % len(sets)]) for i in range(count)]
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        for i, (before, after) in enumerate(events):
            before.record()
            call(sets[i % len(sets)])
            after.record()
        self.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in events]

    def graphs_of(self, call: Callable[[Any], Any], sets: list[Any]) -> list[Any]:
        """A CUDA graph of the call on each set; empty where it cannot be captured."""
        if self.device.type != "cuda":
            return []
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                call(sets[0])
            torch.cuda.current_stream(self.device).wait_stream(side)
            found: list[torch.cuda.CUDAGraph] = []
            for inputs in sets:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=found[0].pool() if found else None, stream=side):
                    call(inputs)
                found.append(graph)
            return found
        except (
            Exception
        ):  # a peer that synchronises cannot be captured; it is timed call by call instead
            self.synchronize()
            return []

    @staticmethod
    def _wall(call: Callable[[Any], Any], inputs: Any) -> float:
        start = time.perf_counter()
        call(inputs)
        return time.perf_counter() - start

    def peak_bytes(self, call: Callable[[Any], Any], inputs: Any) -> int | None:
        """Most bytes allocated during a call beyond what was there before; None on a CPU."""
        if self.device.type != "cuda":
            return None
        self.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call(inputs)
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before


def _sets(case: Case) -> list[Any]:
    count = max(FEWEST_SETS, min(MOST_SETS, -(-ROTATED_BYTES // max(1, case.input_bytes))))
    return [case.make_inputs() for _ in range(count)]


def _replay(graph: Any) -> None:
    graph.replay()


def run_case(
    case: Case, clock: Clock, rows: Rows, ceilings: dict[str, float], seconds: float
) -> None:
    """Times every contestant twice, in an order drawn anew each time, and writes a row for each."""
    common = {"op": case.op, "shape": case.shape}
    for name, reason in case.absent.items():
        rows.add(**common, contestant=name, status="not measured", reason=reason)
    if clock.seconds_left < seconds:
        rows.add(
            **common, contestant="napkinmath", status="not measured", reason="the budget was spent"
        )
        return
    sets = _sets(case)
    times: dict[str, list[float]] = {name: [] for name in case.contestants}
    failed: dict[str, str] = {}
    peaks: dict[str, int | None] = {}
    how: dict[str, str] = {}
    for turn in range(2):
        for name in random.Random(turn).sample(sorted(case.contestants), len(case.contestants)):
            if name in failed:
                continue
            try:
                if turn == 0:
                    case.contestants[name](sets[0])  # compiles, and makes what is made once
                    peaks[name] = clock.peak_bytes(case.contestants[name], sets[0])
                graphs = clock.graphs_of(case.contestants[name], sets) if case.graphed else []
                how[name] = "graph" if graphs else "calls"
                call, given = (_replay, graphs) if graphs else (case.contestants[name], sets)
                times[name] += clock.time_calls(call, given, seconds / (2 * len(case.contestants)))
            except Exception as error:  # a peer that fails is a row, not the end of the run
                failed[name] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
    for name, reason in failed.items():
        rows.add(**common, contestant=name, status="failed", reason=reason[:200])
    medians = {
        name: statistics.median(found)
        for name, found in times.items()
        if found and name not in failed
    }
    for name, median in medians.items():
        rows.add(
            **common,
            contestant=name,
            status="measured",
            timed_by=how[name],
            **_figures(case, median, sorted(times[name]), peaks.get(name), ceilings),
        )
    for row in _verdicts(case, medians, peaks, ceilings):
        rows.add(**common, **row)


def _figures(
    case: Case, median: float, times: list[float], peak: int | None, ceilings: dict[str, float]
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "median_s": median,
        "p10_s": times[len(times) // 10],
        "p90_s": times[len(times) * 9 // 10],
        "calls": len(times),
    }
    if case.traffic_bytes:
        figures["bytes_per_s"] = case.traffic_bytes / median
        figures["share_of_copy"] = figures["bytes_per_s"] / ceilings["copy_bytes_per_s"]
    if case.flops:
        figures["flops_per_s"] = case.flops / median
    if peak is not None:
        figures["peak_bytes"] = peak
    return figures


def _verdicts(
    case: Case, medians: dict[str, float], peaks: dict[str, int | None], ceilings: dict[str, float]
) -> Iterator[dict[str, Any]]:
    ours = medians.get("napkinmath")
    for against, goal in case.goals.items():
        value: float | None = None
        peer = against.removeprefix("memory:")
        if ours is not None and against == "copy" and case.traffic_bytes:
            value = case.traffic_bytes / ours / ceilings["copy_bytes_per_s"]
        elif (
            against.startswith("memory:")
            and peaks.get("napkinmath") is not None
            and peaks.get(peer)
        ):
            value = peaks["napkinmath"] / peaks[peer]  # type: ignore[operator]
        elif ours is not None and against in medians:
            value = medians[against] / ours
        row = {"contestant": "goal", "against": against, "goal": goal.text}
        if value is None:
            yield {**row, "status": "not measured", "reason": f"{peer} did not run"}
        else:
            yield {**row, "status": "met" if goal.is_met(value) else "missed", "value": value}
