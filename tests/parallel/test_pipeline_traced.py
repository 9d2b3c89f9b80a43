"""Pipeline stages by the rules against torch.distributed.pipelining over transformers' layers, on
pretended ranks."""

from __future__ import annotations

import os
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, PipelineSchedule
from napkinmath.config.train_config import Precision, TrainConfig
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import TraceOptions
from napkinmath_profiler.tracing.parallel.fully_sharded import ShardingOptions
from napkinmath_profiler.tracing.parallel.pipeline import trace_pipeline
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from torch.distributed import pipelining

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
NORM_OUTPUT = 2 * 128 * 128 * 2  # b, s, h in 16 bits


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


def with_reference(stages: int, kind: WorkloadKind) -> Policy:
    parallel = ParallelConfig(pipeline_parallel_size=stages, num_micro_batches=4)
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=128,
        precision=Precision.BF16,
        optimizer="adamw",
        clip_gradients=False,
        parallel=parallel,
        workload=Workload(kind=kind, reference=kind is WorkloadKind.GRPO or None),
    )
    return Policy(config, STACKS["hf-bare"])


@pytest.mark.parametrize(("stages", "rank"), [(2, 0), (2, 1), (4, 1)])
def test_a_reference_runs_over_all_micro_batches_before_a_stage_trains(
    stages: int, rank: int
) -> None:
    """What it adds to the peak, and the peak of its own pass, whose logits go with each micro-batch."""
    options = TraceOptions(micro_batch_size=2, sequence_length=128, optimizer="adamw")
    run = partial(trace_pipeline, dict(CONFIG), (4 // stages,) * stages, rank, options)
    steps = {
        kind: build_step(read_config(CONFIG), with_reference(stages, kind), pipeline_rank=rank)
        for kind in (WorkloadKind.SFT, WorkloadKind.DPO)
    }
    alone, beside = (simulate(step).peak().nbytes for step in steps.values())
    traced_alone, traced = (
        timeline_of(run(num_micro_batches=4, reference=there)).peak().nbytes
        for there in (False, True)
    )
    assert beside - alone == traced - traced_alone > 0
    assert beside == pytest.approx(traced, rel=TOLERANCE)
    step = steps[WorkloadKind.DPO]
    rows = [row for row in step.micro_steps if row[1][0].name.startswith("reference")]
    assert [times for times, _ in rows] == [4] and step.micro_steps[0] is rows[0]
    step.micro_steps, step.update.states = rows, []
    step.load = [s for s in step.load if not s.name.startswith("receive")]
    with pytest.MonkeyPatch.context() as patch:  # what is left of the trace is the pass
        patch.setattr(pipelining.Schedule1F1B, "step", lambda *_, **__: None)
        only = run(num_micro_batches=4, reference=True)
    # a model's forward holds the norm's output while it computes the loss; the traced stage returned
    held = NORM_OUTPUT if rank == stages - 1 else 0
    assert simulate(step, steps=1).peak().nbytes - held == pytest.approx(
        timeline_of(only).peak().nbytes, rel=TOLERANCE
    )
