"""How many configurations a sweep evaluates in a second on one core, and that it gives what the
scalar path gives.

python benchmarks/speed/sweep_speed.py [--model llama-7b] [--gpu a100-80]
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.train_config import (
    AdapterConfig,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import estimate
from napkinmath.models.read import read_model
from napkinmath.planning.sweep import sweep

FULL_RECOMPUTE = RecomputeConfig(kind=RecomputeKind.FULL)
CONFIGS = {
    "full": TrainConfig(),
    "full, checkpointing": TrainConfig(recompute=FULL_RECOMPUTE),
    "lora": TrainConfig(adapter=AdapterConfig()),
    "qlora, checkpointing": TrainConfig(
        adapter=AdapterConfig(), quantization=QuantizationConfig(), recompute=FULL_RECOMPUTE
    ),
}
BATCHES, LENGTHS = np.arange(1, 65)[:, None], (np.arange(1, 2001) * 64)[None, :]
SAMPLES = 25


def main() -> None:
    """Prints configurations a second, without and with time, and checks samples against the scalar
    path to the byte."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--gpu", default="a100-80")
    arguments = parser.parse_args()
    spec, hardware = read_model(arguments.model), find_hardware(arguments.gpu)
    print(
        f"{arguments.model}, {BATCHES.size * LENGTHS.size:,} combinations of batch and length, one"
        " core"
    )
    for name, config in CONFIGS.items():
        started = time.perf_counter()
        found = sweep(spec, config, micro_batch_size=BATCHES, sequence_length=LENGTHS)
        memory_s = time.perf_counter() - started
        started = time.perf_counter()
        timed = sweep(
            spec, config, micro_batch_size=BATCHES, sequence_length=LENGTHS, hardware=hardware
        )
        both_s = time.perf_counter() - started
        wrong = sum(
            not agrees(spec, config, timed.requested, timed.tokens_per_s, hardware)
            for _ in range(SAMPLES)
        )
        count = found.requested.size
        print(
            f"{name:22} memory {count / memory_s:>12,.0f}/s   memory and time"
            f" {count / both_s:>12,.0f}/s   {SAMPLES - wrong}/{SAMPLES} samples equal the scalar"
            " path"
        )


def agrees(spec, config, requested, tokens_per_s, hardware) -> bool:
    """Whether one random cell equals `estimate` of the same configuration: bytes exactly, speed to
    rounding."""
    i, j = random.randrange(BATCHES.size), random.randrange(LENGTHS.size)
    one = estimate(
        spec,
        config,
        hardware=hardware,
        micro_batch_size=int(BATCHES[i, 0]),
        sequence_length=int(LENGTHS[0, j]),
    )
    assert one.time is not None
    return bool(
        one.peak.nbytes == requested[i, j]
        and abs(one.time.tokens_per_s / tokens_per_s[i, j] - 1) < 1e-9
    )


if __name__ == "__main__":
    main()
