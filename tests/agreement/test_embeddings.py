"""Contrastive steps of encoders against traced ones: the anchors' forward, all other texts' and one
loss, in the order of sentence-transformers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from agreement.tiny_configs import TINY
from napkinmath import InputError, estimate
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import trace_options
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from

# Vectors of a row of the batch and copies of one layer's weights, which tiny models show; 0.02% at
# real sizes.
TOLERANCE = 0.003
NOMIC = {"model_type": "nomic_bert", "hidden_size": 256, "num_attention_heads": 4}
NOMIC |= {"intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2000}
CELLS = [
    ("bert", "bf16", {}),
    ("bert", "bf16-amp", {"columns": 4}),
    ("bert", "bf16-amp", {"checkpointing": True, "batch": 32}),
    ("bert", "fp32", {"accumulation": 2}),
    ("qwen3", "bf16-amp", {"lora": True}),
    ("modernbert", "bf16", {}),
    ("nomic", "bf16", {"columns": 3}),
]


SHARDED = ParallelConfig(data_parallel=DataParallel.FSDP2, data_parallel_size=2)


def under(family: str) -> dict[str, object]:
    """The tiny config of an encoder without a head."""
    return {**(NOMIC if family == "nomic" else TINY[family]), "architectures": ["ItsModel"]}


def contrastive(
    precision: str,
    *,
    columns: int = 2,
    checkpointing: bool = False,
    batch: int = 8,
    accumulation: int = 1,
    lora: bool = False,
) -> TrainConfig:
    kind = RecomputeKind.FULL if checkpointing else RecomputeKind.NONE
    return TrainConfig(
        micro_batch_size=batch,
        sequence_length=256,
        precision=Precision(precision),
        stack="hf-bare",
        adapter=AdapterConfig(rank=8) if lora else None,
        recompute=RecomputeConfig(kind=kind),
        optimizer="adamw-fused",
        attention=Attention.SDPA,
        clip_gradients=False,
        gradient_accumulation_steps=accumulation,
        workload=Workload(kind=WorkloadKind.CONTRASTIVE, columns=columns),
    )


@pytest.mark.parametrize(("family", "precision", "how"), CELLS)
def test_a_contrastive_step_agrees_with_the_traced_one(
    family: str, precision: str, how: dict[str, int]
) -> None:
    config = contrastive(precision, **how)
    traced = trace_options(config_from(under(family)), options_from(config))
    policy = Policy(config, STACKS["hf-bare"], sdpa_choice=Attention.FLASH)
    step = build_step(read_config(under(family)), policy)
    assert simulate(step, steps=2).peak().nbytes == pytest.approx(traced.peak_bytes, rel=TOLERANCE)


def test_a_cached_loss_holds_the_activations_of_one_mini_batch() -> None:
    plain, cached = (
        estimate(under("bert"), bs=bs, ctx=128, grad_accum=steps, workload=kind).peak.nbytes
        for bs, steps, kind in ((64, 1, "contrastive"), (8, 16, "contrastive-cached"))
    )
    assert cached < plain / 2


def test_a_mini_batch_of_a_cached_loss_goes_forward_twice() -> None:
    kinds = ("sft", "contrastive-cached")
    once, twice = (estimate(under("bert"), bs=8, ctx=128, workload=kind).step for kind in kinds)
    names = [segment.name for _, row in twice.micro_steps for segment in row]
    assert any(name.startswith("embeddings without gradients") for name in names)
    assert len(names) > sum(len(row) for _, row in once.micro_steps)


def test_more_negatives_are_more_tokens() -> None:
    pairs, triplets = (
        estimate(under("bert"), bs=8, ctx=128, gpu="a100", workload="contrastive", columns=n)
        for n in (2, 3)
    )
    assert pairs.time is not None and triplets.time is not None
    assert (pairs.time.tokens, triplets.time.tokens) == (2 * 8 * 128, 3 * 8 * 128)
    assert triplets.time.model_flops == pytest.approx(1.5 * pairs.time.model_flops, rel=0.01)


def test_an_encoder_of_another_head_loses_it() -> None:
    masked = {**TINY["bert"], "architectures": ["BertForMaskedLM"]}
    found = estimate(masked, bs=8, ctx=128, workload="contrastive")
    assert found.spec.task == "feature-extraction"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workload": "contrastive", "parallel": SHARDED}, "not priced with"),
        ({"workload": "contrastive", "columns": 1}, "--columns 1"),
        ({"workload": "dpo", "columns": 3}, "--workload contrastive"),
        ({"workload": "contrastive", "task": "masked-lm"}, "--task feature-extraction"),
    ],
)
def test_what_is_not_priced_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        _ = estimate(under("bert"), bs=8, ctx=128, **given).peak  # type: ignore[arg-type]
