"""One rank's allocated memory by the rules against the libraries on pretended ranks: FSDP2, tensor
and pipeline parallel, up to 4,096 ranks.

    python benchmarks/accuracy/parallel_traced.py [--only WORD] [--out benchmarks/results/cpu]

A TinyLlama of 1.1B parameters on storage-less tensors. Both timelines go through the same replay of
the allocator, and both start with the rank's parts in place, for a trace begins after sharding (the
rules also price how whole units come to the device before). torch's fully_shard as accelerate wraps
it, DTensor by transformers' plan and with a split sequence, torch.distributed.pipelining. Exit code
1 where a row is more than 1% off. With --out, rows take their places in parallel_traced.csv and .md
there; rows that are not run again stay. DDP, FSDP1 and ZeRO are held to real ranks:
tests/parallel/test_real_ranks.py, test_zero.py.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import (
    DataParallel,
    ParallelConfig,
    PipelineSchedule,
    Sharding,
)
from napkinmath.config.train_config import (
    AdapterConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.ledger import Tensor
from napkinmath.ir.timeline import Timeline
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.replay import replay
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.tracing.meta_model import AdapterOptions, QuantizationOptions, TrainMethod
from napkinmath_profiler.tracing.parallel.fully_sharded import ShardingOptions, trace_fully_sharded
from napkinmath_profiler.tracing.parallel.pipeline import trace_pipeline
from napkinmath_profiler.tracing.parallel.tensor_parallel import trace_tensor_parallel
from napkinmath_profiler.tracing.trace_options import TraceOptions
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.traced_timeline import timeline_of
from napkinmath_profiler.tracing.training_step import LoopOptions

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
BATCH, LENGTH, RANK = 2, 1024, 16
WORLDS = (2, 8, 64, 512, 4096)
GOAL = 0.01
HEADS = (
    "spread",
    "trained",
    "ranks",
    "requested_bytes",
    "allocated_bytes",
    "traced_requested_bytes",
    "traced_allocated_bytes",
    "allocated_error",
)
TABLE = "parallel_traced"


class Row(NamedTuple):
    """A way to spread the step: its trace and its mesh."""

    name: str
    ranks: int
    trained: str
    trace: Callable[[], TraceResult]
    config: TrainConfig
    pipeline_rank: int = 0


def config_of(parallel: ParallelConfig, trained: str, **fields: object) -> TrainConfig:
    """The step as the rules price it."""
    given: dict[str, Any] = {
        "micro_batch_size": BATCH,
        "sequence_length": LENGTH,
        "precision": Precision.BF16_AUTOCAST,
        "adapter": None if trained == "full" else AdapterConfig(rank=RANK),
        "quantization": QuantizationConfig(kbit_preparation=False) if trained == "qlora" else None,
        "recompute": RecomputeConfig(kind=RecomputeKind.FULL),
        "optimizer": "adamw-fused",
        "clip_gradients": False,
        "parallel": parallel,
    }
    return TrainConfig(**{**given, **fields})


def fully_sharded() -> Iterator[Row]:
    """FSDP2 over every world, full, LoRA and QLoRA; hybrid copies of eight."""
    for trained in ("full", "lora", "qlora"):
        for ranks in WORLDS:
            yield sharded_row(trained, ranks, 1)
    yield sharded_row("full", 8, 512)


def sharded_row(trained: str, ranks: int, replicas: int) -> Row:
    options = TraceOptions(
        method=TrainMethod(trained),
        micro_batch_size=BATCH,
        sequence_length=LENGTH,
        dtype="bf16",
        checkpointing=True,
        optimizer="adamw-fused",
        adapters=AdapterOptions(rank=RANK, dropout=0.0),
        quantization=QuantizationOptions(kbit_preparation=False, quant_storage="bf16"),
        loop=LoopOptions(autocast_dtype=torch.bfloat16),
    )
    sharding = ShardingOptions(shard_degree=ranks, replica_degree=replicas)
    parallel = ParallelConfig(
        data_parallel=DataParallel.FSDP2,
        data_parallel_size=ranks * replicas,
        shard_size=ranks,
        sharding=Sharding.HYBRID if replicas > 1 else Sharding.FULL,
    )
    name = "FSDP2" if replicas == 1 else f"FSDP2, {replicas} copies"
    return Row(
        name,
        ranks * replicas,
        trained,
        lambda: trace_fully_sharded(LLAMA, sharding, options)[0],
        config_of(parallel, trained),
    )


def split_layers() -> Iterator[Row]:
    """Tensor parallel by transformers' plan and with a split sequence; pipeline stages of torch."""
    plain = TraceOptions(micro_batch_size=BATCH, sequence_length=LENGTH, optimizer="adamw-fused")
    # The fused update refuses parameters of which some are DTensors and some, the norms of
    # transformers' plan, are not.
    mixed = TraceOptions(micro_batch_size=BATCH, sequence_length=LENGTH, optimizer="adamw")
    for degree in (2, 4):
        for sequence in (False, True):
            parallel = ParallelConfig(tensor_parallel_size=degree, sequence_parallel=sequence)
            name = "tensor, split sequence" if sequence else "tensor, transformers' plan"
            config = config_of(
                parallel,
                "full",
                precision=Precision.BF16,
                recompute=RecomputeConfig(),
                optimizer="adamw",
            )
            yield Row(
                name,
                degree,
                "full",
                lambda d=degree, s=sequence: trace_tensor_parallel(LLAMA, d, mixed, sequence=s),
                config,
            )
    for schedule in ("1f1b", "gpipe"):
        for rank in (0, 1, 3):
            parallel = ParallelConfig(
                pipeline_parallel_size=4,
                pipeline_schedule=PipelineSchedule(schedule),
                num_micro_batches=8,
            )
            config = config_of(
                parallel, "full", precision=Precision.BF16, recompute=RecomputeConfig()
            )
            yield Row(
                f"pipeline {schedule}, stage {rank}",
                4,
                "full",
                lambda r=rank, s=schedule: trace_pipeline(
                    LLAMA, (5, 6, 6, 5), r, plain, schedule=s, num_micro_batches=8
                ),
                config,
                rank,
            )


def sharded_stages() -> Iterator[Row]:
    """FSDP2 within a pipeline of torch's stages: gathered once a step, gradients summed in bf16 or
    in fp32, then reduced."""
    plain = TraceOptions(micro_batch_size=BATCH, sequence_length=LENGTH, optimizer="adamw-fused")
    for shards, reduced in ((8, None), (8, "fp32"), (1024, "fp32")):
        for rank in (0, 3):
            sharding = ShardingOptions(
                shard_degree=shards, reshard_after_forward=False, reduce_dtype=reduced
            )
            parallel = ParallelConfig(
                pipeline_parallel_size=4,
                num_micro_batches=8,
                data_parallel=DataParallel.FSDP2,
                data_parallel_size=shards,
                wrap="layer",
                sharded_dtype="fp32",
                reduce_dtype=reduced or "auto",
            )
            config = config_of(
                parallel, "full", precision=Precision.BF16, recompute=RecomputeConfig()
            )
            yield Row(
                f"FSDP2 ({reduced or 'bf16'} sums) x pipeline 1f1b, stage {rank}",
                4 * shards,
                "full",
                lambda r=rank, s=sharding: trace_pipeline(
                    LLAMA, (5, 6, 6, 5), r, plain, num_micro_batches=8, sharding=s
                ),
                config,
                rank,
            )


class Peaks(NamedTuple):
    """Bytes that the program asked for, and that the allocator booked, at their highest."""

    requested: int
    allocated: int


def compared(row: Row) -> tuple[Peaks, Peaks, float]:
    """(peaks by the rules, peaks by the trace, seconds of the trace)."""
    step = build_step(
        read_config(LLAMA), Policy(row.config, STACKS["hf-bare"]), pipeline_rank=row.pipeline_rank
    )
    for segment in step.load:
        segment.events = [
            (action, t)
            for action, t in segment.events
            if not (isinstance(t, Tensor) and t.name.startswith("whole "))
        ]
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = peaks(timeline_of(row.trace()))
    return peaks(simulate(step, steps=2)), truth, time.perf_counter() - started


def peaks(timeline: Timeline) -> Peaks:
    """Both peaks of a timeline."""
    return Peaks(timeline.peak().nbytes, replay(timeline).peak_allocated)


def written(rows: list[tuple[str, ...]], folder: Path) -> None:
    """The table as CSV and Markdown: new rows in their places, the others as they were."""
    path = folder / f"{TABLE}.csv"
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    if path.exists():
        with path.open(newline="") as file:
            known = {tuple(row[:3]): tuple(row) for row in list(csv.reader(file))[1:]}
    known |= {row[:3]: row for row in rows}
    order = [(row.name, row.trained, str(row.ranks)) for row in every_row()]
    lines = [known[key] for key in order if key in known]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADS, *lines])
    worst = max(abs(float(line[-1].rstrip("%"))) for line in lines)
    text = [
        "# One rank's allocated memory, by the rules and traced",
        "",
        (
            f"TinyLlama 1.1B, micro-batch {BATCH} x {LENGTH}, LoRA rank {RANK}; `python"
            f" benchmarks/accuracy/parallel_traced.py`. Largest difference: {worst:.3f}%."
        ),
        "",
        "| spread | trained | ranks | GiB by the rules | GiB traced | difference |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {trained} | {ranks} | {int(ours) / 2**30:.3f} | {int(truth) / 2**30:.3f} |"
            f" {error} |"
            for name, trained, ranks, _, ours, _, truth, error in lines
        ),
    ]
    (folder / f"{TABLE}.md").write_text("\n".join(text) + "\n")


def every_row() -> tuple[Row, ...]:
    """All rows of the table in order."""
    return (*fully_sharded(), *split_layers(), *sharded_stages())


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="rows whose name, kind of training and ranks have this text"
    )
    parser.add_argument("--out", type=Path, help="folder of the table")
    options = parser.parse_args(arguments)
    lines: list[tuple[str, ...]] = []
    for row in every_row():
        if options.only not in f"{row.name} {row.trained} {row.ranks}":
            continue
        ours, truth, seconds = compared(row)
        error = ours.allocated / truth.allocated - 1
        lines.append(
            (
                row.name,
                row.trained,
                str(row.ranks),
                *(str(n) for n in (*ours, *truth)),
                f"{error:+.3%}",
            )
        )
        print(
            f"{row.name:30} {row.trained:6} {row.ranks:>5} ranks  allocated"
            f" {ours.allocated / 2**30:7.3f} GiB, traced {truth.allocated / 2**30:7.3f} GiB "
            f" {error:+.3%}  ({seconds:.0f} s)",
            flush=True,
        )
        if options.out:
            written(lines, options.out)
    return int(any(abs(float(line[-1].rstrip("%"))) > 100 * GOAL for line in lines))


if __name__ == "__main__":
    sys.exit(main())
