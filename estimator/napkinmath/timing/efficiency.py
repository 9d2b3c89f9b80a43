"""Seconds of the physical kinds of work on a GPU, for sizes as numbers or numpy arrays (which
broadcast).

Matrix products are cut into tiles that fill the SMs in waves, after a fixed start. Attention adds
work per score that does not overlap. Everything else moves bytes, after the start of a kernel.
4-bit decoding is bound by instructions. Each function takes a `Gpu`, whose rates
`napkinmath.timing.attainable` derives from the datasheet, or an `Efficiency` in which a calibration
has replaced some.
"""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.config.hardware import Gpu
from napkinmath.timing import attainable
from napkinmath.timing.attainable import AttentionCurve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Sizes: TypeAlias = Any  # an int, a float, or a numpy array of them
    Seconds: TypeAlias = Any  # a float, or a numpy array where a size was one

# Tiles a library has for any product: (rows, columns), largest first.
TILES = ((128, 256), (128, 128), (64, 64))
_LARGEST_FEED = 1 / 128 + 1 / 256
# Start of a product launched by itself, of a wave, of a split sum, and the cost of small tiles. The
# start is that of 141 products of 0.03 to 550 GFLOP on H100 (openxla/xla
# matmul_interpolator_data.h: median error 6%), the rest fits the bf16 products of 512 and more of
# seven GPUs (ai-dynamo/aiconfigurator; benchmarks/accuracy/op_tables.py prints them, each GPU left
# out too).
_GEMM_START_S = 4.5e-6
_WAVE_START_S = 0.8e-6
_SPLIT_S = 2.5e-6
_FEED_COST = 12.5
# Warp-group kernels are persistent and hide a tile's end behind the next one's start, and the
# library picks tiles that fill the SMs: of the part of the last wave that is empty they lose this
# share (same fit).
_TAIL_SHARE = 0.14
# What a product reads before its first tile and writes after its last is not hidden: this share of
# the shorter of arithmetic and traffic adds to the longer (same fit).
_EXPOSED_SHARE = 0.12
_MIN_K_PER_SPLIT = 1024
# Rows that do not start on 16 bytes also lose Hopper's and data-centre Blackwell's kernels on the
# tensor memory accelerator (`mma.sync` instead).
_NO_TMA_SHARE = 0.68
# Batched products with such rows leave the matrix units, and reach this share of the fp32 lanes:
# heads of 108 instead of 216 cost GPT-182B 38 and 40 s of an iteration for 3.9e14 FLOP on an A100,
# 9 TFLOP/s (bigscience train/tr11-176B-ml/chronicles-prequel.md, NHEADS 128 against 64 at NHIDDEN
# 13824, tensor 8 and 4; CUDA 11). Not seen on Hopper and later, and not taken there.
_UNALIGNED_BATCH_SHARE = 0.46
# torch's pointwise kernels that cast, broadcast or walk strides leave the vectorized path, and
# column sums run below it; together with the reductions of a norm they reach about this much of a
# plain copy (Liger-Kernel benchmark csv, RMSNorm of transformers on A100:
# 6.9 ms for the ~9 GB that its eager forward and backward move at hidden size 32768).
_EAGER_SHARE = 0.8
# Time of a streaming kernel is a + V / b: a = 2.5-2.7 us launched one by one, 1.3 us from a graph
# (te42kyfo/gpu-benches gpu-small-kernels, A100 and H200).
_KERNEL_START_S = 2.5e-6
# Of a kernel's traffic the reads can hit what the kernel before left in L2, the writes drain to
# memory.
_L2_HIT_SHARE = 0.5
# Instructions per value of the decoding kernels, counted in their sm_90 code: bitsandbytes 0.50
# with its lookup table 26.5 and a gather from a table in registers 8.8; the select tree before
# bitsandbytes PR 1746 took 1.36-2.07x as long. int4 and int8: shift, mask, convert, scale, on
# packed pairs. fp8 is ours (benchmarks/results/compile_gate.csv).
INSTRUCTIONS_PER_VALUE = {
    "nf4": 26.5,
    "fp4": 26.5,
    "nf4-tree": 42.4,
    "nf4-gather": 8.8,
    "int4": 12.0,
    "int8": 8.0,
    "fp8": 11.8,
}
_HOST_COPY_START_S = 10e-6
# torch's own operations unpack GPTQ words (AutoGPTQ 0.4 qlinear_cuda_old.py forward): shift to
# int32 (0.5 read, 4 written), to int8 (4, 1), mask (1, 1), subtract the zero points (1, 1), scale
# into 16 bits (1, 2). Qwen-7B's GPTQ steps of 256 tokens are 225 ms longer than its LoRA steps
# (QwenLM/Qwen README), these bytes take 219 ms on an A100; Qwen-1.8B 50 and 41 ms.
_OPERATION_BYTES_PER_VALUE = 16.5
UNPACKING_OPERATIONS = 10  # five on the weights, five on their zero points
# The host's side of eager mode: so much for each kernel that the model's Python issues, in the
# forward and where a checkpoint runs it again, and for each that autograd's engine issues; besides,
# in such kernels, a layer's modules (costs.LAYER_DISPATCHES) and its checkpoint.
# The shape is measured on one machine, the H200's virtual one (costs.py;
# benchmarks/results/h200/hostpace.jsonl and the campaign's steps); its host takes 1.6 times as long as
# these rules say. The level is of hosts of 2021 to 2023: steps too short for the GPU, all with
# recomputation, in ms a layer and micro-step: 4.7 and 5.2 (Qwen-7B and 1.8B with LoRA, QwenLM/Qwen
# README, 84 kernels forward, 134 backward), 3.4 to 3.9 (bert-large in fp16, transformers
# perf_train_gpu_one, 37 and 70), 3.3 (Megatron's layers of 1,024, VIA-Research/vTrain ground truth, 20
# and 41). These rules say 5.5, 3.6 and 3.4.
# A fast core needs half or less: without a device a Llama layer of transformers 5.23 takes 200 us
# forward, 250 us backward and 280 us for a checkpoint (torch 2.13, one EPYC core).
_DISPATCH_FORWARD_S = 12e-6
_DISPATCH_BACKWARD_S = 12e-6
# The optimizer's loop over parameters is Python too, without modules: transformers' AdamW and
# Adafactor on bert-large's 391 tensors leave
# 55 to 110 ms of a step that the device's work does not fill (perf_train_gpu_one, rows in fp32 and
# fp16).
_UPDATE_SHARE = 1.25


class Efficiency(Record):
    """What one GPU attains: rates in FLOP/s or bytes/s, starts in seconds, shares of another
    rate."""

    gpu: Gpu
    matmul_flops_per_s: tuple[tuple[str, float], ...]
    clock_headroom: tuple[tuple[str, float], ...]
    attention: tuple[tuple[str, AttentionCurve], ...]
    attention_hz: float
    stream_bytes_per_s: float
    l2_bytes_per_s: float
    decode_instructions_per_s: float
    pinned_bytes_per_s: float
    pageable_bytes_per_s: float
    unaligned_share: float
    gemm_start_s: float = _GEMM_START_S
    wave_start_s: float = _WAVE_START_S
    split_s: float = _SPLIT_S
    feed_cost: float = _FEED_COST
    eager_share: float = _EAGER_SHARE
    kernel_start_s: float = _KERNEL_START_S
    host_copy_start_s: float = _HOST_COPY_START_S
    dispatch_forward_s: float = _DISPATCH_FORWARD_S
    dispatch_backward_s: float = _DISPATCH_BACKWARD_S
    bookkeeping_share: float = 1.0  # of a checkpoint's and a hook's kernels, as measured

    def matmul_rate(self, dtype: DType | str) -> float:
        """FLOP/s of a product so large that nothing but feeding, power and lanes limits it."""
        key = matmul_key(dtype)
        for known, rate in self.matmul_flops_per_s:
            if known == key:
                return rate
        return attainable.matmul_flops_per_s(self.gpu, key)

    def headroom(self, dtype: DType | str) -> float:
        """How much faster than its sustained rate a GPU multiplies while its clock is at its
        rating."""
        return dict(self.clock_headroom).get(matmul_key(dtype), 1.0)

    def attention_curve(self, kind: str) -> AttentionCurve:
        """The curve of an attention kernel; InputError names the known ones."""
        for known, curve in self.attention:
            if known == kind:
                return curve
        raise InputError(
            f"attention kernel {kind!r} is unknown; use one of"
            f" {', '.join(name for name, _ in self.attention)}, math"
        )


_defaults: dict[str, Efficiency] = {}


def default_efficiency(gpu: Gpu) -> Efficiency:
    """The efficiency that a GPU's datasheet implies; InputError where it has no rates (bare
    `--vram`)."""
    found = _defaults.get(gpu.name)
    if found is None or found.gpu is not gpu:
        if not gpu.dense_flops or not gpu.bandwidth_bytes_per_s:
            raise InputError(
                f"{gpu.name} has no known speed, only memory; name a GPU with --gpu to get times"
            )
        found = _defaults[gpu.name] = _by_datasheet(gpu)
    return found


def _by_datasheet(gpu: Gpu) -> Efficiency:
    four = ("fp4",) if gpu.supports("fp4") else ()
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", *four)
    rates = tuple((k, attainable.matmul_flops_per_s(gpu, k)) for k in formats)
    return Efficiency(
        gpu=gpu,
        matmul_flops_per_s=rates,
        clock_headroom=tuple((k, attainable.fed_flops_per_s(gpu, k) / rate) for k, rate in rates),
        attention=tuple(attainable.attention_curves(gpu).items()),
        attention_hz=attainable.attention_hz(gpu),
        stream_bytes_per_s=attainable.stream_bytes_per_s(gpu),
        l2_bytes_per_s=attainable.l2_bytes_per_s(gpu),
        decode_instructions_per_s=attainable.instructions_per_s(gpu),
        pinned_bytes_per_s=attainable.pinned_bytes_per_s(gpu),
        pageable_bytes_per_s=attainable.pageable_bytes_per_s(gpu),
        unaligned_share=attainable.unaligned_share(gpu),
    )


def gemm_s(
    m: Sizes,
    n: Sizes,
    k: Sizes,
    dtype: DType | str,
    gpu: Gpu | Efficiency,
    *,
    batch: Sizes = 1,
    aligned: Sizes | None = None,
    result_bits: int = 0,
    routed: str = "",
) -> Seconds:
    """Seconds of `batch` products (m x k)·(k x n).

    `aligned` says whether every row that is loaded starts on 16 bytes; left out, it is read off k.
    `result_bits` move for each element of the result; 0 writes it in `dtype`.
    `routed`: experts in one kernel, m the mean of their "rows", or k where those are summed for
    their "weights".
    """
    e = efficiency_of(gpu)
    element_bytes = bytes_of(dtype)
    compute = _tiled_s(m, n, k, batch, e, dtype, uneven=routed == "rows")
    compute = compute * _misalignment(k, element_bytes, aligned, e)
    if routed:
        compute = compute / attainable.experts_share(e.gpu, matmul_key(dtype))
    if element_bytes == 2 and aligned is None and not attainable.has_wgmma(e.gpu):
        unaligned = (batch > 1) * (1.0 - 1.0 * _on_16_bytes(n, k, element_bytes))
        compute = larger(compute, _on_lanes_s(m, n, k, batch, e) * unaligned)
    moved = batch * (element_bytes * (m * k + k * n) + (result_bits / 8 or element_bytes) * m * n)
    traffic = moved / e.stream_bytes_per_s
    exposed = _EXPOSED_SHARE * smaller(compute, traffic)
    return e.gemm_start_s + larger(compute, traffic) + exposed


def _on_lanes_s(m: Sizes, n: Sizes, k: Sizes, batch: Sizes, e: Efficiency) -> Seconds:
    """Seconds of products that leave the matrix units for the fp32 lanes."""
    return 2.0 * batch * m * n * k / (_UNALIGNED_BATCH_SHARE * e.gpu.dense_flops_per_s("fp32"))


def elementwise_s(
    bytes_moved: Sizes, gpu: Gpu | Efficiency, *, launches: Sizes = 1, fused: bool = False
) -> Seconds:
    """Seconds of kernels that read and write `bytes_moved` bytes in all: casts, additions, norms,
    softmax, optimizer steps.

    `launches` kernels share the bytes. `fused` says they were written to stream (copies, foreach
    and fused optimizers, Liger, compiled code), not torch's general pointwise kernels.
    """
    e = efficiency_of(gpu)
    stream = e.stream_bytes_per_s * (1.0 if fused else e.eager_share)
    fits = larger(1.0 - bytes_moved / larger(launches, 1) / e.gpu.l2_bytes, 0.0)
    hit = _L2_HIT_SHARE * fits
    return launches * e.kernel_start_s + bytes_moved * (
        hit / e.l2_bytes_per_s + (1.0 - hit) / stream
    )


def dequantize_s(
    kind: str,
    elements: Sizes,
    gpu: Gpu | Efficiency,
    *,
    packed_bits: float = 4.127,
    output_bytes: int = 2,
    nested: bool = True,
) -> Seconds:
    """Seconds of expanding `elements` quantized weights: the slower of moving them and of the
    instructions per value.

    `nested` constants take two small kernels before (bitsandbytes 0.50, MatMul4Bit: dequantize
    absmax, add the offset).
    """
    e = efficiency_of(gpu)
    if kind == "int4-ops":
        return UNPACKING_OPERATIONS * e.kernel_start_s + elements * _OPERATION_BYTES_PER_VALUE / (
            e.stream_bytes_per_s * e.eager_share
        )
    instructions = INSTRUCTIONS_PER_VALUE.get(kind, INSTRUCTIONS_PER_VALUE["int4"])
    decode = elements * instructions / e.decode_instructions_per_s
    move = elements * (packed_bits / 8 + output_bytes) / e.stream_bytes_per_s
    return (3 if nested else 1) * e.kernel_start_s + larger(decode, move)


def dequantize_nf4_s(elements: Sizes, gpu: Gpu | Efficiency) -> Seconds:
    """Seconds of bitsandbytes' NF4 decoding into 16 bits, double quantization included."""
    return dequantize_s("nf4", elements, gpu)


def host_copy_s(bytes_moved: Sizes, pinned: bool, gpu: Gpu | Efficiency) -> Seconds:
    """Seconds of one copy between host and device, either direction."""
    e = efficiency_of(gpu)
    return e.host_copy_start_s + bytes_moved / (
        e.pinned_bytes_per_s if pinned else e.pageable_bytes_per_s
    )


def dispatch_s(
    kernels: Sizes, backward: bool, gpu: Gpu | Efficiency, *, update: bool = False
) -> Seconds:
    """Seconds the host needs to issue kernels one by one in eager mode; the device waits where this
    is the longer time."""
    e = efficiency_of(gpu)
    if update:
        return kernels * e.dispatch_forward_s * _UPDATE_SHARE
    return kernels * (e.dispatch_backward_s if backward else e.dispatch_forward_s)


def at_pace(speed: Efficiency, issue: tuple[float, float]) -> Efficiency:
    """The speeds where the host takes so many times as long for a kernel, forward and backward."""
    if issue == (1.0, 1.0):
        return speed
    return speed.replace(
        dispatch_forward_s=speed.dispatch_forward_s * issue[0],
        dispatch_backward_s=speed.dispatch_backward_s * issue[1],
    )


def matmul_key(dtype: DType | str) -> str:
    """The datasheet's name of a format: fp8_e4m3 and fp8_e5m2 are fp8."""
    key = str(dtype)
    return "fp8" if key.startswith("fp8") else key


def _tiled_s(
    m: Sizes,
    n: Sizes,
    k: Sizes,
    batch: Sizes,
    e: Efficiency,
    dtype: DType | str,
    *,
    uneven: bool = False,
) -> Seconds:
    """Seconds of the best tiling, waves of tiles over the SMs at their clock's rating with k split
    among idle SMs; at least what the arithmetic takes at the clock that the power sustains.
    `uneven` rows leave half a tile of each product empty on average, which is computed as well."""
    sms = e.gpu.num_sms
    sustained = e.matmul_rate(dtype)
    rate = sustained * e.headroom(dtype) / sms
    tail = _TAIL_SHARE if attainable.has_wgmma(e.gpu) else 1.0
    # Small tiles load more per FLOP; how much that costs depends on the appetite of the matrix
    # units.
    feed_cost = e.feed_cost * min(1.0, attainable.matmul_ops(e.gpu, matmul_key(dtype)) / 2048.0)
    best: Seconds = None
    for rows, columns in TILES:
        feed = (1.0 + feed_cost * (1.0 / rows + 1.0 / columns)) / (1.0 + feed_cost * _LARGEST_FEED)
        down = larger(m / rows + 0.5, 1.0) if uneven else -(-m // rows)
        tiles = larger(batch * down * -(-n // columns), 1)
        split = smaller(larger(sms // tiles, 1), larger(k // _MIN_K_PER_SPLIT, 1))
        full = tiles * split / sms
        waves = larger(full + (-(-tiles * split // sms) - full) * tail, 1)
        one = 2.0 * rows * columns * k / rate * feed
        time = waves * (one / split + e.wave_start_s) + (split > 1) * e.split_s
        best = time if best is None else smaller(best, time)
    computed = m + TILES[1][0] / 2 if uneven else m
    return larger(best, 2.0 * batch * computed * n * k / sustained)


def _misalignment(k: Sizes, element_bytes: float, aligned: Sizes | None, e: Efficiency) -> Sizes:
    """Factor on the time of a product that loads rows which do not start on 16 bytes."""
    known: Sizes = _on_16_bytes(k, k, element_bytes) if aligned is None else aligned
    share = e.unaligned_share * (_NO_TMA_SHARE if attainable.has_wgmma(e.gpu) else 1.0)
    return 1.0 + (1.0 - 1.0 * known) * (1.0 / share - 1.0)


def rows_aligned(m: Sizes, n: Sizes, dtype: DType | str) -> Sizes:
    """Whether rows of m and of n elements of a format start on 16 bytes."""
    return _on_16_bytes(m, n, bytes_of(dtype))


def _on_16_bytes(n: Sizes, k: Sizes, element_bytes: float) -> Sizes:
    """Whether rows of both lengths start on 16 bytes."""
    multiple = max(1, int(16 / element_bytes))
    return (n % multiple == 0) & (k % multiple == 0)


def efficiency_of(gpu: Gpu | Efficiency) -> Efficiency:
    """What a GPU attains, by its datasheet unless its efficiency is given."""
    return gpu if isinstance(gpu, Efficiency) else default_efficiency(gpu)


def bytes_of(dtype: DType | str) -> float:
    """Bytes of one element of a format."""
    key = str(dtype)
    if key == "fp4":
        return 0.5
    if "32" in key:
        return 4
    if "64" in key:
        return 8
    return 1 if key.startswith("fp8") or key == "int8" else 2


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair in arrays of them."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a if a >= b else b
    import numpy

    return numpy.maximum(a, b)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of each pair in arrays of them."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a if a <= b else b
    import numpy

    return numpy.minimum(a, b)
