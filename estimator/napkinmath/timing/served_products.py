"""What an engine's products take beside dense ones of their sizes: experts, inputs brought into a
narrow format, weights that are unpacked first."""

from __future__ import annotations

from napkinmath.timing.attainable import has_wgmma
from napkinmath.timing.efficiency import bytes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.hardware import Gpu
    from napkinmath.ir.weight_format import WeightFormat
    from napkinmath.timing.efficiency import Efficiency

# Engines multiply the tokens of all experts in one kernel, after it has sorted them: what it starts
# with beside its two products, and the share of a dense product's rate that it reaches. The row of a
# token is gathered, and its result written, for each expert that it visits: ranks that share experts
# share the width between, not these rows. Fitted to vLLM's tables of A100 and H100
# (ai-dynamo/aiconfigurator moe_perf), compared with those of H200, B200 and L40S by
# benchmarks/accuracy/decoding.py.
_EXPERTS_START_S = 20e-6
# Of TRT-LLM's kernel over NVFP4: fitted to vLLM 0.24 on B200 (19.7 to 12.6% in the median there; vLLM
# 0.19 22.5 to 13.5%, SGLang 0.5.14 21.3 to 17.8%).
_NVFP4_START_S = 8e-6
# FLOP a clock and SM of FlashInfer's other kernels over NVFP4, without bias beyond 1,024 tokens of
# SGLang 0.5.10 and 0.5.9 on B200 (CuTe DSL's; CUTLASS' is 10 to 15% slower in whole servers,
# sgl-project/sglang#32229). What they start with is not known apart.
_CUTLASS_NVFP4_FLOPS = 3000
_EXPERTS_SHARE = 0.45
# FLOP a clock and SM of Marlin's kernel over experts, at 128 rows of an expert and more: 180 to 206
# TFLOP/s on H100 (the same tables, vLLM 0.24; 182 to 208 on H200, 188 to 213 on B200).
_MARLIN_FLOPS = 800
# The same of kernels over FP8 by blocks on Blackwell, where sums are scaled every 128 inputs: TRT-LLM's
# (fitted to vLLM 0.24 on B200; SGLang 0.5.14 there 21.8 to 16.3%) and Triton's, whose tiles of 64 rows
# fill half of the matrix units (fitted to vLLM 0.19 and 0.22 on B200: 39 to 17%; SGLang 0.5.9 and 0.5.10
# there 29.4 to 28.6%). Hopper's lie within 12% without a limit.
_TRTLLM_BLOCK_FLOPS = 2600
_TRITON_BLOCK_FLOPS = 1400


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
    start_s: float = _EXPERTS_START_S,
    most: float = 0.0,
) -> float:
    """Seconds that one of a layer's two products over experts takes beside dense products of their
    sizes. `moved`: values of its inputs and results; `start_s`: what the kernel of both products starts
    with; `most`: FLOP a clock and SM of it, 0 without a limit."""
    dense = speed.matmul_rate(dtype)
    rate = _EXPERTS_SHARE * dense
    if most:
        rate = min(rate, most * speed.gpu.num_sms * speed.gpu.tensor_hz)
    passed = moved * bytes_of("bf16") / speed.stream_bytes_per_s
    return start_s / 2 + flops / rate - flops / dense + passed


def experts_start_s(packing: WeightFormat | None) -> float:
    """What the kernel that runs experts in a format starts with. Other kernels over 4 bits than
    Marlin's and NVFP4's are not known: 0."""
    if packing is None or packing.bits != 4 or packing.by_marlin:
        return _EXPERTS_START_S
    return _NVFP4_START_S if packing.multiplied_in == "fp4" else 0.0


def most_of_experts(packing: WeightFormat | None, gpu: Gpu, *, trtllm: bool) -> float:
    """FLOP a clock and SM of the kernel that runs experts in a format; 0 without a limit."""
    if packing is None:
        return 0.0
    if packing.by_marlin:
        return _MARLIN_FLOPS
    if not (has_wgmma(gpu) and gpu.architecture == "blackwell"):
        return 0.0
    if packing.by_blocks:
        return _TRTLLM_BLOCK_FLOPS if trtllm else _TRITON_BLOCK_FLOPS
    if packing.multiplied_in == "fp4" and not trtllm:
        return _CUTLASS_NVFP4_FLOPS
    return 0.0


def multiplies_narrow(packing: WeightFormat, speed: Efficiency) -> bool:
    """Whether a GPU multiplies a format's weights without unpacking them: 8 bits where it has units
    for them, 4 bits where it has units for 4 (Blackwell's take FP8 inputs with them too)."""
    wanted = packing.multiplied_in
    four = packing.bits == 8 or speed.gpu.supports("fp4")
    return bool(wanted) and four and speed.gpu.supports(wanted)
