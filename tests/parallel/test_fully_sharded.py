"""FSDP2's rules against torch's own fully_shard, wrapped by accelerate and traced on pretended
ranks: up to 4,096 of them."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import torch
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, Sharding
from napkinmath.memory.simulate import simulate
from napkinmath_profiler.tracing.meta_model import AdapterOptions, QuantizationOptions, TrainMethod
from napkinmath_profiler.tracing.parallel.fully_sharded import (
    ShardingOptions,
    Traffic,
    trace_fully_sharded,
)
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import LoopOptions
from parallel.spread_llama import BATCH, GEMMA, LLAMA, SEQUENCE, collectives, spread

# A few hundred bytes a tensor are counters and a loss; the issue asks for 1%.
TOLERANCE = 0.001

CASES: list[dict[str, Any]] = [
    {"ranks": 8},
    {"ranks": 2, "checkpointing": True},
    {"ranks": 6},
    {"ranks": 64, "checkpointing": True},
    {"ranks": 1024},
    {"ranks": 4096},
    {"ranks": 4096, "method": "lora"},
    {"ranks": 8, "tied": True},
    {"ranks": 8, "model": "gemma2"},
    {"ranks": 8, "model": "gemma2", "method": "lora", "checkpointing": True},
    {"ranks": 8, "carved": False},
    {"ranks": 8, "carved": False, "checkpointing": True},
    {"ranks": 8, "reshards": False},
    {"ranks": 8, "replicas": 4},
    {"ranks": 64, "replicas": 4, "reduce_dtype": "fp32"},
    {"ranks": 8, "accumulation": 3},
    {"ranks": 8, "accumulation": 3, "sync": True},
    {"ranks": 8, "accumulation": 3, "reduce_dtype": "fp32"},
    {"ranks": 8, "precision": "bf16"},
    {"ranks": 8, "method": "lora"},
    {"ranks": 2, "method": "lora", "checkpointing": True},
    {"ranks": 8, "method": "lora", "reshards": False},
    {"ranks": 64, "method": "lora", "carved": False},
    {"ranks": 8, "method": "lora", "precision": "bf16", "sharded": "fp32"},
    {"ranks": 8, "method": "qlora", "storage": "bf16"},
    {"ranks": 2, "method": "qlora", "storage": "bf16", "checkpointing": True},
    {"ranks": 8, "method": "qlora", "storage": "uint8"},
]


def named(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def batch_of(case: dict[str, Any]) -> int:
    """So many sequences that bitsandbytes unpacks a 4-bit weight for its product instead of running
    its small kernel."""
    return 16 if case.get("method") == "qlora" else BATCH


def model_of(case: dict[str, Any]) -> dict[str, object]:
    return GEMMA if case.get("model") == "gemma2" else LLAMA


def traced(case: dict[str, Any]) -> tuple[TraceResult, Traffic]:
    """The library's two steps."""
    mixed = case.get("precision", "bf16-autocast") == "bf16-autocast"
    options = TraceOptions(
        method=TrainMethod(case.get("method", "full")),
        micro_batch_size=batch_of(case),
        sequence_length=SEQUENCE,
        dtype=case.get("sharded", "bf16"),
        checkpointing=case.get("checkpointing", False),
        attention="eager",
        loop=LoopOptions(
            autocast_dtype=torch.bfloat16 if mixed else None,
            gradient_accumulation_steps=case.get("accumulation", 1),
        ),
        optimizer="adamw-fused",
        adapters=AdapterOptions(rank=8, dropout=0.0),
        quantization=QuantizationOptions(
            kbit_preparation=False, quant_storage=case.get("storage", "bf16")
        ),
    )
    sharding = ShardingOptions(
        shard_degree=case["ranks"],
        replica_degree=case.get("replicas", 1),
        reshard_after_forward=case.get("reshards", True),
        mixed_dtype="bf16" if mixed or "sharded" in case else None,
        reduce_dtype=case.get("reduce_dtype"),
        carved=case.get("carved", True),
        sync_each_batch=case.get("sync", False),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace_fully_sharded(
            {**model_of(case), "tie_word_embeddings": case.get("tied", False)}, sharding, options
        )


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_peak_and_the_traffic_are_those_of_fully_shard(case: dict[str, Any]) -> None:
    replicas = case.get("replicas", 1)
    parallel = ParallelConfig(
        data_parallel=DataParallel.FSDP2,
        data_parallel_size=case["ranks"] * replicas,
        shard_size=case["ranks"],
        sharding=Sharding.HYBRID if replicas > 1 else Sharding.FULL,
        wrap="carved" if case.get("carved", True) else "layer",
        reshard_after_forward=case.get("reshards", True),
        reduce_dtype=case.get("reduce_dtype", "auto"),
        sharded_dtype=case.get("sharded", "auto"),
        sync_each_batch=case.get("sync", False),
    )
    step = spread(
        parallel,
        method=case.get("method", "full"),
        precision=case.get("precision", "bf16-autocast"),
        checkpointing=case.get("checkpointing", False),
        accumulation=case.get("accumulation", 1),
        tied=case.get("tied", False),
        storage=case.get("storage", "auto"),
        batch=batch_of(case),
        model=model_of(case),
    )
    result, traffic = traced(case)
    truth = result.peak_bytes
    ours = simulate(step, steps=2).peak().nbytes
    assert abs(ours / truth - 1) <= TOLERANCE, f"{ours:,} against {truth:,}"
    calls, moved = collectives(step)
    if case.get("method", "full") == "full":
        assert {kind: 2 * n for kind, n in calls.items()} == traffic.num_calls
        assert {kind: 2 * n for kind, n in moved.items()} == traffic.num_bytes
    # accelerate does not find the final norm of a model in PEFT's wrapper: the root gathers it, a
    # message more of some hundred bytes
    else:
        assert (
            2 * calls["reduce-scatter"] == traffic.num_calls["reduce-scatter"]
            and 2 * moved["reduce-scatter"] == traffic.num_bytes["reduce-scatter"]
        )
        assert abs(2 * moved["all-gather"] / traffic.num_bytes["all-gather"] - 1) < TOLERANCE
