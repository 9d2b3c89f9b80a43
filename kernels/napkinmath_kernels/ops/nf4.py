"""4-bit weights: NF4 and FP4 in blocks that share a scale, bit for bit as bitsandbytes 0.50 stores
them.

Element 2i of the row-major weight is the high half of byte i, element 2i + 1 the low half.
`blocksize` values share an absmax, the last block what is left, and the last byte of an odd number
of values one of them:

    value = code[nibble] * absmax[block]
    absmax[block] = nested_code[byte] * nested_absmax[block // 256] + offset        with nested ("double") quantization

The nested scales are decoded in the same launch as the values. Bytes: 0.5 a value, plus 1/64 and
4/(64 x 256) nested, or 4/64 plain. Dequantizing saves nothing, needs no temporary beyond its
output, 1 FLOP a value, and moves packed + scales + output bytes once. Sources: Dettmers et al. 2023
(arXiv 2305.14314); the layout was read from bitsandbytes' QuantState.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from .. import checks
from ..backend import runs_triton
from ..errors import KernelInputError
from . import eight_bit
from .stored_weight import StoredWeight

Format = Literal["nf4", "fp4"]
FALLBACK = "bitsandbytes.functional.dequantize_4bit"
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK_SIZE = 256
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# : Quantiles of a normal distribution scaled to [-1, 1], as published with QLoRA (arXiv 2305.14314,
# appendix E).
NF4_CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: Sign, two exponent bits, one mantissa bit, in bit order, over the largest (12).
FP4_CODE = tuple(
    x / 12
    for x in (
        0,
        0.0625,
        8.0,
        12.0,
        4.0,
        6.0,
        2.0,
        3.0,
        0,
        -0.0625,
        -8.0,
        -12.0,
        -4.0,
        -6.0,
        -2.0,
        -3.0,
    )
)


Table = TypeVar("Table", torch.Tensor, tuple[torch.Tensor, torch.Tensor])


def _kept(make: Callable[..., Table]) -> Callable[..., Table]:
    """Makes a table once for each format and device; never keeps, nor hands out, a real one inside
    a mode that makes fake tensors."""
    tables: dict[tuple[Any, ...], Table] = {}

    @functools.wraps(make)
    def table(*key: Any) -> Table:
        if type(torch.empty(0)) is not torch.Tensor:
            return make(*key)
        if key not in tables:
            tables[key] = make(*key)
        return tables[key]

    return table


@_kept
def four_bit_code(format: Format, device: torch.device) -> torch.Tensor:
    """The 16 values of a format in nibble order, fp32, on `device`."""
    if format not in ("nf4", "fp4"):
        raise KernelInputError("four_bit_code", f"format {format!r}", "'nf4' or 'fp4'", FALLBACK)
    return torch.tensor(
        NF4_CODE if format == "nf4" else FP4_CODE, dtype=torch.float32, device=device
    )


@_kept
def nested_scale_code(device: torch.device) -> torch.Tensor:
    """The 256 values of the signed dynamic 8-bit format that nested scales use: seven decades,
    finer steps toward 1.

    Decade i of 7 (from 1e-6 to 1) holds 2^i evenly spaced midpoints of each sign; 0 and 1 complete
    it. Dettmers 2016 (arXiv 1511.04561).
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        for sign in (1, -1):
            values += (sign * 10 ** (decade - 6) * middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@_kept
def _decision_bounds(format: Format, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(midpoints between neighbouring values, nibble of the i-th smallest value)."""
    code = four_bit_code(format, device)
    order = torch.argsort(code, stable=True)
    return (code[order[:-1]] + code[order[1:]]) / 2, order.to(torch.int32)


@dataclass(frozen=True, eq=False)
class QuantizedWeight(StoredWeight):
    """A 4-bit weight of `shape`: packed nibbles, scales, and the tables to read them by.

    packed (numel/2, 1) uint8; absmax (numel/blocksize) fp32, or uint8 when nested; code (16) fp32;
    nested_code (256), nested_absmax (numel/blocksize/256, rounded up) and offset () fp32 when
    nested. `dtype` is what the weight was, and what it is decoded to.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int = 64
    nested_code: torch.Tensor | None = None
    nested_absmax: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    nested_blocksize: int = NESTED_BLOCK_SIZE

    def __post_init__(self) -> None:
        op = "QuantizedWeight"
        nested = {
            "nested_code": self.nested_code,
            "nested_absmax": self.nested_absmax,
            "offset": self.offset,
        }
        present = {name: part for name, part in nested.items() if part is not None}
        checks.require_tensors(
            op, FALLBACK, packed=self.packed, absmax=self.absmax, code=self.code, **present
        )
        checks.require(
            all(checks.is_whole(size) for size in self.shape),
            op,
            f"shape {self.shape!r}",
            "sizes",
            FALLBACK,
        )
        numel = math.prod(self.shape)
        if self.blocksize not in BLOCK_SIZES:
            raise KernelInputError(
                op, f"blocksize {self.blocksize}", ", ".join(map(str, BLOCK_SIZES)), FALLBACK
            )
        blocks, num_bytes = -(-numel // self.blocksize), -(-numel // 2)
        if self.packed.dtype is not torch.uint8 or self.packed.numel() != num_bytes:
            given = f"packed of {self.packed.numel()} x {self.packed.dtype} for shape {self.shape}"
            raise KernelInputError(op, given, f"{num_bytes} bytes of uint8", FALLBACK)
        if self.absmax.numel() != blocks:
            raise KernelInputError(
                op, f"{self.absmax.numel()} scales", f"{blocks} (one a block)", FALLBACK
            )
        if self.absmax.dtype is not (torch.uint8 if self.is_nested else torch.float32):
            raise KernelInputError(
                op,
                f"absmax of {self.absmax.dtype}, nested={self.is_nested}",
                "uint8 nested, float32 plain",
                FALLBACK,
            )
        if self.is_nested and len(present) < len(nested):
            raise KernelInputError(
                op, "a part of the nested state", "nested_code, nested_absmax and offset", FALLBACK
            )
        blocksize = self.nested_blocksize
        checks.require(
            checks.is_whole(blocksize) and blocksize > 0,
            op,
            f"nested_blocksize {blocksize!r}",
            "a positive size",
            FALLBACK,
        )
        for name, part, length in (
            ("code", self.code, 16),
            ("nested_code", self.nested_code, 256),
            ("offset", self.offset, 1),
        ):
            fits = part is None or (part.dtype is torch.float32 and part.numel() == length)
            given = "" if part is None else f"{name} of {part.numel()} x {part.dtype}"
            checks.require(fits, op, given, f"{length} x float32", FALLBACK)
        if self.nested_absmax is not None and self.nested_absmax.dtype is not torch.float32:
            raise KernelInputError(
                op, f"nested_absmax of {self.nested_absmax.dtype}", "float32", FALLBACK
            )
        if self.nested_absmax is not None and self.nested_absmax.numel() < math.ceil(
            self.absmax.numel() / self.nested_blocksize
        ):
            needed = math.ceil(self.absmax.numel() / self.nested_blocksize)
            raise KernelInputError(
                op, f"{self.nested_absmax.numel()} nested scales", f"at least {needed}", FALLBACK
            )

    @property
    def is_nested(self) -> bool:
        """True if the scales are quantized too."""
        return (
            self.nested_code is not None
            or self.nested_absmax is not None
            or self.offset is not None
        )

    def tensors(self) -> list[torch.Tensor]:
        """What is stored, in a fixed order: packed, absmax, code, and when nested its code, absmax
        and offset."""
        found = (
            self.packed,
            self.absmax,
            self.code,
            self.nested_code,
            self.nested_absmax,
            self.offset,
        )
        return [tensor for tensor in found if tensor is not None]

    def blocks(self) -> tuple[int, int]:
        """Values that share a scale, and scales that share one."""
        return self.blocksize, self.nested_blocksize

    @staticmethod
    def from_bitsandbytes(packed: torch.Tensor, state: Any) -> QuantizedWeight:
        """Reads a bitsandbytes `Params4bit` (or its data) and `QuantState`, sharing their
        memory."""
        if state is None:
            raise KernelInputError(
                "QuantizedWeight",
                "a weight without quant_state",
                "one moved to its device once",
                "module.to(device)",
            )
        data = (
            packed.detach().view(torch.uint8)
            if packed.dtype is not torch.uint8
            else packed.detach()
        )
        nested = state.state2 if state.nested else None
        return QuantizedWeight(
            packed=data,
            absmax=state.absmax,
            code=state.code,
            shape=tuple(state.shape),
            dtype=state.dtype,
            blocksize=state.blocksize,
            nested_code=None if nested is None else nested.code,
            nested_absmax=None if nested is None else nested.absmax,
            offset=None if nested is None else state.offset,
            nested_blocksize=NESTED_BLOCK_SIZE if nested is None else nested.blocksize,
        )


def _quantize_scales(
    absmax: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bytes, nested code, nested absmax, offset): scales less their mean, in blocks of 256 against
    the dynamic format."""
    code = nested_scale_code(absmax.device)
    offset = absmax.mean()
    centred = absmax - offset
    padded = torch.nn.functional.pad(centred, (0, -centred.numel() % NESTED_BLOCK_SIZE)).view(
        -1, NESTED_BLOCK_SIZE
    )
    nested_absmax = padded.abs().amax(-1)
    scaled = (padded * (1.0 / nested_absmax.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    if (
        scaled.device.type == "cpu"
        # bitsandbytes' CPU path rounds to a table of 65,536 steps before it compares; its CUDA path
        # does not
    ):
        scaled = ((scaled + 1) * 0.5 * 65535 + 0.5).to(torch.int32).float() / 65535 * 2 - 1
    index = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True)
    index = index.masked_fill(nested_absmax[:, None] == 0, 0).reshape(-1)[: centred.numel()]
    return index.to(torch.uint8), code, nested_absmax, offset


def _reference_quantize(
    weight: torch.Tensor, format: Format, blocksize: int
) -> tuple[torch.Tensor, torch.Tensor]:
    bounds, order = _decision_bounds(format, weight.device)
    flat = weight.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % blocksize)).view(-1, blocksize)
    absmax = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    nibble = order[torch.bucketize(scaled, bounds)].reshape(-1, 2)[: -(-flat.numel() // 2)]
    return ((nibble[:, :1] << 4) | nibble[:, 1:]).to(torch.uint8), absmax


@torch.library.custom_op("napkinmath::quantize_4bit", mutates_args=())
def _quantize_op(
    weight: torch.Tensor, format: str, blocksize: int
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.contiguous()
    if not runs_triton("quantize", weight):
        return _reference_quantize(weight, format, blocksize)  # type: ignore[arg-type]
    from ..triton_kernels.nf4 import quantize as run

    bounds, order = _decision_bounds(format, weight.device)  # type: ignore[arg-type]
    packed = torch.empty((-(-weight.numel() // 2), 1), dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(
        (-(-weight.numel() // blocksize),), dtype=torch.float32, device=weight.device
    )
    run(weight, bounds, order, blocksize, packed, absmax)
    return packed, absmax


@_quantize_op.register_fake
def _(weight: torch.Tensor, format: str, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    numel = weight.numel()
    return weight.new_empty(((numel + 1) // 2, 1), dtype=torch.uint8), weight.new_empty(
        (-(-numel // blocksize),), dtype=torch.float32
    )


def quantize(
    weight: torch.Tensor, format: Format = "nf4", *, blocksize: int = 64, nested: bool = True
) -> QuantizedWeight:
    """Quantizes a bf16, fp16 or fp32 weight; the result equals bitsandbytes' `quantize_4bit(...,
    compress_statistics=nested)` on a CPU."""
    checks.require_tensors("quantize", "bitsandbytes.functional.quantize_4bit", weight=weight)
    checks.require_dtype("quantize", "weight", weight, "weight.to(torch.bfloat16)", OUTPUT_DTYPES)
    checks.require(
        weight.dtype is not torch.float64,
        "quantize",
        "weight of dtype float64",
        "bfloat16, float16, float32",
        "weight.float()",
    )
    code = four_bit_code(format, weight.device)
    if blocksize not in BLOCK_SIZES or not weight.numel():
        given = f"{weight.numel()} values in blocks of {blocksize}"
        raise KernelInputError(
            "quantize",
            given,
            f"1 or more in blocks of {BLOCK_SIZES}",
            "bitsandbytes.functional.quantize_4bit",
        )
    packed, absmax = _quantize_op(weight.detach(), format, blocksize)
    shape, dtype = tuple(weight.shape), weight.dtype
    if not nested:
        return QuantizedWeight(packed, absmax, code, shape, dtype, blocksize)
    index, nested_code, nested_absmax, offset = _quantize_scales(absmax)
    return QuantizedWeight(
        packed, index, code, shape, dtype, blocksize, nested_code, nested_absmax, offset
    )


def _decode_scales(tensors: Sequence[torch.Tensor], nested_blocksize: int) -> torch.Tensor:
    absmax = tensors[1]
    if len(tensors) == 3:
        return absmax
    _, index, _, nested_code, nested_absmax, offset = tensors
    scale = nested_absmax.repeat_interleave(nested_blocksize)[: index.numel()]
    return nested_code[index.int()] * scale + offset


def reference_dequantize(
    tensors: Sequence[torch.Tensor], blocksize: int, nested_blocksize: int, out: torch.Tensor
) -> None:
    """`dequantize` in plain torch."""
    packed = tensors[0].reshape(-1)
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(-1)
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.numel() % blocksize)).view(-1, blocksize)
    values = tensors[2][padded.int()] * _decode_scales(tensors, nested_blocksize)[:, None]
    out.copy_(values.view(-1)[: out.numel()].view(out.shape))


def decode_into(
    tensors: Sequence[torch.Tensor], blocksize: int, nested_blocksize: int, out: torch.Tensor
) -> None:
    """Decodes `StoredWeight.tensors()`, each contiguous, into a contiguous `out`; called by other
    ops' implementations, below the dispatcher."""
    if len(tensors) == 2:
        return eight_bit.decode_into(tensors, (blocksize, nested_blocksize), out)
    if not runs_triton("dequantize", out):
        return reference_dequantize(tensors, blocksize, nested_blocksize, out)
    from ..triton_kernels.nf4 import dequantize as run

    packed, absmax, code, *nested = tensors
    run(packed, absmax, code, tuple(nested) if nested else None, blocksize, nested_blocksize, out)  # type: ignore[arg-type]
    return None


@torch.library.custom_op("napkinmath::dequantize_4bit", mutates_args=())
def _dequantize_op(
    tensors: list[torch.Tensor],
    shape: list[int],
    dtype: torch.dtype,
    blocksize: int,
    nested_blocksize: int,
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device=tensors[0].device)
    decode_into([tensor.contiguous() for tensor in tensors], blocksize, nested_blocksize, out)
    return out


@_dequantize_op.register_fake
def _(
    tensors: list[torch.Tensor],
    shape: list[int],
    dtype: torch.dtype,
    blocksize: int,
    nested_blocksize: int,
) -> torch.Tensor:
    return tensors[0].new_empty(shape, dtype=dtype)


@torch.library.custom_op("napkinmath::dequantize_4bit_", mutates_args=("out",))
def _dequantize_into_op(
    tensors: list[torch.Tensor], blocksize: int, nested_blocksize: int, out: torch.Tensor
) -> None:
    decode_into([tensor.contiguous() for tensor in tensors], blocksize, nested_blocksize, out)


def dequantize(
    weight: StoredWeight, *, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight's values in `dtype` (its own by default), in a new tensor or in `out`. Frozen by
    nature: no gradient."""
    if not isinstance(weight, StoredWeight):
        accepted = "a QuantizedWeight or a ScaledWeight"
        raise KernelInputError("dequantize", f"a {type(weight).__name__}", accepted, FALLBACK)
    dtype = dtype or (weight.dtype if out is None else out.dtype)
    if dtype not in OUTPUT_DTYPES:
        raise KernelInputError(
            "dequantize", f"dtype {dtype}", checks.dtype_names(OUTPUT_DTYPES), FALLBACK
        )
    places = {str(tensor.device) for tensor in weight.tensors()} | (
        {str(out.device)} if out is not None else set()
    )
    checks.require(
        len(places) == 1,
        "dequantize",
        f"tensors on {', '.join(sorted(places))}",
        "all on one device",
        FALLBACK,
    )
    if out is None:
        return _dequantize_op(weight.tensors(), list(weight.shape), dtype, *weight.blocks())
    fits = (
        out.dtype is dtype
        and out.is_contiguous()
        and out.numel() == math.prod(weight.shape)
        and not out.requires_grad
    )
    accepted = f"contiguous {dtype} of {tuple(weight.shape)} that requires no gradient"
    checks.require(
        fits,
        "dequantize",
        f"out {tuple(out.shape)} {out.dtype} strides {out.stride()}",
        accepted,
        "out=None",
    )
    _dequantize_into_op(weight.tensors(), *weight.blocks(), out)
    return out.view(weight.shape)
