"""What reading a trainer's file costs: a cold `estimate FILE` against the same step by flags, and
files priced an hour in one process.

    python benchmarks/speed/job_file_speed.py [--times 15] [--json FILE]

The flags are those that the reader makes of the file, so both commands price one step; that is
checked by their reports. Processor seconds of processes in turn; what counts is their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

JOB = """\
base_model: llama-3.2-1b
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
gradient_checkpointing: true
bf16: true
lora_mlp_kernel: false
learning_rate: 0.0002
"""
FLAGS = [
    "llama-3.2-1b",
    "--lora",
    "--quant",
    "nf4",
    "--double-quant",
    "--rank",
    "16",
    "--alpha",
    "32",
    "--targets",
    "all-linear",
    "--no-kbit",
    "--bs",
    "2",
    "--grad-accum",
    "4",
    "--ctx",
    "2048",
    "--optimizer",
    "adamw_bnb_8bit",
    "--checkpointing",
    "full",
    "--reentrant",
    "--precision",
    "bf16-autocast",
    "--allocator",
    "expandable_segments:True",
]


def processor_seconds(words: list[str]) -> float:
    """Of one cold command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "napkinmath", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def memory_of(words: list[str]) -> object:
    """What the report says of memory."""
    done = subprocess.run(
        [sys.executable, "-m", "napkinmath", *words, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)["memory"]


def files_an_hour(path: str, count: int) -> float:
    """Files read and priced one after the other, in a process that has the program loaded."""
    started = time.process_time()
    for _ in range(count):
        _ = priced(with_job_file({"job": path}, []), [])[0].memory
    return 3600 * count / (time.process_time() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "axolotl.yaml")
        Path(path).write_text(JOB, encoding="utf-8")
        if memory_of([path]) != memory_of(FLAGS):
            print("the flags are not the file's step", file=sys.stderr)
            return 1
        pairs = [(processor_seconds([path]), processor_seconds(FLAGS)) for _ in range(given.times)]
        hourly = files_an_hour(path, given.times)
    ratio = statistics.median(file / flags for file, flags in pairs)
    table = {
        "python": platform.python_version(),
        "file_over_flags": round(ratio, 3),
        "files_an_hour": round(hourly),
        "times": given.times,
    }
    print(json.dumps(table))
    if given.json is not None:
        given.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
