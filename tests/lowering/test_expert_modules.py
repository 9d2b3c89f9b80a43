"""Experts as transformers 4 held them: modules of linears, which quantizers pack and adapters sit
on."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Estimate
from napkinmath.ir.costs import Dispatch, Repeated

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FOUR_BIT = QuantizationConfig(format="nf4", double_quant=True, kbit_preparation=False)


def mixtral(
    stack: str,
    *,
    targets: tuple[str, ...] = ATTENTION,
    batch: int = 1,
    length: int = 512,
    **changes: Any,
) -> Estimate:
    """Mixtral under LoRA with full checkpointing, weights of 16 bits under autocast."""
    config = TrainConfig(
        micro_batch_size=batch,
        sequence_length=length,
        stack=stack,
        precision=Precision.BF16_AUTOCAST,
        attention=Attention.FLASH2,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
        adapter=AdapterConfig(rank=16, targets=targets, dropout=0.1),
        **changes,
    )
    return estimate("mixtral-8x7b", config)


@pytest.mark.parametrize(
    "model", ["mixtral-8x7b", "olmoe-1b-7b", "qwen1.5-moe-a2.7b", "jamba-v0.1"]
)
def test_both_forms_have_the_same_parameters(model: str) -> None:
    counts = {
        estimate(model, TrainConfig(sequence_length=64, stack=stack)).num_parameters
        for stack in ("hf", "hf-4.48")
    }
    assert len(counts) == 1


def test_four_bits_reach_the_experts_only_where_they_are_linears() -> None:
    packed, whole = (
        mixtral(stack, quantization=FOUR_BIT).memory.allocated.value for stack in ("hf-4.45", "hf")
    )
    assert packed < 30e9  # 46.7e9 parameters of half a byte and constants, and little else
    assert whole > 90e9  # 45.1e9 of them are 3-D parameters of 16 bits


@pytest.mark.parametrize("model", ["granite-4.0-h-tiny", "granite-3.0-3b-a800m"])
def test_granites_of_transformers_4_run_one_expert_after_the_other(model: str) -> None:
    def launches(stack: str) -> int:
        e = estimate(model, TrainConfig(sequence_length=64, stack=stack, precision=Precision.BF16))
        ops = [op for run in e.step.runs for op in run.block.ops]
        return sum(c.count for op in ops for c in op.costs if isinstance(c, Dispatch))

    assert launches("hf-4.48") > launches("hf")


def test_a_slice_of_a_parameter_has_a_gradient_as_large_as_the_parameter() -> None:
    """Granite's experts were matrices of two parameters, taken one by one: 40 times each of 126 and
    63 MB of zeros is written, copied into, and read and written again to be added."""

    def moved(stack: str) -> int:
        config = TrainConfig(sequence_length=64, stack=stack, precision=Precision.BF16)
        e = estimate("granite-3.0-3b-a800m", config)
        layer = next(run.block for run in e.step.runs if run.count == 32)
        slices = [c for op in layer.ops for c in op.backward_costs if isinstance(c, Repeated)]
        bind = Bindings(e.step.symbols)
        return sum(bind(c.moved) for c in slices)

    assert moved("hf") == 0
    assert moved("hf-4.48") == 40 * 4 * 40 * (1024 * 1536 + 1536 * 512) * 2


def test_adapters_reach_the_experts_by_name() -> None:
    """Rank 16 on w1 (4096 to 14336) of 8 experts in 32 layers; w1 is no module in transformers 5,
    whose PEFT folds it into parameters."""
    e = mixtral("hf-4.45", targets=("w1",))
    assert e.num_trained == 32 * 8 * 16 * (4096 + 14336)


def test_each_expert_takes_its_share_of_the_rows() -> None:
    e = mixtral("hf-4.45", quantization=FOUR_BIT)
    rows = [t for t in e.timeline.tensors if t.name == "rows of an expert"]
    assert {t.nbytes for t in rows} == {512 * 2 // 8 * 4096 * 2}


@pytest.mark.parametrize(("batch", "measured"), [(4, 36.732e9), (8, 48.770e9)])
def test_published_runs_of_mixtral_are_met(batch: int, measured: float) -> None:
    """foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb.csv:
    accelerated-peft-bnb, rank 16, 4096 tokens."""
    e = mixtral("hf-4.48", batch=batch, length=4096, quantization=FOUR_BIT)
    assert e.memory.allocated.value == pytest.approx(measured, rel=0.005)


def test_packed_stacks_are_unpacked_for_their_product_alone() -> None:
    """Between steps 4 bits; a layer's two stacks of 16 bits while it runs, of 32 from int8."""
    stored, peak = {}, {}
    for name, format, experts in (
        ("whole", "nf4", False),
        ("nf4", "nf4", True),
        ("int8", "int8", True),
    ):
        e = mixtral(
            "hf",
            quantization=FOUR_BIT.replace(
                format=format, double_quant=format == "nf4", experts=experts
            ),
        )
        weights = [w for run in e.step.runs for w in run.block.weights if w.kind == "experts"]
        bind = Bindings(e.step.symbols)
        stored[name] = sum(bind(t.nbytes) for w in weights for t in (w.tensor, *w.constants))
        stored[name] /= sum(bind(w.elements) for w in weights)
        peak[name] = e.memory.allocated.value
    assert stored["whole"] == 2
    assert stored["nf4"] == pytest.approx(0.515869, rel=1e-5)
    assert stored["int8"] == pytest.approx(1 + 4 / 4096, rel=1e-3)  # a scale a row
    layer = 3 * 8 * 4096 * 14336  # weights of a layer's experts
    saved = 32 * layer * (2 - stored["nf4"])
    assert peak["whole"] - peak["nf4"] == pytest.approx(saved - 2 * layer, rel=0.02)
    more = 32 * layer * (stored["int8"] - stored["nf4"]) + 2 * layer
    assert peak["int8"] - peak["nf4"] > more


def test_only_bitsandbytes_packs_stacks() -> None:
    with pytest.raises(InputError, match="quantize_experts"):
        mixtral("hf", quantization=QuantizationConfig(format="gptq-int4", experts=True))
