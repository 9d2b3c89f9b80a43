"""Runs that a library refuses: a finding says so, and the trace of the same run is refused."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib

import pytest
from agreement.image_configs import IMAGES
from agreement.tiny_configs import TINY
from napkinmath import estimate
from napkinmath.catalog.attention_support import REFUSED_ATTENTION
from napkinmath.catalog.learned_forms import forms_of, shipped_types
from napkinmath.models.families import FAMILIES

CLASSIFIER = ["ItsForSequenceClassification"]
REFUSED = [
    ("llama", {"architectures": CLASSIFIER}, {"bs": 2}, "pad_token_id"),
    ("bert", {"architectures": CLASSIFIER}, {"method": "qlora"}, "--keep-modules classifier"),
    ("distilbert", {"architectures": CLASSIFIER}, {"method": "lora"}, "pre_classifier"),
    ("mixtral", {}, {"method": "lora", "dropout": 0.1}, "dropout on the parameters of experts"),
    ("llama4_text", {}, {"method": "lora"}, "Llama 4's routers"),
    ("bloom", {}, {"attention": "flash2"}, "attn_implementation=flash_attention_2"),
    ("gemma2", {}, {"attention": "sdpa"}, "attn_implementation=sdpa"),
    ("gemma4", {}, {"method": "lora", "targets": "q_proj"}, "Gemma4ClippableLinear"),
    ("qwen3_omni_moe_thinker", {}, {"method": "lora"}, "by its last word '0'"),
    ("swin", {}, {"method": "lora", "checkpointing": "full"}, "enable_input_require_grads"),
]
SWIN = {
    "model_type": "swin",
    "architectures": ["SwinForImageClassification"],
    "embed_dim": 24,
    "depths": [2, 2, 2, 2],
    "num_heads": [1, 2, 4, 8],
}
ALTUP = (
    "gemma3n_text",
    {},
    {"method": "qlora"},
    "--keep-modules prediction_coefs,correction_coefs",
)
"""Fails below the library's code, in torch, so that a trace does not name the library."""
CONFIGS = TINY | IMAGES | {"swin": SWIN}


def findings_of(family: str, changed: dict[str, object], options: dict[str, object]) -> str:
    """The text of all findings."""
    found = estimate({**CONFIGS[family], **changed}, **_length(family), **options).findings
    return " ".join(finding.text for finding in found)


def _length(family: str) -> dict[str, int]:
    """A short context, of models that read text."""
    return {} if family == "swin" else {"ctx": 64}


@pytest.mark.parametrize(("family", "changed", "options", "said"), [*REFUSED, ALTUP])
def test_a_refused_run_is_a_finding(
    family: str, changed: dict[str, object], options: dict[str, object], said: str
) -> None:
    assert said in findings_of(family, changed, options)


def test_a_kernel_that_takes_no_mask_or_fp32_is_a_finding() -> None:
    said = "sdpa_kernel(SDPBackend.FLASH_ATTENTION) alone fails"
    biased = estimate("swin-base-patch4-window7-224", bs=2, attention="flash")
    assert any(
        "takes no masks or biases" in one.text and said in one.text for one in biased.findings
    )
    assert "takes no fp32" in findings_of("llama", {}, {"attention": "flash", "precision": "fp32"})
    for attention in ("flash", "auto"):
        assert said not in findings_of("llama", {}, {"attention": attention, "precision": "bf16"})


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "quantizer"),
    [
        ("mxfp4", "quantizer_mxfp4.Mxfp4HfQuantizer"),
        ("nvfp4", "quantizer_nvfp4.NVFP4HfQuantizer"),
        ("fp8", "quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer"),
        ("nf4", "quantizer_bnb_4bit.Bnb4BitHfQuantizer"),
    ],
)
def test_what_transformers_trains_no_adapters_over_is_a_finding(name: str, quantizer: str) -> None:
    transformers = pytest.importorskip("transformers")
    module, _, kind = quantizer.partition(".")
    found = getattr(importlib.import_module(f"{transformers.__name__}.quantizers.{module}"), kind)
    trains = found.is_trainable.fget(None)
    said = findings_of("llama", {}, {"method": "lora", "quant": name})
    assert ("refuses to train over" in said) == (not trains)
    assert "refuses to train over" not in findings_of(
        "llama", {}, {"method": "lora", "quant": name, "stack": "torchtitan"}
    )


FP16 = {"precision": "fp16-autocast"}


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, {"precision": "fp16-amp"}),
        ({"gpus": "2xV100"}, {"precision": "fp16-amp"}),
        ({"method": "lora", "train_modules": "lm_head"}, {"precision": "fp16-amp"}),
        ({"method": "lora", "adapter_dtype": "base"}, {"adapter_dtype": "fp32"}),
        ({"method": "lora"}, {}),
        ({"method": "qlora"}, {}),
        ({"gpus": "2xV100", "zero": 1}, {}),
        ({"stack": "megatron"}, {}),
    ],
)
def test_what_the_loss_scaler_refuses_has_a_way_out(
    options: dict[str, object], way: dict[str, object]
) -> None:
    """transformers and accelerate unscale before they clip; DeepSpeed and Megatron scale by
    themselves."""
    said = findings_of("llama", {}, {**FP16, **options})
    assert ("unscale" in said) == bool(way)
    for name, value in way.items():
        assert f"--{name.replace('_', '-')} {value}" in said
    assert "unscale" not in findings_of("llama", {}, {**FP16, **options, **way})


@pytest.mark.parametrize(
    ("family", "changed", "options", "said"),
    [
        ("llama", {"architectures": CLASSIFIER}, {"bs": 1}, "pad_token_id"),
        ("llama", {"architectures": CLASSIFIER, "pad_token_id": 0}, {"bs": 2}, "pad_token_id"),
        (
            "bert",
            {"architectures": CLASSIFIER},
            {"method": "qlora", "keep_modules": "classifier"},
            "--keep-modules",
        ),
        (
            "distilbert",
            {"architectures": CLASSIFIER},
            {"method": "lora", "targets": "q_lin"},
            "pre",
        ),
        ("mixtral", {}, {"method": "lora", "dropout": 0.1, "targets": "q_proj"}, "experts"),
        ("llama4_text", {}, {"method": "lora", "targets": "q_proj"}, "routers"),
        ("bloom", {}, {"attention": "eager"}, "attn_implementation"),
        ("bloom", {}, {"attention": "flash2", "stack": "megatron"}, "attn_implementation"),
        ("llama4_text", {}, {"packing": True, "lengths": "64,32"}, "attn_implementation"),
        ("gemma4", {}, {"method": "lora"}, "Clippable"),
        ("qwen3_omni_moe_thinker", {}, {"method": "lora", "targets": "q_proj"}, "last word"),
        ("qwen2_5_omni_thinker", {}, {"method": "lora"}, "last word"),
        ("gemma3n_text", {}, {"method": "lora"}, "AltUp"),
        (
            "gemma3n_text",
            {},
            {"method": "qlora", "keep_modules": "prediction_coefs,correction_coefs"},
            "AltUp",
        ),
        ("gemma4", {}, {"method": "lora", "targets": ".*language_model.*q_proj"}, "Clippable"),
        ("swin", {}, {"method": "lora"}, "enable_input_require_grads"),
        ("swin", {}, {"checkpointing": "full"}, "enable_input_require_grads"),
    ],
)
def test_the_way_out_ends_it(
    family: str, changed: dict[str, object], options: dict[str, object], said: str
) -> None:
    assert said not in findings_of(family, changed, options)


@pytest.mark.torch
@pytest.mark.parametrize(("family", "changed", "options", "said"), REFUSED)
def test_the_trace_says_who_refuses(
    family: str, changed: dict[str, object], options: dict[str, object], said: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    from napkinmath_profiler.cli.trace import traced_timeline
    from napkinmath_profiler.tracing.trace_errors import TraceError

    config = {**CONFIGS[family], **changed}
    with pytest.raises(TraceError, match=r"(transformers|peft|bitsandbytes)/.*\.py:\d+"):
        traced_timeline({"config": config, **_length(family), **options})


@pytest.mark.torch
def test_transformers_does_not_clamp_packed_coefficients() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    from napkinmath_profiler.cli.trace import traced_timeline

    family, _, options, _ = ALTUP
    with pytest.raises(RuntimeError, match="uint8"):
        traced_timeline({"config": TINY[family], "ctx": 64, **options})


@pytest.mark.torch
def test_refused_attention_is_what_the_installed_classes_say() -> None:
    transformers = pytest.importorskip("transformers")
    from napkinmath_profiler.tracing.learning.recording import refused_attention
    from transformers.models.auto import modeling_auto as auto

    tasks = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
    mappings = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in tasks]
    shipped = {kind: forms_of(kind)[0].get("refused_attention") for kind in shipped_types()}
    told = {kind: list(REFUSED_ATTENTION.get(kind, ())) for kind in FAMILIES} | shipped
    found = {
        kind: refused_attention(
            getattr(transformers, names if isinstance(names, str) else names[0])
        )
        for mapping in mappings
        for kind, names in mapping.items()
        if kind in told
    }
    assert len(found) > 100 and found == {kind: told[kind] for kind in found}
