"""Quantized storage formats, one row each."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP8_E4M3, FP16, UINT8
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.ir.weight_format import Grouping, WeightFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import QuantizationConfig

_BNB = "bitsandbytes 0.50 functional.py quantize_4bit, QuantState"

_GPTQ = (
    "GPTQ (arXiv 2210.17323); gptqmodel and AutoGPTQ QuantLinear: qweight, qzeros, scales, g_idx"
)

FORMATS: dict[str, WeightFormat] = {
    row.name: row
    for row in (
        WeightFormat(
            name="nf4",
            meaning="4-bit NormalFloat, blocks of 64",
            source=_BNB,
            bits=4,
            group_size=64,
            table_elements=16,
            output_is_cloned=True,
            of_bitsandbytes=True,
            fused_by=("napkinmath", "unsloth", "axolotl"),
        ),
        WeightFormat(
            name="fp4",
            meaning="4-bit float, blocks of 64",
            source=_BNB,
            bits=4,
            group_size=64,
            table_elements=16,
            output_is_cloned=True,
            of_bitsandbytes=True,
            fused_by=("napkinmath", "unsloth"),
        ),
        WeightFormat(
            name="int8",
            meaning="LLM.int8(), one scale a row",
            source="bitsandbytes 0.50 nn/modules.py Int8Params",
            bits=8,
            group_size=1,
            grouping=Grouping.ROW,
            dequantize_kernel="int8",
            unpacks_whole=False,
            multiplies_integers=True,
            of_bitsandbytes=True,
        ),
        WeightFormat(
            name="fp8",
            meaning="8-bit float (e4m3), one fp32 scale for 128 x 128 weights",
            source=(
                "transformers 5.23 integrations/finegrained_fp8.py FP8Linear, FP8LinearFunction;"
                " DeepSeek-V3 (arXiv 2412.19437)"
            ),
            bits=8,
            group_size=128,
            grouping=Grouping.SQUARE,
            byte_dtype=FP8_E4M3,
            dequantize_kernel="fp8",
            multiplies_fp8=True,
            widened_rest=False,
            fused_by=("napkinmath",),
        ),
        WeightFormat(
            name="gptq-int4",
            meaning="grouped int4 in int32 words",
            source=_GPTQ,
            bits=4,
            group_size=128,
            grouping=Grouping.INPUT,
            words="inputs",
            scale_dtype=FP16,
            zero_point_bits=4,
            group_index=True,
            dequantize_kernel="int4",
            widened_rest=False,
        ),
        WeightFormat(
            name="gptq-int8",
            meaning="grouped int8 in int32 words",
            source=_GPTQ,
            bits=8,
            group_size=128,
            grouping=Grouping.INPUT,
            words="inputs",
            scale_dtype=FP16,
            zero_point_bits=8,
            group_index=True,
            dequantize_kernel="int4",
            widened_rest=False,
        ),
        WeightFormat(
            name="awq-int4",
            meaning="activation-aware grouped int4",
            source="AWQ (arXiv 2306.00978); AutoAWQ WQLinear_GEMM: qweight, qzeros, scales",
            bits=4,
            group_size=128,
            grouping=Grouping.INPUT,
            words="outputs",
            scale_dtype=FP16,
            zero_point_bits=4,
            dequantize_kernel="int4",
        ),
        WeightFormat(
            name="hqq-int4",
            meaning="half-quadratic int4, zero points in half precision",
            source="HQQ (github.com/mobiusml/hqq core/quantize.py)",
            bits=4,
            group_size=64,
            scale_dtype=BF16,
            zero_point_bits=16,
            dequantize_kernel="int4",
            widened_rest=False,
        ),
        WeightFormat(
            name="hqq-int8",
            meaning="half-quadratic int8, zero points in half precision",
            source="HQQ (github.com/mobiusml/hqq core/quantize.py)",
            bits=8,
            group_size=64,
            scale_dtype=BF16,
            zero_point_bits=16,
            dequantize_kernel="int8",
            widened_rest=False,
        ),
        WeightFormat(
            name="eetq-int8",
            meaning="int8, one half-precision scale an output",
            source="transformers 5.23 integrations/eetq.py EetqLinear, EetqLinearMMFunction",
            bits=8,
            group_size=1,
            grouping=Grouping.ROW,
            scale_dtype=FP16,
            dequantize_kernel="int8",
            widened_rest=False,
            saves_input=True,
        ),
        WeightFormat(
            name="aqlm-2bit",
            meaning="one 16-bit code for 8 inputs, a codebook for each linear (1x16)",
            source=(
                "AQLM (arXiv 2401.06118); github.com/Vahe1994/AQLM aqlm/inference.py"
                " QuantizedLinear, _QuantizedMatmul; more than 6 rows: code1x16_matmat_dequant"
            ),
            bits=2,
            group_size=1,
            grouping=Grouping.ROW,
            scale_dtype=FP16,
            table_elements=8 << 16,
            table_dtype=FP16,
            dequantize_kernel="int4",
            widened_rest=False,
            saves_input=True,
        ),
        WeightFormat(
            name="quanto-int4",
            meaning="grouped int4 with a shift in half precision",
            source=(
                "optimum-quanto (github.com/huggingface/optimum-quanto) nn/qmodule.py QModuleMixin,"
                " tensor/optimizers/affine_optimizer.py, tensor/function.py QuantizedLinearFunction"
            ),
            bits=4,
            group_size=128,
            grouping=Grouping.INPUT,
            scale_dtype=BF16,
            zero_point_bits=16,
            dequantize_kernel="int4",
            saves_input=True,
        ),
        WeightFormat(
            name="quanto-fp8",
            meaning="8-bit float (e4m3), one half-precision scale an output",
            source=(
                "optimum-quanto e33f8202e6c7 tensor/weights/qbytes.py WeightQBytesLinearFunction,"
                " library/qbytes_mm.py, tensor/function.py QuantizedLinearFunction"
            ),
            bits=8,
            group_size=1,
            grouping=Grouping.ROW,
            byte_dtype=FP8_E4M3,
            scale_dtype=BF16,
            dequantize_kernel="fp8",
            saves_input=True,
            widened_rest=False,
        ),
        WeightFormat(
            name="quanto-int8",
            meaning="int8, one half-precision scale an output",
            source=(
                "optimum-quanto e33f8202e6c7 tensor/weights/qbytes.py WeightQBytesLinearFunction,"
                " library/qbytes_mm.py"
            ),
            bits=8,
            group_size=1,
            grouping=Grouping.ROW,
            scale_dtype=BF16,
            dequantize_kernel="int8",
            saves_input=True,
            widened_rest=False,
        ),
        *(
            WeightFormat(
                name=f"uint{bits}",
                meaning=f"{bits} bits in groups of 64 inputs, a zero point of 8 bits for each",
                source="ostris/ai-toolkit 27a03a91f23e toolkit/util/uintx_quant.py, as torchao 0.10",
                bits=bits,
                group_size=64,
                grouping=Grouping.INPUT,
                scale_dtype=BF16,
                zero_point_bits=8,
                dequantize_kernel="int4",
                widened_rest=False,
            )
            for bits in (2, 3, 4, 6)
        ),
        WeightFormat(
            name="mxfp4",
            meaning="4-bit float, blocks of 32 inputs with an 8-bit power-of-two scale",
            source="OCP Microscaling Formats v1.0",
            bits=4,
            group_size=32,
            grouping=Grouping.INPUT,
            scale_dtype=UINT8,
            dequantize_kernel="int4",
            takes_adapters=False,  # transformers 5.23 quantizers/quantizer_mxfp4.py
        ),
        WeightFormat(
            name="nvfp4",
            meaning="4-bit float, blocks of 16 inputs with an FP8 scale, one fp32 scale a tensor",
            source=(
                "NVIDIA NVFP4 as ModelOpt and compressed-tensors store it: weight_scale,"
                " weight_scale_2"
            ),
            bits=4,
            group_size=16,
            grouping=Grouping.INPUT,
            scale_dtype=FP8_E4M3,
            tensor_scales=1,
            dequantize_kernel="int4",
            takes_adapters=False,  # quantizer_nvfp4.py
            multiplied_in="fp4",
        ),
    )
}
ALIASES = {
    "int4": "gptq-int4",
    "gptq": "gptq-int4",
    "awq": "awq-int4",
    "hqq": "hqq-int4",
    "eetq": "eetq-int8",
    "aqlm": "aqlm-2bit",
    "qfloat8": "quanto-fp8",
    "int8-bnb": "int8",
    "llm.int8": "int8",
    "8bit": "int8",
    "4bit": "nf4",
}


def find_format(name: str) -> WeightFormat:
    """The row of that name; raises InputError with the nearest names."""
    plain = name.lower().replace("_", "-").removeprefix("load-in-").replace("-bit", "bit")
    row = FORMATS.get(ALIASES.get(plain, plain))
    if row is None:
        raise InputError(
            f"quantization {shown(name)} is unknown; use one of"
            f" {', '.join(FORMATS)}{suggest(name, list(FORMATS))}"
        )
    return row


def weight_format(config: QuantizationConfig | None) -> WeightFormat | None:
    """The row for a configuration, with its group size and double quantization; None where weights
    are not quantized."""
    if config is None:
        return None
    row = find_format(config.format)
    changes: dict[str, object] = {}
    if config.group_size:
        changes["group_size"] = config.group_size
    if config.double_quant and row.dequantize_kernel == "nf4":
        changes["double_quant"] = True
    if config.experts:
        if not row.of_bitsandbytes:
            raise InputError(
                f"quantize_experts packs by bitsandbytes, which has no {row.name}; use"
                f" {', '.join(name for name, row in FORMATS.items() if row.of_bitsandbytes)}"
            )
        changes["packs_experts"] = True
    return row.replace(**changes) if changes else row
