"""A Policy is made once and never changed; what recording finds is the recording's."""

from __future__ import annotations

import pytest
from napkinmath import TrainConfig, estimate, read_model
from napkinmath.answers.assumptions import assumptions
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.config.train_config import Attention, Batch, Precision
from napkinmath.inputs.jobs import priced
from napkinmath.lowering.build import build_step, record_model
from napkinmath.lowering.choices import resolve
from napkinmath.memory.pipeline_ranks import PipelineRanks

SPEC = read_model("tinyllama")


def test_a_policy_refuses_changes() -> None:
    policy = resolve(SPEC, TrainConfig(), None)
    with pytest.raises(AttributeError, match="never changed"):
        policy.config = TrainConfig(micro_batch_size=2)
    assert policy.under(TrainConfig(micro_batch_size=2)).config.micro_batch_size == 2


def test_two_recordings_under_one_policy_find_the_same() -> None:
    policy = resolve(SPEC, TrainConfig(attention=Attention.EAGER), None)
    first, second = (record_model(SPEC, policy) for _ in range(2))
    assert first.thresholds == second.thresholds and first.thresholds
    assert [run.name for run in first.runs] == [run.name for run in second.runs]
    assert build_step(SPEC, policy).thresholds == first.thresholds


def test_ranks_of_a_pipeline_are_built_once_from_one_recording() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    config = TrainConfig(parallel=parallel, gradient_accumulation_steps=4)
    ranks = PipelineRanks(SPEC, resolve(SPEC, config, None))
    assert ranks.step(0) is ranks.step(0) and ranks.step(0) is not ranks.step(1)
    alone = build_step(SPEC, ranks.policy, pipeline_rank=1)
    assert [run.name for run in ranks.step(1).runs] == [run.name for run in alone.runs]


def test_what_ends_with_autocast_is_freed_in_the_order_of_its_making() -> None:
    recording = record_model(SPEC, resolve(SPEC, TrainConfig(), None))
    for run in recording.runs:
        made = [t for op in run.block.ops for _, t in op.forward]
        places = [made.index(t) for t in run.block.cached if t in made]
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("gpu", "precision", "kernel"),
    [
        ("T4", Precision.BF16_AUTOCAST, Attention.MATH),
        ("T4", Precision.BF16, Attention.MATH),
        ("V100-SXM2-16GB", Precision.BF16_AMP, Attention.MATH),
        ("T4", Precision.FP16_AMP, Attention.EFFICIENT),
        ("T4", Precision.FP32, Attention.EFFICIENT),
        ("A100-SXM4-80GB", Precision.BF16, Attention.FLASH),
    ],
)
def test_no_fused_kernel_takes_bf16_before_ampere(
    gpu: str, precision: Precision, kernel: Attention
) -> None:
    found = estimate("gpt2", TrainConfig(precision=precision, sequence_length=64), hardware=gpu)
    assert found.step.policy.sdpa_choice is kernel


@pytest.mark.parametrize(
    ("gpu", "kernel"),
    [
        ("T4", Attention.EFFICIENT),
        ("V100-SXM2-16GB", Attention.EFFICIENT),
        ("L4", Attention.FLASH2),
        ("MI300X", Attention.FLASH2),
        (None, Attention.FLASH2),
    ],
)
def test_packed_sequences_run_flash_attn_where_the_gpu_has_it(
    gpu: str | None, kernel: Attention
) -> None:
    """unsloth's TinyLlama notebook on a T4 packs 2 x 4096 tokens: 13.5 GiB reserved, 10.1 with flash-attn."""
    config = TrainConfig(
        precision=Precision.FP16_AMP, sequence_length=64, batch=Batch(packing=True)
    )
    assert estimate("tinyllama", config, hardware=gpu).step.policy.sdpa_choice is kernel


@pytest.mark.parametrize(
    ("model", "stack", "attention"),
    [
        ("llama-7b", "hf-2023", "eager"),  # SDPA since 4.36
        ("llama-7b", "hf-2024", "auto"),
        ("roberta-large", "hf-2024", "auto"),  # since 4.45
        ("opt-1.3b", "hf-4.45", "eager"),  # since 4.46
        ("opt-1.3b", "hf-4.48", "auto"),
        ("llama-7b", "litgpt", "auto"),  # modules of its own
        ("llama-7b", "megatron", "auto"),
    ],
)
def test_releases_without_sdpa_run_whole_scores(model: str, stack: str, attention: str) -> None:
    found = priced({"model": model, "stack": stack, "ctx": 64}, [])[0]
    assert found.ranks.policy.config.attention.value == attention
    said = any("no SDPA before" in line for line in assumptions(found))
    assert said is (attention == "eager")
    named = priced({"model": model, "stack": stack, "ctx": 64, "attention": "flash2"}, [])[0]
    assert named.ranks.policy.config.attention.value == "flash2"


@pytest.mark.parametrize(("model", "named"), [("apertus-8b", True), ("qwen3-8b", False)])
def test_whose_xielu_is_priced_is_said(model: str, named: bool) -> None:
    """A published run with the package's kernel took 8.7 GiB, where Python's steps take 12.2."""
    found = estimate(model, sequence_length=64, micro_batch_size=1)
    assert any("xIELU" in line for line in assumptions(found)) is named
