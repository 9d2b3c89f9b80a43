"""What an engine's products take beside dense ones of their sizes: experts, inputs brought into a
narrow format, weights that are unpacked first."""

from __future__ import annotations

from napkinmath.timing.efficiency import bytes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.weight_format import WeightFormat
    from napkinmath.timing.efficiency import Efficiency

# Engines multiply the tokens of all experts in one kernel, after it has sorted them: what it starts
# with beside its two products, and the share of a dense product's rate that it reaches. The row of a
# token is gathered, and its result written, for each expert that it visits: ranks that share experts
# share the width between, not these rows. Fitted to vLLM's tables of A100 and H100
# (ai-dynamo/aiconfigurator moe_perf), compared with those of H200, B200 and L40S by
# benchmarks/accuracy/decoding.py.
_EXPERTS_START_S = 20e-6
_EXPERTS_SHARE = 0.45
# FLOP a clock and SM of Marlin's kernel over experts, at 128 rows of an expert and more: 180 to 206
# TFLOP/s on H100 (the same tables, vLLM 0.24; 182 to 208 on H200, 188 to 213 on B200).
_MARLIN_FLOPS = 800


def unpacks_first(packing: WeightFormat, rows: int, outputs: int, speed: Efficiency) -> bool:
    """Whether `rows` go through a 16-bit copy of the weight: bitsandbytes' own product is for few of
    them, the more the more tiles of 64 outputs each SM has.

    Source: bitsandbytes 0.50.2 backends/cuda/ops.py _gemm_4bit_use_custom_cuda (8 to 64 rows on
    H100, to 128 on A100, to 256 on Ada; one rule here).
    """
    tiles = outputs / 64 / speed.gpu.num_sms
    few = rows < 8 or (tiles >= 0.5 and rows <= 32 * tiles)
    return packing.of_bitsandbytes and packing.bits == 4 and not few


def quantize_s(elements: float, dtype: str, speed: Efficiency) -> float:
    """Seconds of bringing the inputs of a product into its narrow format: read, and written with
    scales (vllm _custom_ops.py scaled_fp8_quant, scaled_fp4_quant)."""
    moved = elements * (bytes_of(dtype) + 1)
    return speed.kernel_start_s + moved / speed.stream_bytes_per_s


def experts_more_s(
    flops: float,
    moved: float,
    dtype: str,
    speed: Efficiency,
    *,
    starts: bool = True,
    marlin: bool = False,
) -> float:
    """Seconds that one of a layer's two products over experts takes beside dense products of their
    sizes; `moved`: values of its inputs and results. Experts of 4 bits run in kernels of their own,
    whose start is not known: `starts` of False leaves it out."""
    dense = speed.matmul_rate(dtype)
    rate = _EXPERTS_SHARE * dense
    if marlin:
        rate = min(rate, _MARLIN_FLOPS * speed.gpu.num_sms * speed.gpu.tensor_hz)
    passed = moved * bytes_of("bf16") / speed.stream_bytes_per_s
    return starts * _EXPERTS_START_S / 2 + flops / rate - flops / dense + passed


def multiplies_narrow(packing: WeightFormat, speed: Efficiency) -> bool:
    """Whether a GPU multiplies a format's weights without unpacking them: 8 bits where it has units
    for them, 4 bits where it has units for 4 (Blackwell's take FP8 inputs with them too)."""
    wanted = packing.multiplied_in
    four = packing.bits == 8 or speed.gpu.supports("fp4")
    return bool(wanted) and four and speed.gpu.supports(wanted)
