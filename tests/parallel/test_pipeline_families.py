"""Stages of every family: what a micro-batch holds ends with it."""

from __future__ import annotations

import pytest
from agreement.tiny_configs import TINY
from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import (
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config

STAGES = 2
# Megatron's stages: torch's make a buffer for every micro-batch that is to come
STACK = STACKS["megatron-deepspeed"]


def peak(name: str, kind: RecomputeKind, rank: int, num_micro_batches: int) -> int:
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=64,
        precision=Precision.BF16,
        recompute=RecomputeConfig(kind=kind),
        parallel=ParallelConfig(pipeline_parallel_size=STAGES, num_micro_batches=num_micro_batches),
        stack=STACK.name,
    )
    step = build_step(read_config(TINY[name]), Policy(config, STACK), pipeline_rank=rank)
    return simulate(step).peak().nbytes


@pytest.mark.parametrize("name", TINY)
def test_a_stage_holds_no_more_for_more_micro_batches(name: str) -> None:
    """1F1B has as many micro-batches in flight as there are stages."""
    for kind in (RecomputeKind.NONE, RecomputeKind.FULL):
        for rank in range(STAGES):
            try:
                few = peak(name, kind, rank, 2 * STAGES)
            except InputError as error:
                assert "no pipeline hands on" in str(error) or "towers" in str(error)
                return
            assert peak(name, kind, rank, 6 * STAGES) == few, (kind, rank)


def test_what_parameters_make_for_every_layer_is_refused() -> None:
    """DeBERTa's relative embeddings: a later stage has neither them nor their gradient."""
    with pytest.raises(InputError, match="parameters before them"):
        peak("deberta_v2", RecomputeKind.NONE, 1, STAGES)
