"""How fast a GPU really is: default efficiency curves with a physical shape, from datasheet figures and a few measured constants.

Every function takes sizes as numbers or numpy arrays (which broadcast) and a `Gpu`, or an `Efficiency` of one's own; it returns
seconds on the device. Where a measurement of the user's GPU exists, a calibration replaces fields of the `Efficiency`.

Physical content: matrix products are cut into tiles that fill the SMs in waves, after a fixed start; their peak is what feeding the
matrix units and the power limit leave of the datasheet; attention adds work per score that does not overlap; everything else moves
bytes, after the start of a kernel; 4-bit decoding is bound by instructions.
"""

from __future__ import annotations

from napkinmath.dtypes import DType
from napkinmath.errors import InputError
from napkinmath.hardware import Gpu
from napkinmath.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Sizes: TypeAlias = Any  # an int, a float, or a numpy array of them
    Seconds: TypeAlias = Any  # a float, or a numpy array where a size was one

# ---- matrix products -------------------------------------------------------------------------------------------------------
# Tiles a library has for any product, largest first: (rows, columns).
TILES = ((128, 256), (128, 128), (64, 64))
_LARGEST_FEED = 1 / 128 + 1 / 256
# Fitted together on 141 bf16 products of 0.03 to 550 GFLOP on H100 (openxla/xla matmul_interpolator_data.h): median error 4.5%,
# 90th percentile 12%.
_GEMM_START_S = 4.7e-6
_WAVE_START_S = 0.6e-6
_SPLIT_S = 2.0e-6
_FEED_COST = 18.0
_MIN_K_PER_SPLIT = 1024
# Share of the datasheet that a large product reaches where power allows: the wider the matrix units of an SM, the harder they are to
# keep fed. bf16 at 8192^3 or the best shape: 512 FLOP/clock/SM 1.00 (RTX 2080 0.97, 3090 1.07, 4090 0.98-1.05, 5090 1.1: the clock
# rises above its rating), 1024 0.96 (H20), 2048 0.79-0.87 (A100, five runs), 4096 0.77-0.80 (H100, three), 8192 0.75-0.78 (B200, two).
# Sources: stas00/ml-engineering compute/accelerator, MAMF table; community table of zzc0208 et al. of torch matmul.
_FEED_LOSS_PER_DOUBLING = 0.068
_FULL_FEED_OPS = 512.0
# fp32 without matrix units: 0.93 on A100, 0.85 on RTX 2080 Ti, 0.83 on V100S; SMs with 128 lanes share the issue slots with address
# arithmetic: 0.69 on RTX 3090, 0.66 on RTX 4090, 0.66 on RTX 5090, 0.73 on H20, 0.71 on H100 (same tables, and cublasSgemm at 8192^3 in
# waynehacking8/blackwell-tensorcore-kernels).
_SIMT_SHARE = {128: 0.88, 256: 0.68}
# bf16 where the matrix units lack it runs in fp32 lanes after widening: 9.85 of 16.4 TFLOP/s on V100S, 5.14 of 10.1 on RTX 2080.
_WIDENED_SHARE = 0.55
# Watts that one SM (CU) at full 16-bit matrix rate takes at 1 GHz; power grows with the square of the clock (voltage follows it),
# so the sustained clock is sqrt(TDP / (SMs x watts)). From sustained bf16 products: V100S 88.9 TFLOP/s at 250 W; A100 PCIe 252.9 at
# 300 W; H100 SXM 794.5 at 700 W; B200 1745, B300 1769 and GB200 1822 at 1000, 1100 and 1200 W; MI300X 668 at 750 W and MI325X 785 at 1000 W;
# MI355X 1565 at 1400 W (MAMF table); RTX PRO 6000 Max-Q 235 at 300 W (waynehacking8); RTX A5000 84 in attention at 230 W
# (gpu-mode/ring-attention issue 10). Ada is GB202's figure less the share of their process; unknown ones are unlimited.
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
# A product rated at half its chip's rate is busy half of the clocks and takes half the power (RTX 5090 224-236 TFLOP/s at 575 W with the
# GB202 of the RTX PRO 6000; L20 105-115 at 275 W); narrower formats at twice the rate take less than twice (H100: fp8 1403 against
# bf16 794.5, both at 700 W; RTX PRO 6000 Max-Q: tf32 150 against bf16 235).
_WATTS_BY_RATE = 0.45
# Rows that do not start on 16 bytes: 107-116 TFLOP/s for N = 2055-2073 against 156 for N = 2040 on RTX 4090 (pytorch issue 181718).
_UNALIGNED_SHARE = 0.72
# On Hopper and later such a product also loses the kernels built on the tensor memory accelerator: `mma.sync` instead of `wgmma`.
_NO_TMA_SHARE = 0.68

# ---- memory ----------------------------------------------------------------------------------------------------------------
# One read and one write stream of large size, share of the datasheet: V100 0.89, A100-40 0.89, A100-80 0.85-0.89, A40 0.94, L40
# 0.89-0.92, H100 PCIe 0.84-0.90, MI210 0.83 (te42kyfo/gpu-benches gpu-stream); H200 4.3 of 4.8 TB/s (0.90).
_STREAM_SHARE = {"hbm": 0.88, "gddr": 0.92, "amd": 0.83}
# torch's pointwise kernels that cast, broadcast or walk strides leave the vectorized path, and column sums run below it; together with
# the reductions of a norm they reach about this much of a plain copy (Liger-Kernel benchmark csv, RMSNorm of transformers on A100:
# 6.9 ms for the ~9 GB that its eager forward and backward move at hidden size 32768).
_EAGER_SHARE = 0.8
# Time of a streaming kernel is a + V / b: a = 2.5-2.7 us launched one by one, 1.3 us from a graph (te42kyfo/gpu-benches
# gpu-small-kernels, A100 and H200).
_KERNEL_START_S = 2.5e-6
# L2 reads per SM and clock: 35 B on A100, 35 on H100 PCIe, 37 on H200, 15 on L40, 27 on MI210 (te42kyfo/gpu-benches gpu-l2-cache).
_L2_BYTES_PER_CLOCK = {"hbm": 35.0, "gddr": 15.0, "amd": 27.0}
# Of a kernel's traffic the reads can hit what the kernel before left in L2, the writes drain to memory.
_L2_HIT_SHARE = 0.5

# ---- 4-bit weights ---------------------------------------------------------------------------------------------------------
# Instructions per value of the decoding kernels, counted in their sm_90 code: bitsandbytes 0.50 with lookup table 26.5, its select tree
# before pull request 1746 (1.36-2.07x slower on H100, A100, P100) 1.6 times that, a gather from a register table 8.8.
INSTRUCTIONS_PER_VALUE = {"nf4": 26.5, "fp4": 26.5, "nf4-tree": 42.4, "nf4-gather": 8.8, "int4": 12.0, "int8": 8.0}
_LANES_PER_CLOCK = 128.0  # four schedulers of 32 lanes; two on GP100, four of 16 in a CU
_ISSUE_SHARE = 0.75

# ---- host ------------------------------------------------------------------------------------------------------------------
# Pinned copies: 12.3 of 15.8 GB/s on PCIe 3, 25-26 of 31.5 on PCIe 4, 54-56 of 63 on PCIe 5 (bandwidthTest and nvbandwidth runs).
_PINNED_SHARE = 0.82
# A pageable copy goes through a pinned staging buffer: one core's memcpy before the link.
_STAGING_BYTES_PER_S = 11e9
_HOST_COPY_START_S = 10e-6


class AttentionCurve(Record):
    """Clocks of one SM per score: `matmul FLOP / rate + other`, forward and backward.

    `share` is the part of the SM's matrix rate the kernel's instructions reach, `cap` FLOP/clock beyond which shared memory feeds no
    faster; `other` clocks per score (exponential, rescaling) do not overlap.
    """

    share: float
    cap: float
    other: float
    backward_share: float
    backward_cap: float
    backward_other: float


# Fitted to forward and backward, head sizes 64 and 128, of: FlashAttention-2 paper figures 4-6 (A100), RTX A5000 (gpu-mode/ring-attention
# issue 10), H100 (flash-attention PR 2688, FlashAttention-3 paper figures 5-6), B200 (flash-attention issue 1589), H20 (issue 1310).
# Backward, bound by shared memory, does about 1,500 FLOP/clock/SM on A100, H100 and B200 alike.
_FLASH2 = AttentionCurve(share=0.9, cap=2900.0, other=0.06, backward_share=0.85, backward_cap=1550.0, backward_other=0.15)
_FLASH2_HOPPER = AttentionCurve(share=0.68, cap=2900.0, other=0.105, backward_share=0.85, backward_cap=1600.0, backward_other=0.09)
# Kernels with wgmma: FlashAttention-3 paper figures 5-6 (cuDNN 595 forward, 516 backward; FA3 648 and 561 TFLOP/s at 16k), H20 issue 1310.
_CUDNN_HOPPER = AttentionCurve(share=0.9, cap=1e9, other=0.06, backward_share=0.7, backward_cap=1e9, backward_other=0.128)
_FLASH3 = AttentionCurve(share=0.9, cap=1e9, other=0.044, backward_share=0.75, backward_cap=1e9, backward_other=0.11)
# xformers' CUTLASS kernels: 43 of FlashAttention-2's 53 TFLOP/s forward and 27 of its 52 backward (flash-attention issue 416), about 0.55
# and 0.45 of it in figures 4-6 of the FlashAttention-2 paper.
_EFFICIENT = AttentionCurve(share=0.6, cap=1400.0, other=0.12, backward_share=0.42, backward_cap=750.0, backward_other=0.25)
_ATTENTION_TILE = 128
# Loading, the last rescaling and storing of one tile of queries cost what this many more keys would: FA2 causal on H100 reaches
# 298, 319, 335 TFLOP/s at 2k, 4k, 16k (FlashAttention-3 paper).
_TILE_START_KEYS = 100.0
# Backward: 190, 239, 264, 280, 299 TFLOP/s at 512 to 8k on H100, 53, 63, 70, 75, 77 on RTX A5000 (PR 2688, ring-attention issue 10).
_TILE_START_KEYS_BACKWARD = 250.0
# Tiles of unequal length leave SMs idle at the end: causal against full at 16k, FA2 335 of 370, cuDNN 539 of 595, FA3 616 of 648.
_CAUSAL_BALANCE = 0.94

# ---- the host's side of eager PyTorch --------------------------------------------------------------------------------------
# Per kernel that is launched. A Llama layer of transformers 5.23 on torch 2.13 dispatches 78 aten operations forward and 142 backward,
# 2.6 and 1.8 us each without a device (measured on one EPYC core with tiny tensors), for about 40 and 80 kernels whose launch adds
# 2.5-3 us each. Older software and slower cores take two to three times as long.
_DISPATCH_FORWARD_S = 8e-6
_DISPATCH_BACKWARD_S = 6e-6


class Efficiency(Record):
    """What one GPU attains: rates in FLOP/s or bytes/s, starts in seconds. `default_efficiency` derives one from a `Gpu`."""

    gpu: Gpu
    matmul_flops_per_s: tuple[tuple[str, float], ...]
    gemm_start_s: float = _GEMM_START_S
    wave_start_s: float = _WAVE_START_S
    split_s: float = _SPLIT_S
    feed_cost: float = _FEED_COST
    unaligned_share: float = _UNALIGNED_SHARE
    attention: tuple[tuple[str, AttentionCurve], ...] = ()
    attention_hz: float = 0.0
    stream_bytes_per_s: float = 0.0
    eager_share: float = _EAGER_SHARE
    kernel_start_s: float = _KERNEL_START_S
    l2_bytes_per_s: float = 0.0
    decode_instructions_per_s: float = 0.0
    pinned_bytes_per_s: float = 0.0
    pageable_bytes_per_s: float = 0.0
    host_copy_start_s: float = _HOST_COPY_START_S
    dispatch_forward_s: float = _DISPATCH_FORWARD_S
    dispatch_backward_s: float = _DISPATCH_BACKWARD_S

    def matmul_rate(self, dtype: DType | str) -> float:
        """FLOP/s of a product large enough that nothing but feeding, power and lanes limits it."""
        key = _matmul_key(dtype)
        for known, rate in self.matmul_flops_per_s:
            if known == key:
                return rate
        return _attainable(self.gpu, key)


_defaults: dict[str, Efficiency] = {}


def default_efficiency(gpu: Gpu) -> Efficiency:
    """The efficiency that a GPU's datasheet implies; InputError where the GPU has no rates (bare `--vram`)."""
    found = _defaults.get(gpu.name)
    if found is None or found.gpu is not gpu:
        found = _derive(gpu)
        _defaults[gpu.name] = found
    return found


def gemm_s(m: Sizes, n: Sizes, k: Sizes, dtype: DType | str, gpu: Gpu | Efficiency, *, batch: Sizes = 1, aligned: Sizes | None = None) -> Seconds:
    """Seconds of `batch` products (m x k)·(k x n).

    `aligned` says whether every row starts on 16 bytes; left out, it is read off n and k.
    """
    e = _efficiency(gpu)
    rate = e.matmul_rate(dtype) / e.gpu.num_sms
    element_bytes = _element_bytes(dtype)
    if aligned is None:
        multiple = max(1, 16 // element_bytes)
        aligned = (n % multiple == 0) & (k % multiple == 0)
    slowdown = 1.0 + (1.0 - aligned) * (1.0 / _unaligned_rate(e) - 1.0)
    compute = _tiled_s(m, n, k, batch, rate, e, _feed_cost(e, dtype)) * slowdown
    moved = element_bytes * batch * (m * k + k * n + m * n)
    return e.gemm_start_s + _larger(compute, moved / e.stream_bytes_per_s)


def attention_s(kind: str, b: Sizes, heads: Sizes, kv_heads: Sizes, s_q: Sizes, s_kv: Sizes, head_dim: Sizes, causal: bool, window: Sizes | None, dtype: DType | str, backward: bool, gpu: Gpu | Efficiency) -> Seconds:  # fmt: skip
    """Seconds of scaled dot-product attention by a kernel: flash (or flash2), flash3, efficient, cudnn, math.

    `window` is the number of keys a query sees, itself included. Backward alone, not forward and backward.
    """
    e = _efficiency(gpu)
    if kind in ("math", "eager"):
        return _math_attention_s(b, heads, s_q, s_kv, head_dim, causal, dtype, backward, e)
    curve = _attention_curve(e, kind)
    share, cap, other = (curve.backward_share, curve.backward_cap, curve.backward_other) if backward else (curve.share, curve.cap, curve.other)
    flops_per_clock = min(share * _matmul_ops(e.gpu, dtype), cap)
    clocks_per_score = (10 if backward else 4) * head_dim / flops_per_clock + other
    keys = _mean_keys(s_q, s_kv, causal, window) + (_TILE_START_KEYS_BACKWARD if backward else _TILE_START_KEYS)
    tiles = b * heads * -(-s_q // _ATTENTION_TILE)
    sms = e.gpu.num_sms
    busy = _wave_share(tiles, sms) * (_CAUSAL_BALANCE if causal else 1.0)
    compute = tiles * _ATTENTION_TILE * keys * clocks_per_score / (sms * e.attention_hz * busy)
    passes = 2 if backward else 1
    moved = _element_bytes(dtype) * passes * b * head_dim * (2 * heads * s_q + 2 * kv_heads * s_kv)
    return passes * e.kernel_start_s + _larger(compute, moved / e.stream_bytes_per_s)


def elementwise_s(bytes_moved: Sizes, gpu: Gpu | Efficiency, *, launches: Sizes = 1, fused: bool = False) -> Seconds:
    """Seconds of kernels that read and write `bytes_moved` bytes in all: casts, additions, norms, softmax, optimizer steps.

    `launches` kernels share the bytes. `fused` says they were written to stream (copies, foreach and fused optimizers, Liger, compiled
    code), not torch's general pointwise kernels.
    """
    e = _efficiency(gpu)
    stream = e.stream_bytes_per_s * (1.0 if fused else e.eager_share)
    fits = _larger(1.0 - bytes_moved / _larger(launches, 1) / e.gpu.l2_bytes, 0.0)
    hit = _L2_HIT_SHARE * fits
    return launches * e.kernel_start_s + bytes_moved * (hit / e.l2_bytes_per_s + (1.0 - hit) / stream)


def dequantize_s(kind: str, elements: Sizes, gpu: Gpu | Efficiency, *, packed_bits: float = 4.127, output_bytes: int = 2, nested: bool = True) -> Seconds:
    """Seconds of expanding `elements` quantized weights: the slower of moving them and of the instructions per value.

    `nested` constants take two small kernels before (bitsandbytes 0.50, MatMul4Bit: dequantize absmax, add the offset).
    """
    e = _efficiency(gpu)
    instructions = INSTRUCTIONS_PER_VALUE.get(kind, INSTRUCTIONS_PER_VALUE["int4"])
    decode = elements * instructions / e.decode_instructions_per_s
    move = elements * (packed_bits / 8 + output_bytes) / e.stream_bytes_per_s
    return (3 if nested else 1) * e.kernel_start_s + _larger(decode, move)


def dequantize_nf4_s(elements: Sizes, gpu: Gpu | Efficiency) -> Seconds:
    """Seconds of bitsandbytes' NF4 decoding into 16 bits, double quantization included."""
    return dequantize_s("nf4", elements, gpu)


def host_copy_s(bytes_moved: Sizes, pinned: bool, gpu: Gpu | Efficiency) -> Seconds:
    """Seconds of one copy between host and device, either direction."""
    e = _efficiency(gpu)
    return e.host_copy_start_s + bytes_moved / (e.pinned_bytes_per_s if pinned else e.pageable_bytes_per_s)


def dispatch_s(operations: Sizes, backward: bool, gpu: Gpu | Efficiency) -> Seconds:
    """Seconds the host needs to issue operations one by one in eager mode; the device waits where this is the longer time."""
    e = _efficiency(gpu)
    return operations * (e.dispatch_backward_s if backward else e.dispatch_forward_s)


# ---- derivation from the datasheet -----------------------------------------------------------------------------------------


def _derive(gpu: Gpu) -> Efficiency:
    if not gpu.dense_flops or not gpu.bandwidth_bytes_per_s:
        raise InputError(f"{gpu.name} has no known speed, only memory; name a GPU with --gpu to get times")
    memory = _memory_class(gpu)
    pinned = _PINNED_SHARE * gpu.host_link.bytes_per_s
    lanes = _LANES_PER_CLOCK / 2 if gpu.vendor == "amd" or gpu.compute_capability == "6.0" else _LANES_PER_CLOCK
    return Efficiency(
        gpu=gpu,
        matmul_flops_per_s=tuple((key, _attainable(gpu, key)) for key in ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")),
        attention=tuple(_attention_curves(gpu).items()),
        attention_hz=_attention_hz(gpu),
        stream_bytes_per_s=gpu.bandwidth_bytes_per_s * _STREAM_SHARE[memory],
        l2_bytes_per_s=gpu.num_sms * gpu.boost_hz * _L2_BYTES_PER_CLOCK[memory],
        decode_instructions_per_s=gpu.num_sms * lanes * _ISSUE_SHARE * gpu.boost_hz,
        pinned_bytes_per_s=pinned,
        pageable_bytes_per_s=1.0 / (1.0 / pinned + 1.0 / _STAGING_BYTES_PER_S),
    )


def _attainable(gpu: Gpu, key: str) -> float:
    """FLOP/s of a large product in a format: the datasheet's less feeding, and what the power limit leaves."""
    dense = gpu.dense_flops_per_s(key)
    if not gpu.supports(key) and dense == gpu.dense_flops_per_s("fp32"):
        return dense * _SIMT_SHARE.get(_simt_flops_per_clock(gpu), 0.8) * (_WIDENED_SHARE / 0.88 if key == "bf16" else 1.0)
    if key == "fp32" and gpu.vendor != "amd":
        return dense * _SIMT_SHARE.get(_simt_flops_per_clock(gpu), 0.8)
    ops = dense / (gpu.num_sms * gpu.tensor_hz)
    fed = dense * (1.0 - _FEED_LOSS_PER_DOUBLING * max(0.0, _log2(ops / _FULL_FEED_OPS)))
    return min(fed, _powered(gpu, ops))


def _powered(gpu: Gpu, ops_per_clock: float) -> float:
    """FLOP/s at the clock the board's power sustains, for units of this rate."""
    hz = _sustained_hz(gpu, ops_per_clock)
    return gpu.num_sms * ops_per_clock * hz


def _sustained_hz(gpu: Gpu, ops_per_clock: float) -> float:
    full = _chip_ops(gpu)
    watts = _WATTS_PER_SM_AT_1_GHZ.get((gpu.architecture, full))
    if watts is None:
        return float("inf")
    rated = _matmul_ops(gpu, "fp16")
    watts *= rated / full * (ops_per_clock / rated) ** _WATTS_BY_RATE
    return (gpu.tdp_w / (gpu.num_sms * watts)) ** 0.5 * 1e9


def _chip_ops(gpu: Gpu) -> int:
    """16-bit FLOP/clock/SM that the chip's units could do, also where the product is rated at half or a quarter of it."""
    rates = dict(gpu.dense_flops)
    rate = rates.get("fp16_fp16acc", rates.get("fp16", 0.0)) / (gpu.num_sms * gpu.tensor_hz)
    if gpu.architecture == "hopper":
        return 4096
    floor = 1024 if gpu.architecture in ("ampere", "ada") else 128
    return max(floor, 1 << round(_log2(rate)))


def _matmul_ops(gpu: Gpu, dtype: DType | str) -> float:
    """Matrix FLOP/clock/SM in a format."""
    return gpu.dense_flops_per_s(_matmul_key(dtype)) / (gpu.num_sms * gpu.tensor_hz)


def _simt_flops_per_clock(gpu: Gpu) -> int:
    return 128 if gpu.dense_flops_per_s("fp32") < gpu.num_sms * gpu.boost_hz * 192 else 256


def _attention_hz(gpu: Gpu) -> float:
    """The clock under attention: the matrix units are busy about three quarters of the time, which power feels."""
    ops = _matmul_ops(gpu, "fp16")
    clock = gpu.tensor_hz if gpu.tensor_hz == gpu.boost_hz else (gpu.tensor_hz + gpu.boost_hz) / 2
    return min(clock, _sustained_hz(gpu, ops) / 0.75**0.5)


def _attention_curves(gpu: Gpu) -> dict[str, AttentionCurve]:
    hopper = gpu.architecture in ("hopper", "blackwell") and gpu.compute_capability in ("9.0", "10.0", "10.3")
    flash2 = _FLASH2_HOPPER if hopper else _FLASH2
    curves = {"flash": flash2, "flash2": flash2, "efficient": _EFFICIENT, "cudnn": _CUDNN_HOPPER if hopper else flash2}
    curves["flash3"] = curves["flash4"] = _FLASH3 if hopper else flash2
    return curves


def _memory_class(gpu: Gpu) -> str:
    if gpu.vendor == "amd":
        return "amd"
    return "hbm" if gpu.compute_capability in ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3") else "gddr"


# ---- shapes ----------------------------------------------------------------------------------------------------------------


def _tiled_s(m: Sizes, n: Sizes, k: Sizes, batch: Sizes, rate: float, e: Efficiency, feed_cost: float) -> Seconds:
    """Seconds of the best tiling: whole waves of tiles over the SMs, k split among idle SMs; `rate` is FLOP/s of one SM."""
    sms = e.gpu.num_sms
    best: Seconds = None
    for rows, columns in TILES:
        feed = (1.0 + feed_cost * (1.0 / rows + 1.0 / columns)) / (1.0 + feed_cost * _LARGEST_FEED)
        tiles = _larger(batch * -(-m // rows) * -(-n // columns), 1)
        split = _smaller(_larger(sms // tiles, 1), _larger(k // _MIN_K_PER_SPLIT, 1))
        waves = -(-tiles * split // sms)
        one = 2.0 * rows * columns * k / rate * feed
        time = waves * (one / split + e.wave_start_s) + (split > 1) * e.split_s
        best = time if best is None else _smaller(best, time)
    return best


def _feed_cost(e: Efficiency, dtype: DType | str) -> float:
    """How much small tiles cost: the matrix units' appetite against the bandwidth of shared memory, 1 at Hopper's bf16."""
    return e.feed_cost * min(1.0, _matmul_ops(e.gpu, dtype) / 2048.0)


def _unaligned_rate(e: Efficiency) -> float:
    wgmma = e.gpu.compute_capability in ("9.0", "10.0", "10.3")
    return e.unaligned_share * (_NO_TMA_SHARE if wgmma else 1.0)


def _mean_keys(s_q: Sizes, s_kv: Sizes, causal: bool, window: Sizes | None) -> Sizes:
    """Keys that the tiles of queries visit on average, masked ones in partly masked tiles included."""
    if window is None:
        if not causal:
            return s_kv * 1.0
        return s_kv - s_q / 2.0 + _ATTENTION_TILE / 2.0
    seen = _smaller(window, s_kv)
    if not causal:
        return _smaller(2.0 * seen, s_kv)
    # Query i of s sees min(i, w) keys: s·w - w²/2 in all where the sequence is square.
    return seen - seen * seen / (2.0 * s_kv) + _ATTENTION_TILE / 2.0


def _wave_share(tiles: Sizes, sms: int) -> Sizes:
    """Busy share of the SMs: half of a whole-wave loss, since tiles differ in length and SMs hold two."""
    waves = tiles / sms
    whole = -(-tiles // sms)
    return waves / (0.5 * (waves + whole)) * 1.0


def _math_attention_s(b: Sizes, heads: Sizes, s_q: Sizes, s_kv: Sizes, head_dim: Sizes, causal: bool, dtype: DType | str, backward: bool, e: Efficiency) -> Seconds:
    """Scores as a tensor: batched products, and passes over b·heads·s_q·s_kv elements for mask, softmax and their gradients."""
    batch = b * heads
    scores = gemm_s(s_q, s_kv, head_dim, dtype, e, batch=batch)
    values = gemm_s(s_q, head_dim, s_kv, dtype, e, batch=batch)
    kernels = (4 if causal else 2) if not backward else 5
    passes = elementwise_s(kernels * _element_bytes(dtype) * batch * s_q * s_kv, e, launches=kernels // 2)
    return (2 if backward else 1) * (scores + values) + passes


# ---- small things ----------------------------------------------------------------------------------------------------------


def _efficiency(gpu: Gpu | Efficiency) -> Efficiency:
    return gpu if isinstance(gpu, Efficiency) else default_efficiency(gpu)


def _attention_curve(e: Efficiency, kind: str) -> AttentionCurve:
    for known, curve in e.attention:
        if known == kind:
            return curve
    raise InputError(f"attention kernel {kind!r} is unknown; use one of {', '.join(name for name, _ in e.attention)}, math")


def _matmul_key(dtype: DType | str) -> str:
    key = str(dtype)
    return "fp8" if key.startswith("fp8") else "fp16" if key == "float16" else key


def _element_bytes(dtype: DType | str) -> int:
    key = str(dtype)
    return 4 if "32" in key else 8 if "64" in key else 1 if key.startswith("fp8") or key == "int8" else 2


def _log2(value: float) -> float:
    import math

    return math.log2(value)


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a if a >= b else b
    import numpy

    return numpy.maximum(a, b)


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a if a <= b else b
    import numpy

    return numpy.minimum(a, b)
