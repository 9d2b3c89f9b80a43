"""Timing contestants in turn over rotated inputs: medians with their spread, peak memory, rows
written as they come."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_rows.goals import COPY, LOST, Goal
from kernel_rows.lost_context import ContextLost, is_lost

# : Input sets together exceed this many bytes, twice the L2 of an H200, so that no call finds its
# inputs in the cache.
ROTATED_BYTES = 120 * 2**20
FEWEST_SETS, MOST_SETS = 4, 32
COPY_ALIGNMENT = 256  # as the allocator aligns
#: Calls in one CUDA graph at least: a replay itself takes 2 to 5 us, as long as a small operation.
CALLS_A_GRAPH = 10


@dataclass
class Case:
    """One comparison: how to make a set of inputs, and what each contestant does with one. Ours is
    named `napkinmath`.

    `traffic_bytes` and `flops` of one call turn seconds into shares of the ceilings. A contestant
    that cannot run here is in `absent` with the reason. `goals` maps a contestant's name to what
    our speed over it should be; `memory:NAME` is a share of a contestant's peak memory. Where
    `traffic_bytes` is known, a device copy of as many bytes is a contestant, `copy`: small copies
    are slower than large ones, and a goal of copy bandwidth means a copy of this size.
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
    """Replay CUDA graphs of ten calls or more: for ops of some ten microseconds, which launching
    from Python, or a graph's own replay, would hide."""

    def calls(self) -> dict[str, Callable[[Any], Any]]:
        """What is timed, by name: the contestants, and a copy where the traffic is known."""
        return self.contestants | ({COPY: _copy} if self.traffic_bytes else {})

    def inputs_of(self, name: str, device: torch.device) -> list[Any]:
        """Sets of inputs for a contestant, of its own: some write into theirs, or into what they
        saved. Every contestant's are drawn from one seed; a copy has two buffers."""
        torch.manual_seed(0)
        size = _aligned(self.traffic_bytes // 2)
        one = 2 * size if name == COPY else self.input_bytes
        count = max(FEWEST_SETS, min(MOST_SETS, -(-ROTATED_BYTES // max(1, one))))
        if name != COPY:
            return [self.make_inputs() for _ in range(count)]
        buffers = torch.empty(count, 2, size, dtype=torch.uint8, device=device).random_(0, 256)
        return [(pair[0], pair[1]) for pair in buffers]


def _aligned(size: int) -> int:
    """Buffers follow each other; the driver's copy between addresses that are no multiples of 4
    ran at a fifth of the bandwidth (H200: 0.83 of 4.2 TB/s)."""
    return -(-max(1, size) // COPY_ALIGNMENT) * COPY_ALIGNMENT


def _copy(buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
    buffers[1].copy_(buffers[0])


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
            row["contestant"] == "napkinmath" and row["status"] == "measured"
            for row in self.of(op, shape)
        )

    def is_settled(self, op: str, shape: str, contestant: str) -> bool:
        """Whether a contestant was timed, or broke an earlier process."""
        return any(
            row["contestant"] == contestant and row["status"] in ("measured", LOST)
            for row in self.of(op, shape)
        )

    def broken(self, op: str, shape: str) -> set[str]:
        """Contestants that broke an earlier process at this size."""
        return {row["contestant"] for row in self.of(op, shape) if row["status"] == LOST}

    def of(self, op: str, shape: str) -> Iterator[dict[str, Any]]:
        """The rows of an operation at a size."""
        return (row for row in self.rows if (row.get("op"), row.get("shape")) == (op, shape))

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
        self.reserved_s = 0.0
        """Kept for what comes last."""

    @property
    def seconds_left(self) -> float:
        """Of the budget, without what is reserved."""
        return self._end - time.monotonic() - self.reserved_s

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

    def time_graph(
        self, call: Callable[[Any], Any], sets: list[Any], seconds: float
    ) -> list[float] | None:
        """Seconds a call, from replays of one CUDA graph of ten calls or more, the sets in turn;
        None where the calls cannot be captured."""
        graph, calls = self._graph_of(call, sets)
        if graph is None:
            return None
        return [taken / calls for taken in self.time_calls(_replay, [graph], seconds)]

    def _graph_of(self, call: Callable[[Any], Any], sets: list[Any]) -> tuple[Any, int]:
        calls = max(CALLS_A_GRAPH, len(sets))
        if self.device.type != "cuda":
            return None, calls
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                call(sets[0])
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                for number in range(calls):
                    call(sets[number % len(sets)])
        except Exception:  # a peer that synchronises is timed call by call instead
            self.synchronize()
            return None, calls
        return graph, calls

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


def _replay(graph: Any) -> None:
    graph.replay()


@dataclass
class _Times:
    """What was found of a case's contestants so far."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        return {
            name: statistics.median(found)
            for name, found in self.seconds.items()
            if found and name not in self.failed
        }


def run_case(
    case: Case, clock: Clock, rows: Rows, ceilings: dict[str, float], seconds: float
) -> None:
    """Times every contestant twice, in an order drawn anew each time, and writes a row for each.
    Raises ContextLost after one that broke the GPU's context."""
    common = {"op": case.op, "shape": case.shape}
    for name, reason in case.absent.items():
        rows.add(**common, contestant=name, status="not measured", reason=reason)
    if clock.seconds_left < seconds:
        rows.add(
            **common, contestant="napkinmath", status="not measured", reason="the budget was spent"
        )
        return
    calls = {name: f for name, f in case.calls().items() if name not in rows.broken(**common)}
    found = _Times()
    for turn in range(2):
        for name in random.Random(turn).sample(sorted(calls), len(calls)):
            if name in found.failed:
                continue
            try:
                _time_once(case, name, calls[name], clock, found, seconds / (2 * len(calls)))
            except Exception as error:  # a peer that fails is a row, not the end of the run
                found.failed[name] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )[:200]
                error.__traceback__ = None  # its frames hold inputs
                if is_lost(clock.device):
                    rows.add(**common, contestant=name, status=LOST, reason=found.failed.pop(name))
                    _write(case, rows, found, ceilings)
                    raise ContextLost(f"{case.op}, {name}") from None
                print(f"{case.op} {name}: {found.failed[name]}", file=sys.stderr, flush=True)
    _write(case, rows, found, ceilings)


def _time_once(
    case: Case,
    name: str,
    call: Callable[[Any], Any],
    clock: Clock,
    found: _Times,
    seconds: float,
) -> None:
    """One turn of a contestant, on inputs of its own."""
    sets = case.inputs_of(name, clock.device)
    if name not in found.peaks:
        call(sets[0])  # compiles, and makes what is made once
        found.peaks[name] = clock.peak_bytes(call, sets[0])
    times = clock.time_graph(call, sets, seconds) if case.graphed else None
    found.how[name] = "calls" if times is None else "graph"
    if times is None:
        times = clock.time_calls(call, sets, seconds)
    found.seconds.setdefault(name, []).extend(times)


def _write(case: Case, rows: Rows, found: _Times, ceilings: dict[str, float]) -> None:
    """The rows of a case: failures, figures, verdicts."""
    common = {"op": case.op, "shape": case.shape}
    for name, reason in found.failed.items():
        rows.add(**common, contestant=name, status="failed", reason=reason)
    medians = found.medians()
    for name, median in medians.items():
        rows.add(
            **common,
            contestant=name,
            status="measured",
            timed_by=found.how[name],
            **_figures(case, median, sorted(found.seconds[name]), found.peaks.get(name)),
            **_shares(case, median, medians.get(COPY), ceilings),
        )
    for row in _verdicts(case, medians, found.peaks):
        rows.add(**common, **row)


def _figures(case: Case, median: float, times: list[float], peak: int | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "median_s": median,
        "p10_s": times[len(times) // 10],
        "p90_s": times[len(times) * 9 // 10],
        "calls": len(times),
    }
    if case.traffic_bytes:
        figures["bytes_per_s"] = case.traffic_bytes / median
    if case.flops:
        figures["flops_per_s"] = case.flops / median
    if peak is not None:
        figures["peak_bytes"] = peak
    return figures


def _shares(
    case: Case, median: float, copy: float | None, ceilings: dict[str, float]
) -> dict[str, float]:
    """Of the bandwidth of a copy of this size, and of a large one."""
    if not case.traffic_bytes:
        return {}
    large = case.traffic_bytes / ceilings["copy_bytes_per_s"] / median
    return {"share_of_large_copy": large} | (
        {} if copy is None else {"share_of_copy": copy / median}
    )


def _verdicts(
    case: Case, medians: dict[str, float], peaks: dict[str, int | None]
) -> Iterator[dict[str, Any]]:
    ours = medians.get("napkinmath")
    for against, goal in case.goals.items():
        value: float | None = None
        peer = against.removeprefix("memory:")
        if (
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
