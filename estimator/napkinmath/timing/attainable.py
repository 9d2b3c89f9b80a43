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

# Share of the matrix units' rate that a large product keeps fed. Instructions of one warp: 1.00 at
# 512 FLOP/clock/SM (RTX 2080 0.97, 3090 1.07, 4090 0.98-1.05, 5090 1.1: the clock rises above its
# rating), 0.94 at 1024 (H20's units aside: RTX PRO 6000 0.87-0.89 by torch, 0.94 by cuBLAS), 0.88
# at 2048 (A100 0.79-0.87 in five runs, 0.90 in short ones). Warp groups feed 0.9 of what the units
# do at the boost clock, whatever their width, as runs without a power limit show: weights of zeros
# reach 919-956 TFLOP/s on H100 (1,070 at 1.98 GHz), 1,962 on B200 (2,250), 2,222 on GB300 (2,500);
# H20 142 of 160. Sources: stas00/ml-engineering compute/accelerator, MAMF table; table of zzc0721
# et al. of torch matmul; ai-dynamo/aiconfigurator, measured products.
_FEED_LOSS_PER_DOUBLING = 0.06
_FULL_FEED_OPS = 512.0
_WARP_GROUP_SHARE = 0.9
# fp32 without matrix units: 0.93 on A100, 0.85 on RTX 2080 Ti, 0.83 on V100S; SMs with 128 lanes
# share the issue slots with address arithmetic: 0.69 on RTX 3090, 0.66 on RTX 4090 and 5090, 0.73
# on H20, 0.71 on H100 (same tables, and cublasSgemm at 8192^3 in
# waynehacking8/blackwell-tensorcore-kernels). By FLOP/clock/SM.
_SIMT_SHARE = {128: 0.9, 256: 0.68}
# bf16 where the matrix units lack it runs in fp32 lanes after widening: 0.73 of fp32's rate on V100S
# and V100, 0.71 on P100; 0.56 on RTX 2070, 2080 and 2080 Ti, 0.53 on GTX 1080 Ti, 0.52 on T4 (mean of
# three) and P40. By kind of memory.
_WIDENED_SHARE = {"hbm": 0.72, "gddr": 0.55}
# Watts that one SM (CU) at full 16-bit matrix rate takes at 1 GHz, and how the clock follows the
# power: voltage rises with the clock but not from zero, so clock = (TDP / (SMs x watts))^0.55. The
# exponent is that of chips sold at two powers, bf16 products: H100 SXM 765 and PCIe 496 TFLOP/s
# (700, 350 W), RTX A6000 123 and A4000 63 (300, 140 W), MI300X 668 and MI325X 785 (750, 1000 W), RTX
# PRO 6000 386-417 and Max-Q 226-235 (600, 300 W), B200 1,500, GB200 1,640, GB300 1,830 (1000, 1200,
# 1400 W): each within 7% of the rule. Watts by architecture and 16-bit FLOP/clock/SM of the chip,
# from the same; ampere 2048 A100 PCIe 253 at 300 W, ada L40S's 24 products of aiconfigurator at 350
# and L20 110-114 at 275 (short runs reach more: L40S 210-269, L4 71 at 72 W, 58 by the rule), volta
# V100S 88.9 at 250 and V100 94.8 at 300, MI355X 1,565 at 1400. Best shapes of
# short runs (MAMF) lie up to 10% above, since a board's power is a mean over its last milliseconds.
# Sources as above; cdna2 and rdna3 by their process; others are taken as never limited.
# Turing: T4 24 TFLOP/s over 100 products of 4096^3 (NVIDIA's forum, topic 264462, whose answer names
# the cap of 70 W; runs of 30 products, the smallest 1.5 ms long, reach 42-43), GeForce never limited.
_WATTS_PER_SM_AT_1_GHZ = {
    ("volta", 1024): 2.75,
    ("turing", 1024): 2.98,
    ("ampere", 2048): 2.18,
    ("ampere", 1024): 1.86,
    ("ada", 1024): 1.3,
    ("hopper", 4096): 2.82,
    ("blackwell", 8192): 4.25,
    ("blackwell", 1024): 1.0,
    ("cdna2", 1024): 1.5,
    ("cdna3", 2048): 2.17,
    ("cdna4", 4096): 2.64,
    ("rdna3", 512): 1.1,
}
_CLOCK_BY_POWER = 0.55
# Watts that a GB/s of the board's memory keeps from the SMs, at most half of them: of T4's 70 W 25, of
# RTX 2080's 215 W 35. Newer boards of one chip at 72 to 350 W are met without.
_WATTS_OF_MEMORY = {"turing": 0.078}
# The same of SMs whose fp32 lanes are all busy, by chips of which one is limited and one is not (table
# of zzc0721 et al., TFLOP/s): V100S 13.55, V100 14.06; T4 4.17-4.43, RTX 2080 Ti 13.04; A100 PCIe 17.6,
# SXM 19.2; RTX A6000 23.9, A4000 11.9, 3090 24.5; L4 15.4, L40S 46.9, L20 37.3, 4090 54.7; H100 PCIe 37.0,
# SXM 51.9; RTX PRO 6000 77.2, 5090 69.2. Each within 10%.
_WATTS_OF_LANES = {
    ("volta", 1024): 1.55,
    ("turing", 1024): 1.25,
    ("ampere", 2048): 1.45,
    ("ampere", 1024): 1.54,
    ("ada", 1024): 0.63,
    ("hopper", 4096): 1.26,
    ("blackwell", 1024): 0.64,
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

# Rows that do not start on 16 bytes are loaded element by element, without asynchronous copies, so
# that a tile's loads add to its products. How much follows from how fast the units multiply: 0.39 of
# the time at 512 FLOP/clock/SM, by 107-116 TFLOP/s for N = 2055-2073 against 156 for N = 2040 on RTX
# 4090 (pytorch issue 181718), four times that on an A100. Rows of the result alone are stored, which
# takes no longer. Checked by a GPT-2 on an A100 whose vocabulary grows from 50,257 to 50,304: 8.8 ms
# less a step of 8,192 tokens, 8.9 by this rule (rasbt/LLMs-from-scratch ch05/10_llm-training-speed).
_UNALIGNED_LOADS = 0.39
# Kernels over experts reach this share of a dense product of the same tiles where the matrix units
# are those of data centres (2,048 FLOP/clock/SM and more): rows of any expert come from anywhere, so
# there is no multicast and little reuse. vLLM's fused experts with even routing, medians of the best
# version: H100 0.72, B200 0.64, GB200 0.66, GB300 0.66, but L40S 0.98, RTX PRO 6000 0.95
# (ai-dynamo/aiconfigurator moe_perf; any of the four left out is met within 8%). Apart from them
# torch's grouped_mm on H100, 524 of 700 TFLOP/s (pytorch/ao pull request 2490).
_EXPERTS_SHARE = 0.67
_HUNGRY_OPS = 2048.0

# Pinned copies: 12.3 of 15.8 GB/s on PCIe 3, 25-26 of 31.5 on PCIe 4, 54-56 of 63 on PCIe 5
# (bandwidthTest and nvbandwidth runs).
_PINNED_SHARE = 0.82
# A pageable copy goes through a pinned staging buffer: one core's memcpy before the link.
_STAGING_BYTES_PER_S = 11e9

_DATA_CENTRE_BLACKWELL = ("10.0", "10.3")
_WGMMA_CAPABILITIES = (
    "9.0",
    *_DATA_CENTRE_BLACKWELL,
)  # wgmma, tcgen05 and the tensor memory accelerator


class AttentionCurve(Record):
    """Clocks of one SM per score: `matmul FLOP / rate + other`, forward and backward.

    `share` is the part of the SM's matrix rate the kernel's instructions reach, `cap` FLOP/clock
    beyond which shared memory feeds no faster; `other` clocks per score (exponential, rescaling) do
    not overlap. Loading, the last rescaling and storing of a tile of queries cost forward what
    `start_keys` more keys would.
    """

    share: float
    cap: float
    other: float
    backward_share: float
    backward_cap: float
    backward_other: float
    start_keys: float = 100.0


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
    share=0.92,
    cap=1e9,
    other=0.039,
    backward_share=0.75,
    backward_cap=1e9,
    backward_other=0.11,
    start_keys=220.0,
)
# Data-centre Blackwell, whose products leave the registers (tcgen05): forward of FlashAttention-4
# and TensorRT-LLM's kernels on B200, GB200 and GB300, head sizes 64 to 256, long runs of 940-1,060
# TFLOP/s and 1,250 on GB300, where a clock has twice the exponentials (ai-dynamo/aiconfigurator,
# measured attention; any of the three left out is met within 10%). Backward is Hopper's by cuDNN,
# not measured here.
_FLASH4 = AttentionCurve(
    share=0.9,
    cap=1e9,
    other=0.03,
    backward_share=0.7,
    backward_cap=1e9,
    backward_other=0.128,
    start_keys=250.0,
)
_FLASH4_FASTER_EXP = _FLASH4.replace(other=_FLASH4.other / 2)
_FASTER_EXP_CAPABILITY = "10.3"
# Composable Kernel's flash attention on MI300X, which AOTriton's (SDPA) is like: 353 TFLOP/s forward
# and 200 backward at head size 128, 16k, no mask (ROCm/flash-attention issue 142; one source).
# MI355X's SDPA takes 0.85 of H100's time forward at twice the matrix rate of a CU (amap-cvlab/
# ABot-World pull 14), 1.0 here: what feeds the units limits them, not their width.
_FLASH_ON_CDNA = AttentionCurve(
    share=0.9, cap=1120.0, other=0.12, backward_share=0.85, backward_cap=570.0, backward_other=0.3
)
# flash-attn 1, until August 2023: forward and backward together FlashAttention-2 is 1.7 to 3 times
# as fast (its paper, figures 4-6, A100).
_FLASH1 = AttentionCurve(
    share=0.55, cap=1500.0, other=0.1, backward_share=0.45, backward_cap=800.0, backward_other=0.25
)
# torch's flex_attention, compiled to Triton: 0.90 of FlashAttention-2 forward and 0.85 backward
# (FlexAttention, arXiv 2412.05496, and its post of 2024-08).
_FLEX = AttentionCurve(
    share=0.81,
    cap=2600.0,
    other=0.067,
    backward_share=0.72,
    backward_cap=1320.0,
    backward_other=0.176,
)
# xformers' CUTLASS kernels: 43 of FlashAttention-2's 53 TFLOP/s forward and 27 of its 52 backward
# (flash-attention issue 416), about 0.55 and 0.45 of it in figures 4-6 of the FlashAttention-2
# paper.
_EFFICIENT = AttentionCurve(
    share=0.6, cap=1400.0, other=0.12, backward_share=0.42, backward_cap=750.0, backward_other=0.25
)


_KERNELS = ("flash", "flash1", "flash2", "flash3", "flash4", "flex", "cudnn", "efficient")


def matmul_flops_per_s(gpu: Gpu, key: str) -> float:
    """FLOP/s of a large product in a format: what is fed, and what the power limit leaves of it."""
    fed = fed_flops_per_s(gpu, key)
    if _on_lanes(gpu, key):
        watts = _WATTS_OF_LANES.get((gpu.architecture, _chip_ops(gpu)))
        return fed * min(1.0, _hz_of_power(gpu, watts) / gpu.boost_hz)
    ops = matmul_ops(gpu, key)
    return min(fed, gpu.num_sms * ops * sustained_hz(gpu, ops))


def fed_flops_per_s(gpu: Gpu, key: str) -> float:
    """FLOP/s while the clock is at its rating: before the power limit acts, or where waves that are
    not full leave SMs idle and so power for the others."""
    dense = gpu.dense_flops_per_s(key)
    if _on_lanes(gpu, key):
        return (
            dense
            * _SIMT_SHARE[_simt_flops_per_clock(gpu)]
            * (_WIDENED_SHARE[_memory_class(gpu)] if key == "bf16" else 1.0)
        )
    if has_wgmma(gpu):
        return dense * _WARP_GROUP_SHARE * max(gpu.boost_hz / gpu.tensor_hz, 1.0)
    ops = matmul_ops(gpu, key)
    return dense * (1.0 - _FEED_LOSS_PER_DOUBLING * max(0.0, _log2(ops / _FULL_FEED_OPS)))


def _on_lanes(gpu: Gpu, key: str) -> bool:
    """Whether products of a format run in the fp32 lanes, without matrix units."""
    return gpu.vendor != "amd" and (
        key == "fp32"
        or (not gpu.supports(key) and gpu.dense_flops_per_s(key) == gpu.dense_flops_per_s("fp32"))
    )


def sustained_hz(gpu: Gpu, ops_per_clock: float) -> float:
    """The clock that the board's power sustains with matrix units of this FLOP/clock/SM busy;
    infinite where nothing is known."""
    chip = _chip_ops(gpu)
    watts = _WATTS_PER_SM_AT_1_GHZ.get((gpu.architecture, chip))
    if watts is not None:
        rated = matmul_ops(gpu, "fp16")
        watts *= rated / chip * (ops_per_clock / rated) ** _WATTS_BY_RATE
    return _hz_of_power(gpu, watts)


def _hz_of_power(gpu: Gpu, watts: float | None) -> float:
    """The clock at which SMs of so many watts at 1 GHz take what the board has; infinite where None
    is known."""
    if watts is None:
        return float("inf")
    memory = _WATTS_OF_MEMORY.get(gpu.architecture, 0.0) * gpu.bandwidth_bytes_per_s / 1e9
    left = max(gpu.watts - memory, gpu.watts / 2)
    return (left / (gpu.num_sms * watts)) ** _CLOCK_BY_POWER * 1e9


def clock_follows_power(gpu: Gpu) -> bool:
    """Whether it is known what clock a chip's power sustains."""
    return (gpu.architecture, _chip_ops(gpu)) in _WATTS_PER_SM_AT_1_GHZ


def matmul_ops(gpu: Gpu, key: str) -> float:
    """Matrix FLOP/clock/SM in a format."""
    return gpu.dense_flops_per_s(key) / (gpu.num_sms * gpu.tensor_hz)


def unaligned_share(gpu: Gpu) -> float:
    """Share of its rate that a product with unaligned rows reaches. Hopper's and data-centre
    Blackwell's own was measured on no GPU; what such a product loses there besides is added to it."""
    ops = 512.0 if has_wgmma(gpu) else matmul_ops(gpu, "fp16")
    return 1.0 / (1.0 + _UNALIGNED_LOADS * ops / 512.0)


def experts_share(gpu: Gpu, key: str) -> float:
    """Share of a dense product's rate that a kernel over experts reaches."""
    return _EXPERTS_SHARE if matmul_ops(gpu, key) >= _HUNGRY_OPS else 1.0


def attention_hz(gpu: Gpu) -> float:
    """The clock under attention: the matrix units are busy about 70% of the time, which power
    feels."""
    rated = gpu.tensor_hz if gpu.tensor_hz == gpu.boost_hz else (gpu.tensor_hz + gpu.boost_hz) / 2
    return min(rated, sustained_hz(gpu, matmul_ops(gpu, "fp16")) / 0.7**_CLOCK_BY_POWER)


def attention_curves(gpu: Gpu) -> dict[str, AttentionCurve]:
    """The curve of each kernel SDPA or flash-attn can pick on this GPU."""
    if gpu.vendor == "amd":
        return dict.fromkeys(_KERNELS, _FLASH_ON_CDNA)
    hopper = has_wgmma(gpu)
    flash2 = _FLASH2_ON_HOPPER if hopper else _FLASH2
    flash3 = _FLASH3 if hopper else flash2
    cudnn = _CUDNN_ON_HOPPER if hopper else flash2
    flash4 = flash3
    if gpu.compute_capability in _DATA_CENTRE_BLACKWELL:
        faster = gpu.compute_capability == _FASTER_EXP_CAPABILITY
        flash4 = cudnn = _FLASH4_FASTER_EXP if faster else _FLASH4
    return {
        "flash": flash2,
        "flash1": _FLASH1,
        "flash2": flash2,
        "flash3": flash3,
        "flash4": flash4,
        "flex": _FLEX,
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
