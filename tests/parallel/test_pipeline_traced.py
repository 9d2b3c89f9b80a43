"""Pipeline stages by the rules against torch.distributed.pipelining over transformers' layers, on pretended ranks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from napkinmath.catalog.families import read_config
from napkinmath.catalog.stacks import STACKS
from napkinmath.lowering.policy import Policy
from napkinmath.parallel_config import ParallelConfig, PipelineSchedule
from napkinmath.simulate import simulate
from napkinmath.step import build_step
from napkinmath.train_config import Precision, TrainConfig
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.parallel.pipeline import trace_pipeline
from napkinmath_profiler.tracing.traced_timeline import timeline_of

TOLERANCE = 0.01
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "rank"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_the_peak_of_a_stage_is_the_traced_one(schedule: str, stages: int, rank: int) -> None:
    options = TraceOptions(micro_batch_size=2, sequence_length=128, optimizer="adamw")
    result = trace_pipeline(dict(CONFIG), (4 // stages,) * stages, rank, options, schedule=schedule, num_micro_batches=4)
    parallel = ParallelConfig(pipeline_parallel_size=stages, pipeline_schedule=PipelineSchedule(schedule), num_micro_batches=4)
    config = TrainConfig(
        micro_batch_size=2, sequence_length=128, precision=Precision.BF16, optimizer="adamw", clip_gradients=False, parallel=parallel
    )
    step = build_step(read_config(CONFIG), Policy(config, STACKS["hf-bare"]), pipeline_rank=rank)
    assert simulate(step).peak().nbytes == pytest.approx(timeline_of(result).peak().nbytes, rel=TOLERANCE)
