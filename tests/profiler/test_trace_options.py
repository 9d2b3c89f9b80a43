"""What a configuration means to a trace follows from the estimator's own tables."""

from __future__ import annotations

import pytest
import torch
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import (
    AdapterConfig,
    Precision,
    QuantizationConfig,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.lowering.precision import PRECISIONS as RULES
from napkinmath_profiler.cli.trace import model_mapping
from napkinmath_profiler.trace import trace
from napkinmath_profiler.tracing.meta_model import DTYPES
from napkinmath_profiler.tracing.optimizer_choices import OPTIMIZERS
from napkinmath_profiler.tracing.trace_errors import TraceError
from napkinmath_profiler.tracing.trace_options import PRECISIONS, options_from, refuse_workload

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
SMALL = TrainConfig(micro_batch_size=1, sequence_length=16)
UNTRACED = {
    *(Precision.FP8, Precision.FP8_ROW, Precision.FP8_BLOCK),
    *(Precision.BF16_FP8_BASE, Precision.FP16_FP8_BASE),
}


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("adapter", [None, AdapterConfig()], ids=["full", "lora"])
def test_a_precision_is_traced_by_its_rule_or_refused(
    precision: Precision, adapter: AdapterConfig | None
) -> None:
    config = SMALL.replace(precision=precision, adapter=adapter)
    # trained weights in fp16 are what torch's scaler refuses
    scaled = precision is Precision.FP16_AUTOCAST and adapter is None
    if precision in UNTRACED or scaled:
        with pytest.raises(TraceError, match=precision.value):
            options_from(config)
        return
    options, rule = options_from(config), RULES[precision]
    assert options.dtype == rule.parameters.name
    wanted = None if rule.autocast is None else DTYPES[rule.autocast.name]
    assert options.loop.autocast_dtype is wanted


@pytest.mark.parametrize(
    ("precision", "given", "loaded", "multiplied"),
    [
        (Precision.BF16_AMP, "auto", "bf16", "bf16"),
        (Precision.FP16_AMP, "auto", "fp16", "fp16"),
        (Precision.FP32, "auto", "bf16", "bf16"),
        (Precision.BF16, "fp32", "bf16", "fp32"),
    ],
)
def test_a_quantized_model_is_loaded_and_multiplied_in_the_types_of_the_policy(
    precision: Precision, given: str, loaded: str, multiplied: str
) -> None:
    quantization = QuantizationConfig(compute_dtype=given)
    config = SMALL.replace(precision=precision, adapter=AdapterConfig(), quantization=quantization)
    options = options_from(config)
    assert (options.dtype, options.quantization.compute_dtype) == (loaded, multiplied)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_libraries_run_a_traced_precision(precision: Precision) -> None:
    config = SMALL.replace(precision=precision, adapter=AdapterConfig())
    assert trace(LLAMA, config).peak().nbytes > 0


@pytest.mark.parametrize("kind", [k for k in WorkloadKind if k is not WorkloadKind.DISTILL])
def test_a_workload_is_traced_as_itself_or_refused(kind: WorkloadKind) -> None:
    config = SMALL.replace(workload=Workload(kind=kind))
    if kind in (WorkloadKind.SFT, WorkloadKind.CONTRASTIVE):
        refuse_workload(config)
        assert options_from(config).loop.columns == config.workload.texts
        return
    with pytest.raises(TraceError, match=f"--workload {kind.value} cannot be traced"):
        refuse_workload(config)


def test_embeddings_are_traced_without_the_models_head() -> None:
    _, mapping = model_mapping({"model": "bert-base-uncased", "workload": "contrastive"})
    assert mapping["architectures"] == ["Model"]  # of any type, without a head


def test_every_precision_is_one_or_the_other() -> None:
    assert set(PRECISIONS) | UNTRACED == set(Precision)
    assert {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} == DTYPES


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_means_the_same_to_a_trace(name: str) -> None:
    row, job = STACKS[name], SMALL.replace(stack=name, precision=Precision.BF16_AUTOCAST)
    if row.optimizer.default not in OPTIMIZERS:  # of a stack that only published tables have
        with pytest.raises(TraceError, match="cannot be traced"):
            options_from(job)
        return
    options = options_from(job)
    assert options.optimizer == row.optimizer.default
    assert options.optimizer in OPTIMIZERS
    assert options.use_reentrant == row.loop.reentrant_checkpointing
    assert options.loop.convert_outputs_to_fp32 == row.loss.outputs_to_fp32
    assert options.loop.keep_outputs == row.loss.holds_logits
