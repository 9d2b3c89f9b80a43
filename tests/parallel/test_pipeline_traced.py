"""Pipeline stages by the rules against torch.distributed.pipelining over transformers' layers, on
pretended ranks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, PipelineSchedule
from napkinmath.config.train_config import Precision, TrainConfig
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.parallel.fully_sharded import ShardingOptions
from napkinmath_profiler.tracing.parallel.pipeline import trace_pipeline
from napkinmath_profiler.tracing.traced_timeline import timeline_of

TOLERANCE = 0.01
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "rank"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_the_peak_of_a_stage_is_the_traced_one(schedule: str, stages: int, rank: int) -> None:
    options = TraceOptions(micro_batch_size=2, sequence_length=128, optimizer="adamw")
    result = trace_pipeline(
        dict(CONFIG), (4 // stages,) * stages, rank, options, schedule=schedule, num_micro_batches=4
    )
    parallel = ParallelConfig(
        pipeline_parallel_size=stages,
        pipeline_schedule=PipelineSchedule(schedule),
        num_micro_batches=4,
    )
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=128,
        precision=Precision.BF16,
        optimizer="adamw",
        clip_gradients=False,
        parallel=parallel,
    )
    step = build_step(read_config(CONFIG), Policy(config, STACKS["hf-bare"]), pipeline_rank=rank)
    assert simulate(step).peak().nbytes == pytest.approx(
        timeline_of(result).peak().nbytes, rel=TOLERANCE
    )


@pytest.mark.parametrize("reduce_dtype", [None, "fp32"])
@pytest.mark.parametrize(
    ("schedule", "rank"), [("1f1b", 0), ("1f1b", 1), ("gpipe", 0), ("gpipe", 1)]
)
def test_a_sharded_stage_is_gathered_and_reduced_once(
    schedule: str, rank: int, reduce_dtype: str | None
) -> None:
    """torch's stages keep FSDP2's parameters whole between micro-batches, and gradients in the
    reduction's type."""
    options = TraceOptions(micro_batch_size=2, sequence_length=128, optimizer="adamw")
    sharding = ShardingOptions(
        shard_degree=4, reshard_after_forward=False, reduce_dtype=reduce_dtype
    )
    result = trace_pipeline(
        dict(CONFIG),
        (2, 2),
        rank,
        options,
        schedule=schedule,
        num_micro_batches=4,
        sharding=sharding,
    )
    parallel = ParallelConfig(
        pipeline_parallel_size=2,
        pipeline_schedule=PipelineSchedule(schedule),
        num_micro_batches=4,
        data_parallel=DataParallel.FSDP2,
        data_parallel_size=4,
        wrap="layer",
        sharded_dtype="fp32",
        reduce_dtype=reduce_dtype or "auto",
    )
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=128,
        precision=Precision.BF16,
        optimizer="adamw",
        clip_gradients=False,
        parallel=parallel,
    )
    step = build_step(read_config(CONFIG), Policy(config, STACKS["hf-bare"]), pipeline_rank=rank)
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(
        timeline_of(result).peak().nbytes, rel=TOLERANCE
    )
