"""How long a large memory snapshot takes to read, and how much memory; and a million events of a
measurement to be attributed and replayed.

    python benchmarks/speed/snapshot_speed.py [--gigabytes 1] [--keep FILE] [--events 1000000] [--json FILE]

The file is made here in the layout of torch.cuda.memory._dump_snapshot: one dictionary an event,
each with its own list of frames, the frames themselves shared between stacks as torch's symboliser
shares them. Reading runs in a process of its own, so peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import pickle
import platform
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from typing import Any

STACK_DEPTH = 40  # frames of a training script under transformers and PEFT
EVENTS_A_GIGABYTE = 2_650_000  # of this layout at protocol 4; the true size of the file is printed


def events(count: int) -> Iterator[dict[str, Any]]:
    """Allocations and frees of a training step, repeated: 400 tensors made, held, and let go."""
    chance = random.Random(0)
    frames = [
        {
            "name": f"function_{i}",
            "filename": f"/site-packages/transformers/models/part_{i % 60}.py",
            "line": i,
        }
        for i in range(3000)
    ]
    stacks = [chance.sample(frames, STACK_DEPTH) for _ in range(500)]
    live: list[tuple[int, int, int]] = []
    address, clock = 0x7F0000000000, 0
    while clock < count:
        clock += 1
        made = len(live) < 400 or chance.random() < 0.5
        if made:
            size = 512 * chance.randint(1, 60_000)
            live.append((address, size, chance.randrange(len(stacks))))
            address += size
            where = live[-1]
        else:
            where = live.pop(chance.randrange(len(live)))
        for action in ("alloc",) if made else ("free_requested", "free_completed"):
            yield {
                "action": action,
                "addr": where[0],
                "size": where[1],
                "stream": 0,
                "time_us": clock,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": list(stacks[where[2]]),
            }


def write(path: str, count: int) -> int:
    """A snapshot file of so many allocations and frees; returns its bytes."""
    with open(path, "wb") as file:
        pickle.dump(
            {"segments": [], "device_traces": [list(events(count))], "allocator_settings": {}},
            file,
            protocol=4,
        )
    return os.path.getsize(path)


def read(path: str, results: Any) -> None:
    """Reads in this process and reports seconds, peak resident bytes and what was read."""
    from napkinmath_profiler.snapshot.read_snapshot import read_snapshot

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started, busy = time.perf_counter(), time.process_time()
    found = read_snapshot(path)
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - busy
    results.put(
        (
            seconds,
            processor_seconds,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            before,
            found.timeline.peak().nbytes,
        )
    )


def attribute(count: int, results: Any) -> None:
    """Joins so many bookings and returns with the notes taken beside them, replays them, and
    reports processor seconds and peak resident bytes."""
    from napkinmath.memory.replay import replay
    from napkinmath_profiler.measuring.device_memory import BlockEvent
    from napkinmath_profiler.measuring.history_marks import Claim, Place
    from napkinmath_profiler.measuring.history_pass import read_history
    from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
    from napkinmath_profiler.tracing.traced_timeline import timeline_of

    chance = random.Random(0)
    held: list[int] = []
    events: list[BlockEvent] = []
    for address in range(count):
        if len(held) < 400 or chance.random() < 0.5:
            held.append(address)
            events.append(BlockEvent(True, address, 512 * chance.randint(1, 60_000), []))
        else:
            events.append(BlockEvent(False, held.pop(chance.randrange(len(held))), 0, []))
    phases = (TracePhase.FORWARD, TracePhase.BACKWARD)
    places = [
        Place(i, phases[i // 5000 % 2], f"layers.{i % 32}", 2 * i // count, 0, i, False)
        for i in range(0, count, 10)
    ]
    claims = [
        Claim(i + 1, event.address, event.nbytes, StorageRole.GRADIENTS, str(i))
        for i, event in enumerate(events)
        if event.is_allocation and i % 10 == 0
    ]
    started = time.process_time()
    found = read_history(events, places, claims)
    joined = time.process_time()
    peak = replay(timeline_of(found)).peak_allocated
    results.put(
        (
            joined - started,
            time.process_time() - joined,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--keep", metavar="FILE")
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="of a measurement, to be attributed"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or os.path.join(folder, "snapshot.pickle")
        maker = context.Process(
            target=write, args=(path, int(options.gigabytes * EVENTS_A_GIGABYTE))
        )
        maker.start()
        maker.join()
        results: Any = context.Queue()
        reader = context.Process(target=read, args=(path, results))
        reader.start()
        seconds, processor_seconds, resident, before, peak = results.get()
        reader.join()
        figures: dict[str, object] = {
            "file_bytes": os.path.getsize(path),
            "read_seconds": round(seconds, 1),
            "read_processor_seconds": round(processor_seconds, 1),
            "resident_bytes": resident,
            "resident_before_bytes": before,
        }
        print(
            f"file     {os.path.getsize(path) / 1e9:.2f} GB, highest {peak / 2**30:.1f} GiB"
            " allocated"
        )
        rate = os.path.getsize(path) / 1e6 / processor_seconds
        print(
            f"read     {seconds:.1f} s, {processor_seconds:.1f} s of them on the processor,"
            f" {rate:.0f} MB/s   (goal: 60 s a GB)"
        )
        print(f"resident {resident / 1e9:.2f} GB, {before / 1e9:.2f} of it before   (goal: 2 GB)")
    results = context.Queue()
    joiner = context.Process(target=attribute, args=(options.events, results))
    joiner.start()
    joined, replayed, joined_resident, _ = results.get()
    joiner.join()
    if options.json:
        figures |= {
            "machine": (
                f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
            ),
            "measurement_events": options.events,
            "attributed_seconds": round(joined, 1),
            "replayed_seconds": round(replayed, 1),
            "joined_resident_bytes": joined_resident,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(
        f"{options.events:,} events of a measurement: attributed in {joined:.1f} s, replayed in"
        f" {replayed:.1f} s, {joined_resident / 1e9:.2f} GB resident"
    )


if __name__ == "__main__":
    main()
