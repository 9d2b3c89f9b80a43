"""How long `estimate plan` takes for 100,000 candidates on one core, and what of it is pricing,
what verification.

python benchmarks/speed/plan_speed.py [--model llama-3.1-8b] [--gpu rtx4090] [--out FILE]; seconds are
those of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

from napkinmath.catalog.gpus import find_hardware
from napkinmath.models.read import read_model
from napkinmath.planning.plan import plan
from napkinmath.planning.space import Goal, Machine, open_space

WANTED = 100_000


def main() -> None:
    """Plans once for each goal with as many lengths as make up the candidates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--out", help="a JSON file for the figures")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    spec, hardware = read_model(arguments.model), find_hardware(arguments.gpu)
    gc.disable()  # as the command line does
    machines = [Machine(hardware=hardware, price_per_hour=1.0)]
    one = plan(open_space(spec, machines, {"ctx": ["2048"]}, Goal.TOKENS), Goal.TOKENS)
    lengths = [str(1024 * (i + 1)) for i in range(-(-WANTED // one.num_candidates))]
    for goal in Goal:
        space = open_space(spec, machines, {"ctx": lengths}, goal)
        if goal is Goal.CONTEXT:
            space = space.replace(batches=tuple(range(1, 55)))
        wall, processor = time.perf_counter(), time.process_time()
        found = plan(space, goal)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        figures[goal.value] = {
            "candidates": found.num_candidates,
            "replayed": found.num_verified,
            "processor_s": round(processor, 3),
            "wall_s": round(wall, 3),
        }
        print(
            f"{goal.value:15} {found.num_candidates:>9,} candidates, {found.num_verified:>3}"
            f" replayed: {processor:.2f} s of processor time, {wall:.2f} s by the clock"
        )
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(
                {"model": arguments.model, "gpu": arguments.gpu, "goals": figures}, file, indent=1
            )
            file.write("\n")


if __name__ == "__main__":
    main()
