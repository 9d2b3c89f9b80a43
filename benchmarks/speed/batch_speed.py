"""How many jobs a second `estimate batch` prices on one core: all sizes different, and drawn from a
short list as grids are.

python benchmarks/speed/batch_speed.py [--jobs 300000] [--out FILE]; seconds are those of the processor,
so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable

from napkinmath.planning.batch import run_batch


def main() -> None:
    """Writes both files, prices them, prints jobs a second of processor time and of the clock."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=300_000)
    parser.add_argument("--out", help="a JSON file for the figures")
    arguments = parser.parse_args()
    count, figures = arguments.jobs, dict[str, dict[str, int]]()
    gc.freeze()
    gc.set_threshold(500_000, 20, 100)
    draw = random.Random(0)
    kinds = {
        "all sizes different": lambda i: (1 + i % 61, 64 * (1 + i // 61 % 1999), 8),
        "drawn from 12 batches, 12 lengths, 4 ranks": lambda i: (
            draw.choice(range(1, 13)),
            512 * draw.choice(range(1, 13)),
            8 * draw.choice(range(1, 5)),
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in kinds.items():
            for gpu in ("", "a100-80"):
                processor, wall = rates(folder, count, sizes, gpu)
                case = f"{name}, {f'on {gpu}' if gpu else 'memory alone'}"
                figures[case] = {
                    "jobs_per_processor_s": round(processor),
                    "jobs_per_wall_s": round(wall),
                }
                print(
                    f"{case}: {processor:,.0f} jobs/s of processor time, {wall:,.0f} by the clock"
                )
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"jobs": count, "rates": figures}, file, indent=1)
            file.write("\n")


def rates(
    folder: str, count: int, sizes: Callable[[int], tuple[int, int, int]], gpu: str
) -> tuple[float, float]:
    """Jobs a second of processor time and by the clock, of a file of two methods, ids and three
    sizes a line."""
    path = os.path.join(folder, "jobs.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            b, s, r = sizes(i)
            job = {
                "id": f"job-{i}",
                "model": "llama-7b",
                "method": ("lora", "qlora")[i % 2],
                "rank": r,
                "bs": b,
                "ctx": s,
            }
            file.write(json.dumps({**job, "gpu": gpu} if gpu else job) + "\n")
    wall, processor = time.perf_counter(), time.process_time()
    run_batch(path, os.path.join(folder, "answers.jsonl"), {}, force=True)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return count / processor, count / wall


if __name__ == "__main__":
    main()
