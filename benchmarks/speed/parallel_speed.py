"""How long the cold 3D-parallel command over 16,384 ranks takes, and the search over every mesh of
1,024 GPUs beside pricing all of them.

    python benchmarks/speed/parallel_speed.py [--runs 15] [--json FILE]

The cold command is a new process each time; its fastest run by the clock and the processor seconds
of its cheapest run are shown, for on a busy machine only the latter means anything. The search is
compared with the price of every mesh, which is what takes this long.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster, NetworkLink
from napkinmath.config.train_config import Precision, RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.models.read import read_model
from napkinmath.planning.meshes import fastest, meshes, price_mesh
from napkinmath.timing.efficiency import default_efficiency

ROOT = Path(__file__).resolve().parents[2]
MOST_COLD_S, MOST_SEARCH_S = 0.3, 2.0
COMMANDS = {
    "llama-3.1-405b, 16,384 H100, tensor 8 x pipeline 16, 1F1B": (
        "--model llama-3.1-405b --gpus 16384xH100 --tp 8 --pp 16 --ctx 8192 --bs 1 --grad-accum 16"
        " --checkpointing full"
    ),
    "the same, no checkpointing, --json": (
        "--model llama-3.1-405b --gpus 16384xH100 --tp 8 --pp 16 --ctx 8192 --bs 1 --grad-accum 16"
        " --json"
    ),
    "the same, ZeRO-1": (
        "--model llama-3.1-405b --gpus 16384xH100 --tp 8 --pp 16 --zero 1 --ctx 8192 --bs 1"
        " --grad-accum 16 --checkpointing full"
    ),
    "deepseek-v3, 16,384 H100, tensor 8 x pipeline 4 x expert 64": (
        "--model deepseek-v3 --gpus 16384xH100 --tp 8 --pp 4 --ep 64 --ctx 4096 --bs 1 --grad-accum"
        " 16 --checkpointing full"
    ),
    "llama-3.1-70b, 16,384 H100, FSDP2": (
        "--model llama-3.1-70b --gpus 16384xH100 --fsdp --ctx 8192 --bs 1 --checkpointing full"
    ),
}
SEARCHED = ("llama-3.1-70b", "llama-3.1-405b", "mixtral-8x22b", "deepseek-v3")
# As an installed package runs: with its bytecode compiled (the first run writes it).
ENVIRONMENT = {
    key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
} | {"PYTHONPATH": str(ROOT / "estimator")}


def cold(arguments: Sequence[str], runs: int) -> dict[str, float | int]:
    """Seconds of the whole command in new processes: fastest and median by the clock, least of the
    processor."""
    argv = (sys.executable, "-c", "from napkinmath.cli.main import entry; entry()", *arguments)
    clock: list[float] = []
    processor: list[float] = []
    for _ in range(runs + 1):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        code = subprocess.run(argv, env=ENVIRONMENT, stdout=subprocess.DEVNULL).returncode
        clock.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if code not in (0, 1, 3):
            raise SystemExit(f"{' '.join(arguments)}: exit code {code}")
    return {
        "runs": runs,
        "fastest_s": min(clock[1:]),
        "median_s": median(clock[1:]),
        "processor_s": min(processor[1:]),
    }


def searched(model: str) -> dict[str, object]:
    """The search over all meshes of 1,024 H100 and pricing each of them: seconds of the processor,
    and whether they agree."""
    spec = read_model(model)
    hardware = find_hardware("H100-80")
    machines = Cluster(
        hardware=hardware,
        gpus_per_node=8,
        num_nodes=128,
        network=NetworkLink(kind="InfiniBand", gbit_per_s_per_gpu=400),
    )
    config = TrainConfig(
        sequence_length=4096,
        stack="megatron",
        precision=Precision.BF16,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
    )
    speed = default_efficiency(hardware.gpu)
    started = time.process_time()
    found = fastest(spec, config, machines, speed, global_batch=1024, most=3)
    search_s = time.process_time() - started
    everything = meshes(spec, machines, config, global_batch=1024)
    started = time.process_time()
    prices = [price_mesh(spec, mesh, machines, speed) for mesh in everything]
    exhaustive_s = time.process_time() - started
    fitting = sorted(
        (p for p in prices if p.peak_bytes <= hardware.memory_bytes), key=lambda p: -p.tokens_per_s
    )
    return {
        "meshes": len(everything),
        "fit": len(fitting),
        "search_s": search_s,
        "exhaustive_s": exhaustive_s,
        "equal": [p.config for p in found] == [p.config for p in fitting[:3]],
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints both tables; 1 where a goal is missed or the search disagrees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, dict[str, object]]] = {"cold": {}, "search": {}}
    print(f"cold command, at most {MOST_COLD_S} s           fastest  median  processor")
    for name, command in COMMANDS.items():
        row = cold(command.split(), options.runs)
        found["cold"][name] = dict(row)
        print(
            f"  {row['fastest_s']:.3f} s  {row['median_s']:.3f} s  {row['processor_s']:.3f} s  "
            f" {name}"
        )
    print(f"meshes of 1,024 GPUs, at most {MOST_SEARCH_S} s")
    for model in SEARCHED:
        found["search"][model] = searched(model)
        print(
            f"  {model}: "
            + ", ".join(
                f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}"
                for k, v in found["search"][model].items()
            )
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    slow = any(float(str(row["processor_s"])) > MOST_COLD_S for row in found["cold"].values())
    wrong = any(
        not row["equal"] or float(str(row["search_s"])) > MOST_SEARCH_S
        for row in found["search"].values()
    )
    return int(slow or wrong)


if __name__ == "__main__":
    sys.exit(main())
