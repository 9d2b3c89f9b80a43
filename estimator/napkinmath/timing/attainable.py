"""What of a datasheet a GPU attains in practice: sustained matrix rates, stream and cache
bandwidth, attention, decoding, host copies.

Few measured constants, each shared by many GPUs and with its sources; the physics (power limit,
feeding the matrix units, launch and issue rates) does the rest. `napkinmath.timing.efficiency`
turns them into seconds for a size.
"""

from __future__ import annotations

import math

from napkinmath.base.record import Record
from napkinmath.config.hardware import Gpu

# Share of the datasheet that a large product reaches where power allows: the wider the matrix units
# of an SM, the harder they are to keep fed. bf16 at 8192^3 or the best shape: 512 FLOP/clock/SM
# 1.00 (RTX 2080 0.97, 3090 1.07, 4090 0.98-1.05, 5090 1.1: the clock rises above its rating), 1024
# 0.96 (H20), 2048 0.79-0.87 (A100, five runs), 4096 0.77-0.80 (H100, three), 8192 0.75-0.78 (B200,
# two). Sources: stas00/ml-engineering compute/accelerator, MAMF table; community table of zzc0208
# et al. of torch matmul.
_FEED_LOSS_PER_DOUBLING = 0.065
_FULL_FEED_OPS = 512.0
# fp32 without matrix units: 0.93 on A100, 0.85 on RTX 2080 Ti, 0.83 on V100S; SMs with 128 lanes
# share the issue slots with address arithmetic: 0.69 on RTX 3090, 0.66 on RTX 4090 and 5090, 0.73
# on H20, 0.71 on H100 (same tables, and cublasSgemm at 8192^3 in
# waynehacking8/blackwell-tensorcore-kernels). By FLOP/clock/SM.
_SIMT_SHARE = {128: 0.9, 256: 0.68}
# bf16 where the matrix units lack it runs in fp32 lanes after widening: 9.85 of fp32's 13.55
# TFLOP/s on V100S, 5.14 of 9.23 on RTX 2080.
_WIDENED_SHARE = 0.63
# Watts that one SM (CU) at full 16-bit matrix rate takes at 1 GHz; power grows with the square of
# the clock (voltage follows it), so the sustained clock is sqrt(TDP / (SMs x watts)). By
# architecture and 16-bit FLOP/clock/SM of the chip, from sustained bf16 products: V100S 88.9
# TFLOP/s at 250 W; A100 PCIe 252.9 at 300; H100 SXM 794.5 at 700; B200 1745, B300 1769, GB200 1822
# at 1000, 1100, 1200; MI300X
# 668 at 750, MI325X 785 at 1000; MI355X 1565 at 1400 (MAMF table); RTX PRO 6000 Max-Q 235 at 300
# (waynehacking8); RTX A5000 84 in attention at 230 (gpu-mode/ring-attention issue 10). Ada, cdna2
# and rdna3 by their process; others are taken as never limited.
_WATTS_PER_SM_AT_1_GHZ = {
    ("volta", 1024): 2.65,
    ("turing", 1024): 2.65,
    ("ampere", 2048): 2.12,
    ("ampere", 1024): 1.7,
    ("ada", 1024): 0.9,
    ("hopper", 4096): 2.46,
    ("blackwell", 8192): 3.3,
    ("blackwell", 1024): 1.07,
    ("cdna2", 1024): 1.5,
    ("cdna3", 2048): 2.14,
    ("cdna4", 4096): 2.45,
    ("rdna3", 512): 1.1,
}
# A product rated at half its chip's rate is busy half of the clocks and takes half the power (RTX
# 5090 224-236 TFLOP/s at 575 W with the GB202 of the RTX PRO 6000; L20 105-115 at 275 W); narrower
# formats at twice the rate take less than twice (H100: fp8 1403 against bf16 794.5, both at 700 W;
# RTX PRO 6000 Max-Q: tf32 150 against bf16 235).
_WATTS_BY_RATE = 0.4

# One read and one write stream of large size, share of the datasheet: V100 0.89, A100-40 0.89,
# A100-80 0.85-0.89, A40 0.94, L40
# 0.89-0.92, H100 PCIe 0.84-0.90, MI210 0.83 (te42kyfo/gpu-benches gpu-stream); H200 4.3 of 4.8 TB/s
# (0.90).
_STREAM_SHARE = {"hbm": 0.88, "gddr": 0.92, "amd": 0.83}
# L2 reads per SM and clock: 35 B on A100, 35 on H100 PCIe, 37 on H200, 15 on L40, 27 on MI210
# (te42kyfo/gpu-benches gpu-l2-cache).
_L2_BYTES_PER_CLOCK = {"hbm": 35.0, "gddr": 15.0, "amd": 27.0}

# Lanes issued per clock and SM: four schedulers of 32; two on GP100, four of 16 in a CU. A decoding
# kernel mixes integer, float and shared-memory work and fills three quarters of the issue slots.
_LANES_PER_CLOCK = 128.0
_ISSUE_SHARE = 0.75

# Pinned copies: 12.3 of 15.8 GB/s on PCIe 3, 25-26 of 31.5 on PCIe 4, 54-56 of 63 on PCIe 5
# (bandwidthTest and nvbandwidth runs).
_PINNED_SHARE = 0.82
# A pageable copy goes through a pinned staging buffer: one core's memcpy before the link.
_STAGING_BYTES_PER_S = 11e9

_WGMMA_CAPABILITIES = ("9.0", "10.0", "10.3")  # wgmma, tcgen05 and the tensor memory accelerator


class AttentionCurve(Record):
    """Clocks of one SM per score: `matmul FLOP / rate + other`, forward and backward.

    `share` is the part of the SM's matrix rate the kernel's instructions reach, `cap` FLOP/clock
    beyond which shared memory feeds no faster; `other` clocks per score (exponential, rescaling) do
    not overlap.
    """

    share: float
    cap: float
    other: float
    backward_share: float
    backward_cap: float
    backward_other: float


# Fitted to forward and backward, head sizes 64 and 128, of: FlashAttention-2 paper figures 4-6
# (A100), RTX A5000 (gpu-mode/ring-attention issue 10), H100 (flash-attention PR 2688,
# FlashAttention-3 paper figures 5-6), B200 (flash-attention issue 1589), H20 (issue 1310).
# Backward, bound by shared memory, does about 1,500 FLOP/clock/SM on A100, H100 and B200 alike.
_FLASH2 = AttentionCurve(
    share=0.9, cap=2900.0, other=0.06, backward_share=0.85, backward_cap=1550.0, backward_other=0.15
)
_FLASH2_ON_HOPPER = AttentionCurve(
    share=0.68,
    cap=2900.0,
    other=0.11,
    backward_share=0.85,
    backward_cap=1600.0,
    backward_other=0.09,
)
# Kernels with wgmma: FlashAttention-3 paper figures 5-6 (cuDNN 595 forward, 516 backward; FA3 648
# and 561 TFLOP/s at 16k), H20 issue 1310.
_CUDNN_ON_HOPPER = AttentionCurve(
    share=0.9, cap=1e9, other=0.06, backward_share=0.7, backward_cap=1e9, backward_other=0.128
)
_FLASH3 = AttentionCurve(
    share=0.9, cap=1e9, other=0.044, backward_share=0.75, backward_cap=1e9, backward_other=0.11
)
# flash-attn 1, until August 2023: forward and backward together FlashAttention-2 is 1.7 to 3 times
# as fast (its paper, figures 4-6, A100).
_FLASH1 = AttentionCurve(
    share=0.55, cap=1500.0, other=0.1, backward_share=0.45, backward_cap=800.0, backward_other=0.25
)
# xformers' CUTLASS kernels: 43 of FlashAttention-2's 53 TFLOP/s forward and 27 of its 52 backward
# (flash-attention issue 416), about 0.55 and 0.45 of it in figures 4-6 of the FlashAttention-2
# paper.
_EFFICIENT = AttentionCurve(
    share=0.6, cap=1400.0, other=0.12, backward_share=0.42, backward_cap=750.0, backward_other=0.25
)


def matmul_flops_per_s(gpu: Gpu, key: str) -> float:
    """FLOP/s of a large product in a format: the datasheet's less feeding, and what the power limit
    leaves."""
    dense = gpu.dense_flops_per_s(key)
    if gpu.vendor != "amd" and (
        key == "fp32" or (not gpu.supports(key) and dense == gpu.dense_flops_per_s("fp32"))
    ):
        return (
            dense
            * _SIMT_SHARE[_simt_flops_per_clock(gpu)]
            * (_WIDENED_SHARE if key == "bf16" else 1.0)
        )
    ops = dense / (gpu.num_sms * gpu.tensor_hz)
    fed = dense * (1.0 - _FEED_LOSS_PER_DOUBLING * max(0.0, _log2(ops / _FULL_FEED_OPS)))
    return min(fed, gpu.num_sms * ops * sustained_hz(gpu, ops))


def sustained_hz(gpu: Gpu, ops_per_clock: float) -> float:
    """The clock that the board's power sustains with matrix units of this FLOP/clock/SM busy;
    infinite where nothing is known."""
    chip = _chip_ops(gpu)
    watts = _WATTS_PER_SM_AT_1_GHZ.get((gpu.architecture, chip))
    if watts is None:
        return float("inf")
    rated = matmul_ops(gpu, "fp16")
    watts *= rated / chip * (ops_per_clock / rated) ** _WATTS_BY_RATE
    return (gpu.tdp_w / (gpu.num_sms * watts)) ** 0.5 * 1e9


def matmul_ops(gpu: Gpu, key: str) -> float:
    """Matrix FLOP/clock/SM in a format."""
    return gpu.dense_flops_per_s(key) / (gpu.num_sms * gpu.tensor_hz)


def attention_hz(gpu: Gpu) -> float:
    """The clock under attention: the matrix units are busy about 70% of the time, which power
    feels."""
    rated = gpu.tensor_hz if gpu.tensor_hz == gpu.boost_hz else (gpu.tensor_hz + gpu.boost_hz) / 2
    return min(rated, sustained_hz(gpu, matmul_ops(gpu, "fp16")) / 0.7**0.5)


def attention_curves(gpu: Gpu) -> dict[str, AttentionCurve]:
    """The curve of each kernel SDPA or flash-attn can pick on this GPU."""
    hopper = has_wgmma(gpu)
    flash2 = _FLASH2_ON_HOPPER if hopper else _FLASH2
    flash3 = _FLASH3 if hopper else flash2
    cudnn = _CUDNN_ON_HOPPER if hopper else flash2
    return {
        "flash": flash2,
        "flash1": _FLASH1,
        "flash2": flash2,
        "flash3": flash3,
        "flash4": flash3,
        "cudnn": cudnn,
        "efficient": _EFFICIENT,
    }


def has_wgmma(gpu: Gpu) -> bool:
    """Whether products can use the warp-group instructions and the tensor memory accelerator
    (Hopper, data-centre Blackwell)."""
    return gpu.compute_capability in _WGMMA_CAPABILITIES


def stream_bytes_per_s(gpu: Gpu) -> float:
    """Bandwidth of a plain large copy, read and written bytes together."""
    return gpu.bandwidth_bytes_per_s * _STREAM_SHARE[_memory_class(gpu)]


def l2_bytes_per_s(gpu: Gpu) -> float:
    """Bandwidth of reads that hit L2."""
    return gpu.num_sms * gpu.boost_hz * _L2_BYTES_PER_CLOCK[_memory_class(gpu)]


def instructions_per_s(gpu: Gpu) -> float:
    """Lane instructions per second of a decoding kernel."""
    lanes = (
        _LANES_PER_CLOCK / 2
        if gpu.vendor == "amd" or gpu.compute_capability == "6.0"
        else _LANES_PER_CLOCK
    )
    return gpu.num_sms * lanes * _ISSUE_SHARE * gpu.boost_hz


def pinned_bytes_per_s(gpu: Gpu) -> float:
    """Bandwidth of a large copy between pinned host memory and the GPU, one direction."""
    return _PINNED_SHARE * gpu.host_link.bytes_per_s


def pageable_bytes_per_s(gpu: Gpu) -> float:
    """The same from ordinary host memory: staged, so both steps take their time."""
    return 1.0 / (1.0 / pinned_bytes_per_s(gpu) + 1.0 / _STAGING_BYTES_PER_S)


def _chip_ops(gpu: Gpu) -> int:
    """16-bit FLOP/clock/SM that the chip's units could do, also where the product is rated at half
    or a quarter of it."""
    if gpu.architecture == "hopper":
        return 4096
    rates = dict(gpu.dense_flops)
    rate = rates.get("fp16_fp16acc", rates["fp16"]) / (gpu.num_sms * gpu.tensor_hz)
    return max(
        1024 if gpu.architecture in ("ampere", "ada") else 128, 1 << max(0, round(_log2(rate)))
    )


def _simt_flops_per_clock(gpu: Gpu) -> int:
    return 128 if gpu.dense_flops_per_s("fp32") < gpu.num_sms * gpu.boost_hz * 192 else 256


def _memory_class(gpu: Gpu) -> str:
    if gpu.vendor == "amd":
        return "amd"
    return (
        "hbm" if gpu.compute_capability in ("6.0", "7.0", "8.0", *_WGMMA_CAPABILITIES) else "gddr"
    )


def _log2(value: float) -> float:
    return math.log2(value)
