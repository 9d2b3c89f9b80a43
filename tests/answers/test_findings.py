"""What a report says is off: runs that fail, kernels that are not taken, sequences longer than a
model has positions for."""

from __future__ import annotations

import pytest
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Kernels,
    Precision,
    QuantizationConfig,
    TrainConfig,
)
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.jobs import priced
from napkinmath.lowering.precision import in_fp16


def said(e: Estimate) -> str:
    return "\n".join(finding.text for finding in e.findings)


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ("gpt2", 1024),
        ("opt-125m", 2048),
        ("bert-large", 512),
        ("roberta-base", 512),
        ("bart-large", 1024),
        ("llama-7b", 0),
    ],
)
def test_learned_positions_limit_a_sequence(model: str, longest: int) -> None:
    e = estimate(model, sequence_length=longest or 8192)
    assert e.spec.longest_sequence == longest
    assert "index error" not in said(e)
    if longest:
        assert f"a sequence of {longest + 1:,} fails" in said(
            estimate(model, sequence_length=longest + 1)
        )


def test_a_context_that_is_not_given_is_one_the_model_has() -> None:
    notes: list[str] = []
    e = priced({"model": "gpt2"}, notes)[0]
    assert e.config.sequence_length == 1024
    assert any("--ctx 1024" in note for note in notes)
    assert priced({"model": "gpt2", "ctx": "2k"}, [])[0].config.sequence_length == 2048


def test_the_efficient_kernel_takes_no_grouped_heads() -> None:
    text = said(estimate("mistral-7b", attention=Attention.EFFICIENT))
    assert "memory-efficient kernel takes no grouped heads" in text
    assert "fp32" not in text
    assert "0 B" not in text


def test_unsloth_repeats_heads_for_xformers_where_flash_does_not_run() -> None:
    """On a T4 it holds no scores, but a copy of keys and values for each head; the math path took 4.2 GiB more and half as long again."""
    config = TrainConfig(
        sequence_length=2048,
        precision=Precision.FP16_AUTOCAST,
        adapter=AdapterConfig(),
        quantization=QuantizationConfig(),
    )
    own, plain = (
        estimate("llama-3-8b", config.replace(kernels=kernels), hardware="T4")
        for kernels in (Kernels.UNSLOTH, Kernels.HF)
    )
    assert "math path" in said(plain) and "math path" not in said(own)
    flash = estimate("llama-3-8b", config.replace(kernels=Kernels.UNSLOTH), hardware="A100-80")
    assert own.peak.nbytes < 1.07 * flash.peak.nbytes


@pytest.mark.parametrize("name", ["mpt-7b", "gpt-neo-1.3b", "codegen-2b", "bloom-7b1", "falcon-7b"])
def test_attention_that_has_no_kernel_is_not_blamed_on_types(name: str) -> None:
    text = said(estimate(name))
    assert "q, k, v are fp32" not in text
    assert ("a single key/value head" in text) == (name == "falcon-7b")


def test_subclasses_of_linear_are_quantized_by_transformers_4_alone() -> None:
    """FalconLinear: 41.3B parameters in 4 bits take 21 GB."""
    config = TrainConfig(adapter=AdapterConfig(), quantization=QuantizationConfig())
    now, then = (
        estimate("falcon-40b", config, stack=stack, sequence_length=64)
        for stack in ("hf", "hf-4.48")
    )
    assert "subclass of nn.Linear" in said(now) and "--stack hf-4.48" in said(now)
    assert now.memory.allocated.value > 4 * 40e9
    assert "subclass" not in said(then)
    assert 21e9 < then.memory.allocated.value < 29e9


def test_flash_attn_is_given_the_type_of_loading() -> None:
    """k-bit preparation makes q, k, v fp32; transformers casts them back for flash-attn, SDPA falls
    to its math path."""
    config = TrainConfig(
        precision=Precision.BF16, adapter=AdapterConfig(), quantization=QuantizationConfig()
    )
    sdpa, flash = (
        estimate("mistral-7b", config, attention=kind)
        for kind in (Attention.SDPA, Attention.FLASH2)
    )
    assert flash.memory.requested < sdpa.memory.requested
    kernels = {op.name for run in flash.step.runs for op in run.block.ops}
    assert "sdpa flash" in kernels and not any(name.startswith("q k^T") for name in kernels)


def test_flash_attn_refuses_fp32_and_old_gpus() -> None:
    assert "a run fails" in said(
        estimate("mistral-7b", attention=Attention.FLASH2, precision=Precision.FP32)
    )
    assert "compute capability 8.0" in said(
        estimate("mistral-7b", attention=Attention.FLASH2, hardware="t4")
    )
    assert "compute capability" not in said(
        estimate("mistral-7b", attention=Attention.FLASH2, hardware="a100-80")
    )


def test_flash_attn_3_is_for_hopper() -> None:
    """Faster than flash-attn 2 there and of the same memory, said to be flash-attn 2 elsewhere."""
    long = dict(sequence_length=16384, hardware="h100", micro_batch_size=1)
    second, third = (
        estimate("mistral-7b", attention=kind, **long)
        for kind in (Attention.FLASH2, Attention.FLASH3)
    )
    assert third.time.tokens_per_s > second.time.tokens_per_s
    assert third.memory.requested == second.memory.requested
    assert "Hopper" in said(estimate("mistral-7b", attention=Attention.FLASH3, hardware="a100-80"))
    assert "Hopper" not in said(third)


@pytest.mark.parametrize("gpu", ["T4", "V100"])
@pytest.mark.parametrize(
    ("adapter", "advised"),
    [
        (None, "fp16-amp"),
        (AdapterConfig(), "fp16-autocast"),
        (AdapterConfig(dtype="base"), "fp16-autocast --adapter-dtype fp32"),
        (AdapterConfig(trained_modules=("lm_head",)), "fp16-amp"),
    ],
)
def test_a_gpu_without_bf16_is_told_the_fp16_that_runs_and_needs_least(
    gpu: str, adapter: AdapterConfig | None, advised: str
) -> None:
    config = TrainConfig(adapter=adapter, sequence_length=64)
    texts = [f.text for f in estimate("tinyllama-1.1b", config, hardware=gpu).findings]
    text = next(t for t in texts if "no matrix units for bf16" in t)
    assert f"--precision {advised}," in text
    assert "scaled" in text
    assert "65,504" in text
    followed = in_fp16(config)
    assert followed.precision.value == advised.split()[0]
    again = [f.text for f in estimate("tinyllama-1.1b", followed, hardware=gpu).findings]
    assert not any("matrix units" in t or "loss scaling" in t or "unscale" in t for t in again)


def test_fp16_gradients_without_scaling_are_named() -> None:
    def named(config: TrainConfig) -> bool:
        e = estimate("tinyllama-1.1b", config.replace(sequence_length=64), hardware="V100")
        return any("no loss scaling" in f.text for f in e.findings)

    assert named(TrainConfig(precision=Precision.FP16))
    assert not named(TrainConfig(precision=Precision.FP16_AMP))
    assert not named(TrainConfig(precision=Precision.FP16, adapter=AdapterConfig()))
    # Megatron's optimizer and DeepSpeed's engine scale it, beside fp32 masters
    assert not named(TrainConfig(precision=Precision.FP16, stack="megatron"))
    sharded = ParallelConfig(data_parallel=DataParallel.ZERO2, data_parallel_size=2)
    assert not named(TrainConfig(precision=Precision.FP16, parallel=sharded))


@pytest.mark.parametrize(
    ("method", "gpu", "kind"),
    [
        ("full", "T4", "fp16-amp"),
        ("lora", "T4", "fp16-autocast"),
        ("qlora", "V100", "fp16-autocast"),
        ("lora", "rtx3090", "bf16-autocast"),
    ],
)
def test_a_precision_that_nobody_gave_is_one_that_the_gpu_has(
    method: str, gpu: str, kind: str
) -> None:
    options = {"model": "smollm2-135m", "method": method, "gpu": gpu, "ctx": 64}
    notes = list[str]()
    e = priced(options, notes)[0]
    assert e.config.precision.value == kind
    assert (notes == []) is kind.startswith("bf16")
    assert not any("matrix units" in finding.text for finding in e.findings)
    said = priced({**options, "precision": "bf16-autocast"}, notes)[0]
    assert said.config.precision is Precision.BF16_AUTOCAST


@pytest.mark.parametrize(
    ("gpu", "stack", "named"),
    [
        ("V100", "hf", True),
        ("GTX 1080 Ti", "hf", True),
        ("T4", "hf", False),
        ("V100", "hf-4.48", False),
    ],
)
def test_a_gpu_that_torchs_default_wheels_left_behind_is_named(
    gpu: str, stack: str, named: bool
) -> None:
    options = {"model": "smollm2-135m", "gpu": gpu, "ctx": 64, "stack": stack}
    assert ("CUDA 12.6" in said(priced(options, [])[0])) is named


@pytest.mark.parametrize(("gpu", "fails"), [("A100", True), ("RTX 3090", True), ("H100", False)])
@pytest.mark.parametrize("stack", ["hf", "megatron"])
def test_a_gpu_without_fp8_is_named(gpu: str, fails: bool, stack: str) -> None:
    config = TrainConfig(precision=Precision.FP8, stack=stack)
    found = said(estimate("llama-3.2-1b", config, hardware=find_hardware(gpu)))
    assert ("no matrix units for FP8" in found) is fails


def test_a_gpu_without_fp8_and_bf16_is_told_one_type_that_runs() -> None:
    texts = said(estimate("llama-3.2-1b", TrainConfig(precision=Precision.FP8), hardware="V100"))
    assert "--precision bf16" not in texts and texts.count("use --precision fp16-amp") == 2
