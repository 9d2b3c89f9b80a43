"""Stored sizes against what the libraries allocate or document, products against traced steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowering.both_ways import CLOSE, by_rules, differences, traced, train_config
from napkinmath.base.dtypes import FP16, INT8, INT32
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.quantization import FORMATS, find_format, weight_format
from napkinmath.config.train_config import (
    AdapterConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import ALLOC, FREE, Op, Phase, Role
from napkinmath.ir.weight_format import stored_bits_per_element
from napkinmath.lowering.build import build_step
from napkinmath_profiler.tracing.meta_model import AdapterOptions, TrainMethod


def stored(name: str, axes: tuple[int, ...], **changes: Any) -> int:
    """Bytes of a weight with all its constants."""
    packed, constants = find_format(name).replace(**changes).pack("weight", axes, "")
    return sum(int(t.nbytes) for t in (packed, *constants))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axes", "nbytes"), [((4096, 4096), 8_655_940), ((11008, 4096), 23_260_996)]
)
def test_nf4_with_double_quantization_to_the_byte(axes: tuple[int, int], nbytes: int) -> None:
    """Half a byte, a byte a block of 64, 4 bytes for 256 blocks, and 1,092 B of tables and
    offset."""
    assert stored("nf4", axes, double_quant=True) == nbytes
    count = axes[0] * axes[1]
    assert nbytes == count * (0.5 + 1 / 64 + 4 / (64 * 256)) + 1092
    assert (nbytes - 1092) / count == pytest.approx(0.515869, abs=1e-6)


def test_nf4_without_it_is_0_5625_bytes_and_a_table() -> None:
    assert stored("nf4", (4096, 4096)) == 4096 * 4096 * 0.5625 + 16 * 4


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (333, 200)])
def test_fp8_is_stored_as_transformers_linears_store_it(outputs: int, inputs: int) -> None:
    """Weight and scales of blocks, at the edges partial ones."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        linear = FP8Linear(inputs, outputs, block_size=(128, 128))
    parameters = list(linear.parameters())
    assert stored("fp8", (outputs, inputs)) == sum(p.nbytes for p in parameters)


def test_experts_in_fp8_are_refused() -> None:
    config = TrainConfig(adapter=AdapterConfig(), quantization=QuantizationConfig(format="fp8"))
    with pytest.raises(InputError, match=r"experts in fp8 are not priced.*--quant nf4 or none"):
        estimate("qwen3-30b-a3b", config)


def test_constants_go_from_half_a_bit_to_an_eighth() -> None:
    once, twice = (
        stored_bits_per_element(weight_format(QuantizationConfig(double_quant=on)))
        for on in (False, True)
    )
    assert once - 4 == pytest.approx(0.5, abs=1e-4)
    assert twice - 4 == pytest.approx(0.127, abs=1e-3)


@pytest.mark.parametrize("shape", [(96, 64), (130, 100), (33, 65)])
@pytest.mark.parametrize("double", [False, True])
def test_nf4_is_what_bitsandbytes_allocates(shape: tuple[int, int], double: bool) -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        torch.randn(shape), blocksize=64, quant_type="nf4", compress_statistics=double
    )
    tensors = [packed, state.absmax, state.code] + (
        [state.offset, state.state2.absmax, state.state2.code] if double else []
    )
    assert stored("nf4", shape, double_quant=double) == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("shape", [(96, 64), (130, 100)])
def test_int8_is_what_bitsandbytes_allocates(shape: tuple[int, int]) -> None:
    from bitsandbytes.functional import int8_vectorwise_quant

    packed, scales, _ = int8_vectorwise_quant(torch.randn(shape, dtype=torch.float16))
    assert scales.shape == (shape[0],)
    assert stored("int8", shape) == packed.nbytes + scales.nbytes


def test_gptq_and_awq_pack_int32_words() -> None:
    """Shapes of the modules' buffers: AutoGPTQ QuantLinear and AutoAWQ WQLinear_GEMM register
    these."""
    outputs, inputs, group = 4096, 11008, 128
    scales, zeros = inputs // group * outputs * 2, inputs // group * (outputs // 8) * 4
    assert (
        stored("gptq-int4", (outputs, inputs))
        == inputs // 8 * outputs * 4 + zeros + scales + inputs * 4
    )
    assert stored("awq-int4", (outputs, inputs)) == inputs * (outputs // 8) * 4 + zeros + scales
    assert (
        stored("gptq-int4", (64, 200)) == 25 * 64 * 4 + 2 * 8 * 4 + 2 * 64 * 2 + 200 * 4
    )  # the last group is short


def test_hqq_keeps_scale_and_zero_point_in_half_precision() -> None:
    assert stored("hqq-int4", (4096, 4096)) == 4096 * 4096 * (0.5 + 2 * 2 / 64)


def test_aqlm_keeps_a_codebook_for_each_linear_and_eetq_a_scale_for_each_output() -> None:
    """A code of 16 bits for 8 inputs, 2^16 entries of 8 values in half precision."""
    assert stored("aqlm-2bit", (4096, 14336)) == 4096 * 14336 // 8 * 2 + 2**16 * 8 * 2 + 4096 * 2
    assert stored("eetq-int8", (4096, 14336)) == 4096 * 14336 + 4096 * 2
    assert stored("hqq-int8", (4096, 4096)) == 4096 * 4096 * (1 + 2 * 2 / 64)


# Vahe1994/AQLM README.md, "Models": the published 1x16 checkpoints, in GB with one decimal.
AQLM_SIZES = {"llama-2-7b": 2.4, "llama-2-13b": 4.1, "llama-3-8b": 4.1, "llama-3-70b": 21.9}
LAST_DIGIT = 0.05  # GB, half of the digit that is printed


@pytest.mark.parametrize(("model", "gigabytes"), AQLM_SIZES.items())
def test_aqlm_checkpoints_are_as_large_as_published(model: str, gigabytes: float) -> None:
    config = TrainConfig(
        adapter=AdapterConfig(),
        quantization=QuantizationConfig(format="aqlm-2bit"),
        precision=Precision.FP16,
        stack="hf-bare",
    )
    step = estimate(model, config).step
    sizes = Bindings(step.symbols)
    base = sum(
        segment.repeat * int(sizes(tensor.nbytes)) * (1 if action == ALLOC else -1)
        for segment in step.load
        for action, tensor in segment.events
        if action in (ALLOC, FREE) and tensor.role in (Role.WEIGHTS, Role.QUANTIZATION)
    )
    assert base / 1e9 == pytest.approx(gigabytes, abs=LAST_DIGIT)


def test_quanto_keeps_scale_shift_and_the_input_of_each_product() -> None:
    """A scale and a shift in bf16 for each 128 inputs of a row; QuantizedLinearFunction saves x."""
    assert stored("quanto-int4", (4096, 4096)) == 4096 * 4096 // 2 + 2 * 2 * 4096 * (4096 // 128)
    assert stored_bits_per_element(FORMATS["quanto-int4"]) == 4.25
    assert stored("quanto-fp8", (4096, 4096)) == 4096 * 4096 + 2 * 4096  # a scale for each output
    config = TrainConfig(
        micro_batch_size=1,
        sequence_length=64,
        adapter=AdapterConfig(),
        quantization=QuantizationConfig(format="quanto-int4"),
        stack="hf-bare",
    )
    ops = [op for run in estimate("llama-7b", config).step.runs for op in run.block.ops]
    products = [op for op in ops if op.name == "quanto-int4 linear" and op.inputs[0].requires_grad]
    assert products
    assert all(op.saves == (op.inputs[0].tensor,) for op in products)


def test_microscaling_groups_begin_anew_in_every_row() -> None:
    assert stored("mxfp4", (8, 40)) == 8 * 40 // 2 + 8 * 2
    assert stored("nvfp4", (8, 40)) == 8 * 40 // 2 + 8 * 3 + 4
    assert stored_bits_per_element(FORMATS["mxfp4"]) == 4.25
    assert stored_bits_per_element(FORMATS["nvfp4"]) == pytest.approx(4.5, abs=1e-5)


def test_every_format_packs_a_stack_of_experts_like_its_parts() -> None:
    for name, row in FORMATS.items():
        if row.tensor_scales or row.table_elements:
            continue
        assert stored(name, (3, 256, 256)) == 3 * stored(name, (256, 256)), name


# With so few tokens the trace lets a fused kernel multiply, which bitsandbytes has for 16-bit types
# only: a recomputation without k-bit preparation peaks in the unpacked fp32 weight that the trace
# leaves out.
@pytest.mark.parametrize(("checkpointing", "kbit"), [(False, False), (False, True), (True, True)])
def test_products_in_fp32_are_the_traced_step(checkpointing: bool, kbit: bool) -> None:
    """bnb_4bit_compute_dtype left at its default, over weights quantized from bf16."""
    from bitsandbytes.nn import Linear4bit
    from napkinmath_profiler.tracing.meta_model import QuantizationOptions

    def in_fp32(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.compute_dtype = torch.float32

    result = traced(
        method=TrainMethod.QLORA,
        adapters=AdapterOptions(rank=8),
        quantization=QuantizationOptions(kbit_preparation=kbit),
        dtype="bf16",
        checkpointing=checkpointing,
        change=in_fp32,
    )
    config = train_config(
        adapter=AdapterConfig(rank=8),
        quantization=QuantizationConfig(compute_dtype="fp32", kbit_preparation=kbit),
        recompute=RecomputeConfig(kind=RecomputeKind.FULL if checkpointing else RecomputeKind.NONE),
    )
    found = differences(by_rules(config), result)
    assert abs(found[Phase.BACKWARD]) < CLOSE and abs(found[Phase.STEP]) < CLOSE


def int8_ops() -> list[Op]:
    """The int8 products of one layer."""
    from lowering.both_ways import LLAMA
    from napkinmath.catalog.stacks import STACKS
    from napkinmath.lowering.policy import Policy
    from napkinmath.models.families import read_config

    config = train_config(
        adapter=AdapterConfig(rank=8),
        quantization=QuantizationConfig(format="int8", kbit_preparation=False),
    )
    step = build_step(read_config(LLAMA), Policy(config, STACKS["hf-bare"]))
    return [op for op in step.runs[2].block.ops if op.name == "int8 linear"]


def test_llm_int8_sums_in_int32_and_converts_by_fp16() -> None:
    ops = int8_ops()
    assert len(ops) == 7
    for op in ops:
        made = {t.name: t for action, t in op.forward if action == ALLOC}
        assert (
            made["sum in int32"].dtype is INT32
            and made["output in fp16"].dtype is FP16
            and made["x in int8"].dtype is INT8
        )
        freed = {t for action, t in op.forward if action == FREE}
        assert {t.name for t in made.values() if t not in freed} == {
            "output",
            "outlier columns of x",
            "outlier column numbers",
        }
        assert (
            op.inputs[0].tensor in op.saves
        )  # ctx.tensors holds A, which the backward does not read


def test_an_unknown_compute_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="use auto, fp32, bf16 or fp16"):
        QuantizationConfig(compute_dtype="int8")


def test_the_host_waits_where_outliers_are_counted() -> None:
    """Two reads back a linear: nothing is queued behind them, so the step is longer than either
    side of it."""
    config = TrainConfig(adapter=AdapterConfig(), training_mode=False, sequence_length=1)
    int8 = QuantizationConfig(format="int8", double_quant=False, kbit_preparation=False)
    free, waiting = (
        estimate("llama-65b", config.replace(quantization=q), hardware="a100-80").time
        for q in (QuantizationConfig(), int8)
    )
    assert free is not None and waiting is not None
    assert sum(p.waited_s for p in free.phases) == 0
    forward = waiting.phases[0]
    assert 0 < forward.waited_s < forward.device_s
    assert forward.seconds == forward.host_s + forward.waited_s


def test_int8_of_2023_keeps_the_columns_of_x() -> None:
    """One byte more of each input of a linear, and int8 copies of W on the way back (bitsandbytes
    0.43)."""
    int8 = QuantizationConfig(format="int8", double_quant=False, kbit_preparation=False)
    config = TrainConfig(
        adapter=AdapterConfig(), quantization=int8, precision=Precision.FP16, training_mode=False
    )
    saved: dict[str, set[str]] = {}
    for stack in ("hf-2023", "hf"):
        e = estimate("llama-7b", config.replace(stack=stack), hardware="a100-80")
        ops = [op for run in e.step.runs for op in run.block.ops if op.name == "int8 linear"]
        saved[stack] = {tensor.name for op in ops for tensor in op.saves}
    assert "x in int8 by columns" in saved["hf-2023"]
    assert "x in int8 by columns" not in saved["hf"]
