"""DDP and both generations of FSDP run by two real processes over gloo: a rank's tracked peak and its collectives are what the rules say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from napkinmath.parallel_config import DataParallel, ParallelConfig
from napkinmath.simulate import simulate
from parallel.spread_llama import BATCH, LLAMA, SEQUENCE, collectives, spread

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
TOLERANCE = 0.001  # counters and a loss; the issue asks for 1%
CASES: dict[str, tuple[ParallelConfig, int, bool]] = {
    "fsdp2": (ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=RANKS, wrap="layer"), 1, True),
    "fsdp1": (ParallelConfig(data_parallel=DataParallel.FSDP1, data_parallel_size=RANKS), 1, True),
    "ddp": (ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=RANKS), 1, False),
    "ddp-view": (ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=RANKS, gradient_as_bucket_view=True), 2, False),
}


def run_ranks(strategy: str, accumulation: int, checkpointing: bool) -> dict[str, object]:
    """What rank 0 prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1", "--master-port", str(port),
        "-m", "napkinmath_profiler.parallel_ranks", json.dumps(LLAMA), "--strategy", strategy, "--bs", str(BATCH), "--ctx", str(SEQUENCE),
        "--grad-accum", str(accumulation), *(["--checkpointing"] if checkpointing else []),
    ]  # fmt: skip
    path = os.pathsep.join(str(ROOT / name) for name in ("estimator", "profiler", "kernels"))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.parametrize("strategy", CASES)
def test_two_processes_take_and_send_what_is_priced(strategy: str) -> None:
    parallel, accumulation, checkpointing = CASES[strategy]
    step = spread(parallel, precision="fp32", accumulation=accumulation, checkpointing=checkpointing)
    real = run_ranks(strategy, accumulation, checkpointing)
    peak, ours = real["peak_bytes"], simulate(step, steps=2).peak().nbytes
    assert isinstance(peak, int) and abs(ours / peak - 1) <= TOLERANCE, f"{ours:,} against {peak:,}"
    counted = real["collectives"]
    assert isinstance(counted, dict)
    counted.pop("broadcast", None)  # DDP sends its buffers, a few hundred bytes, before each forward
    calls, moved = collectives(step)
    assert {kind: {"calls": calls[kind], "bytes": moved[kind]} for kind in calls} == counted
