"""Products of ways to spread a step, as a user types them: each is priced with books that balance,
or refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath import estimate
from napkinmath.cli.main import main
from napkinmath.config.parallel_config import (
    DataParallel,
    ParallelConfig,
    PipelineSchedule,
    Sharding,
)
from napkinmath.config.train_config import (
    AdapterConfig,
    OffloadConfig,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
)

# A mixture, layers of two kinds in turns, a vision tower beside the layers, and a plain model.
MODELS = ("mixtral-8x7b", "gpt-oss-20b", "gemma-3-4b", "llama-3.2-11b-vision", "llama-3.1-8b")
FULL = RecomputeConfig(kind=RecomputeKind.FULL)
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=8)},
    "fsdp, one unit": {
        "parallel": ParallelConfig(
            data_parallel=DataParallel.FSDP2, data_parallel_size=8, wrap="none"
        )
    },
    "hybrid, offload": {
        "parallel": ParallelConfig(
            data_parallel=DataParallel.FSDP2, data_parallel_size=16, sharding=Sharding.HYBRID
        ),
        "offload": OffloadConfig(optimizer=True, parameters=True),
    },
    "fsdp1, accumulated": {
        "parallel": ParallelConfig(data_parallel=DataParallel.FSDP1, data_parallel_size=4),
        "gradient_accumulation_steps": 3,
        "recompute": FULL,
    },
    "zero 3, offload": {
        "parallel": ParallelConfig(data_parallel=DataParallel.ZERO3, data_parallel_size=8),
        "offload": OffloadConfig(optimizer=True),
    },
    "qlora": {
        "parallel": ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=2),
        "adapter": AdapterConfig(),
        "quantization": QuantizationConfig(),
        "recompute": FULL,
        "gradient_accumulation_steps": 2,
    },
    "zero 2, lora": {
        "parallel": ParallelConfig(data_parallel=DataParallel.ZERO2, data_parallel_size=8),
        "adapter": AdapterConfig(),
    },
}
CLUSTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts, tensor, pipeline, zero 1": (
        "mixtral-8x7b",
        {
            "parallel": ParallelConfig(
                data_parallel=DataParallel.ZERO1,
                data_parallel_size=4,
                tensor_parallel_size=2,
                sequence_parallel=True,
                pipeline_parallel_size=4,
                expert_parallel_size=4,
                virtual_pipeline_size=2,
                pipeline_schedule=PipelineSchedule.INTERLEAVED,
            ),
            "gradient_accumulation_steps": 8,
            "stack": "megatron",
        },
    ),
    "experts, fsdp, ring": (
        "mixtral-8x7b",
        {
            "parallel": ParallelConfig(
                data_parallel=DataParallel.FSDP2,
                data_parallel_size=4,
                context_parallel_size=2,
                expert_parallel_size=8,
            ),
            "recompute": FULL,
        },
    ),
    "tensor, fsdp, qlora": (
        "llama-3.1-8b",
        {
            "parallel": ParallelConfig(
                data_parallel=DataParallel.FSDP2, data_parallel_size=4, tensor_parallel_size=2
            ),
            "adapter": AdapterConfig(),
            "quantization": QuantizationConfig(),
            "recompute": FULL,
        },
    ),
    "pipeline of turns, ddp": (
        "gpt-oss-20b",
        {
            "parallel": ParallelConfig(
                data_parallel=DataParallel.DDP, data_parallel_size=2, pipeline_parallel_size=3
            ),
            "gradient_accumulation_steps": 6,
        },
    ),
    "split sequence after whole embeddings": (
        "bert-base-cased",
        {
            "parallel": ParallelConfig(tensor_parallel_size=4, sequence_parallel=True),
            "recompute": FULL,
        },
    ),
}


def assert_books_balance(model: str, fields: dict[str, Any]) -> None:
    """Nothing is freed that is not there, the parts of the peak are the peak, and the step takes
    time."""
    e = estimate(
        model,
        hardware="H100",
        **{"sequence_length": 512 if model.startswith("bert") else 1024, **fields},
    )
    counts: dict[int, int] = {}
    for segment, _, action, index in e.timeline.events():
        moves = ((index, 1),) if action == "+" else ((index, -1),) if action == "-" else ()
        moves = (
            ((segment.pairs[index][0], -1), (segment.pairs[index][1], 1))
            if action == "="
            else moves
        )
        for tensor, change in moves:
            counts[tensor] = counts.get(tensor, 0) + change
            assert counts[tensor] >= 0, f"{e.timeline.tensors[tensor].name} in {segment.name}"
    assert sum(e.breakdown.values()) > 0 and e.memory.allocated.value >= e.timeline.peak().nbytes
    assert e.time.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_every_engine_balances_its_books_over_every_kind_of_model(model: str, way: str) -> None:
    assert_books_balance(model, WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_products_balance_their_books(name: str) -> None:
    assert_books_balance(*CLUSTERS[name])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--model llama-3.1-8b --gpus 16 --nodes 3",
            (
                "--nodes 3 does not divide --gpus 16; give the GPUs of all machines together, e.g."
                " --gpus 24"
            ),
        ),
        (
            "--model llama-3.1-8b --gpus 8 --tp 3",
            "--tp x --pp x --cp = 3 does not divide --gpus 8; use a product of 1, 2, 4 or 8",
        ),
        (
            "--model llama-3.1-8b --tp 2",
            "--tp x --pp x --cp = 2 splits a step over as many GPUs; add --gpus 2, or a multiple of it",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --hpz 8",
            "--hpz 8 is of ZeRO 3, not of ddp; leave it out, or set --data-parallel to zero3",
        ),
        (
            "--model llama-3.1-8b --zero 3 --hpz 8",
            "--hpz 8 divides data-parallel ranks, and there is one; leave it out, or give several GPUs",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --zero 3 --hpz 3",
            "--hpz 3 does not divide 8 data-parallel ranks; use one of 1, 2, 4 or 8",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --zero 2 --offload parameters",
            "trained parameters in host memory need --zero 3",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --ep 2",
            "--ep 2 spreads experts, but llama-3.1-8b has none; leave it out",
        ),
        (
            "--model mixtral-8x7b --gpus 8 --zero 3 --ep 2",
            "zero3 does not spread experts over ranks; use fsdp2, zero1, zero2 or ddp",
        ),
        (
            "--model mixtral-8x7b --gpus 8 --tp 8 --ep 2",
            "does not divide 1 data- and context-parallel rank; use 1",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --pp 2 --zero 3",
            "zero3 within a pipeline: no engine runs it",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --pp 2 --fsdp --reshard",
            "gather every micro-batch's parameters anew; leave it out",
        ),
        (
            "--model llama-3.1-8b --gpus 8 --pp 2 --fsdp --offload optimizer,parameters",
            "not priced with offloading",
        ),
        (
            "--model llama-3.1-8b --gpus 64 --pp 64",
            "--pp 64 leaves stages without layers: the model has 32",
        ),
        (
            "--model t5-large --gpus 8 --cp 2",
            (
                "t5-large has several towers of layers, whose sequences ranks do not share; use"
                " --cp 1"
            ),
        ),
        (
            "--model llama-3.1-8b --gpus 8 --global-batch 12",
            "--global-batch 12 is not a multiple of 8",
        ),
        ("--model llama-3.1-8b --gpus 16xH100 --network pigeon", "pigeon"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_an_interleaved_pipeline_has_two_chunks_unless_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(
        [
            "--model",
            "llama-3.1-8b",
            "--gpus",
            "8xH100",
            "--tp",
            "2",
            "--pp",
            "4",
            "--pp-schedule",
            "interleaved",
            "--grad-accum",
            "8",
        ]
    )
    assert "pipeline 4 (interleaved, 2 chunks)" in " ".join(capsys.readouterr().out.split())
