"""8-bit weights: FP8 (e4m3) or int8 values in rectangles that share an fp32 scale.

    value = stored[i, j] * scale[i // block_rows, j // block_columns]

Blocks of 128 x 128 are those of DeepSeek's checkpoints and of transformers' FP8Linear
(weight_scale_inv); a block of one row is a scale for each output; one block is a scale for the
tensor. Bytes: 1 a value and 4 a block. Decoding saves nothing, needs no temporary beyond its output,
1 FLOP a value, and moves stored + scales + output bytes once. Sources: DeepSeek-AI 2024 (arXiv
2412.19437, section 3.3); OCP 8-bit floating point 1.0 (e4m3: no infinities, 448 the largest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import checks
from ..backend import runs_triton
from ..errors import KernelInputError
from .stored_weight import StoredWeight

Format = Literal["fp8", "int8"]
FALLBACK = "the weight in bf16"
DTYPES: dict[str, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
BLOCK = (128, 128)


@dataclass(frozen=True, eq=False)
class ScaledWeight(StoredWeight):
    """An 8-bit weight (out, in) and its scales (out / block rows, in / block columns, rounded up)
    in fp32. `dtype` is what the weight was, and what it is decoded to."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    block: tuple[int, int] = BLOCK

    def __post_init__(self) -> None:
        op = "ScaledWeight"
        checks.require_tensors(op, FALLBACK, values=self.values, scales=self.scales)
        is_known = self.values.dtype in DTYPES.values() and self.values.dim() == 2
        given = f"values of {self.values.dtype}, shape {tuple(self.values.shape)}"
        checks.require(is_known, op, given, "float8_e4m3fn or int8 (out, in)", FALLBACK)
        fits = len(self.block) == 2 and all(checks.is_whole(n) and n > 0 for n in self.block)
        checks.require(fits, op, f"block {self.block!r}", "two sizes, 1 or more", FALLBACK)
        wanted = tuple(-(-n // size) for n, size in zip(self.values.shape, self.block, strict=True))
        given = f"scales {tuple(self.scales.shape)} of {self.scales.dtype}"
        fits = self.scales.dtype is torch.float32 and tuple(self.scales.shape) == wanted
        checks.require(fits, op, given, f"float32 {wanted}", FALLBACK)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """(out, in)."""
        return tuple(self.values.shape)

    def tensors(self) -> list[torch.Tensor]:
        """Values, then scales."""
        return [self.values, self.scales]

    def blocks(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return self.block

    @staticmethod
    def of_linear(
        weight: torch.Tensor, scales: torch.Tensor, block: Any, dtype: torch.dtype
    ) -> ScaledWeight:
        """transformers' `FP8Linear.weight` and `weight_scale_inv`; `block` None is one scale for
        the tensor."""
        rows, columns = weight.shape if block is None else block
        sizes = (int(rows), int(columns))
        grid = tuple(-(-n // size) for n, size in zip(weight.shape, sizes, strict=True))
        wide = scales.detach().float().reshape(grid)  # a view where they are fp32 already
        return ScaledWeight(weight.detach(), wide, dtype, sizes)


def quantize_8bit(
    weight: torch.Tensor, format: Format = "fp8", *, block: tuple[int, int] | None = None
) -> ScaledWeight:
    """The nearest 8-bit values of a bf16, fp16 or fp32 weight (out, in), each block scaled so that
    its largest is the format's. `block` is 128 x 128 for FP8 and a row for int8 by default."""
    op = "quantize_8bit"
    checks.require_tensors(op, FALLBACK, weight=weight)
    checks.require_dtype(op, "weight", weight, FALLBACK)
    checks.require(format in DTYPES, op, f"format {format!r}", "'fp8' or 'int8'", FALLBACK)
    shape = tuple(weight.shape)
    checks.require(
        len(shape) == 2 and weight.numel() > 0,
        op,
        f"weight of shape {shape}",
        "(out, in)",
        FALLBACK,
    )
    rows, columns = block or (BLOCK if format == "fp8" else (1, shape[1]))
    wide = weight.detach().float()
    pad = (0, -shape[1] % columns, 0, -shape[0] % rows)
    tiles = torch.nn.functional.pad(wide, pad).view(
        (shape[0] + pad[3]) // rows, rows, (shape[1] + pad[1]) // columns, columns
    )
    scales = tiles.abs().amax((1, 3)) / LARGEST[format]
    # a block of zeros: any scale will do, and 0 would divide by it
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    scaled = (tiles / divisors[:, None, :, None]).reshape(shape[0] + pad[3], shape[1] + pad[1])[
        : shape[0], : shape[1]
    ]
    if format == "int8":
        scaled = scaled.round()
    largest = LARGEST[format]
    values = scaled.clamp(-largest, largest).to(DTYPES[format]).contiguous()
    return ScaledWeight(values, scales, weight.dtype, (rows, columns))


def _reference(
    tensors: Sequence[torch.Tensor],
    block: tuple[int, int],
    out: torch.Tensor,
    index: torch.Tensor | None = None,
) -> None:
    values, scales = tensors
    rows = torch.arange(values.shape[0], device=values.device) if index is None else index
    if index is not None:  # torch gathers no FP8
        values = values.view(torch.int8)[index].view(values.dtype)
    rows = rows // block[0]
    columns = torch.arange(values.shape[1], device=values.device) // block[1]
    wide = values.float()
    if scales.shape[1] == 1:
        wide *= scales[rows]
    else:
        wide *= scales[rows][:, columns]
    out.copy_(wide.view(out.shape))


def decode_into(tensors: Sequence[torch.Tensor], block: tuple[int, int], out: torch.Tensor) -> None:
    """Decodes values and scales, each contiguous, into a contiguous `out`; below the dispatcher."""
    if not runs_triton("dequantize", out):
        return _reference(tensors, block, out)
    from ..triton_kernels.eight_bit import dequantize as run

    return run(tensors[0], tensors[1], block, out)


@torch.library.custom_op("napkinmath::look_up_8bit", mutates_args=())
def _look_up_op(
    values: torch.Tensor,
    scales: torch.Tensor,
    block_rows: int,
    block_columns: int,
    ids: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty((*ids.shape, values.shape[1]), dtype=dtype, device=values.device)
    tensors, block = (values.contiguous(), scales.contiguous()), (block_rows, block_columns)
    index = ids.reshape(-1).long()
    if not runs_triton("look_up_8bit", out):
        _reference(tensors, block, out, index)
        return out
    from ..triton_kernels.eight_bit import dequantize as run

    run(*tensors, block, out, index)
    return out


@_look_up_op.register_fake
def _(
    values: torch.Tensor, scales: Any, block_rows: int, block_columns: int, ids: Any, dtype: Any
) -> torch.Tensor:
    return values.new_empty((*ids.shape, values.shape[1]), dtype=dtype)


def look_up_8bit(table: ScaledWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a frozen 8-bit table (ids (...) -> (..., in)) in its `dtype`, decoded as they are
    gathered; on a GPU a row outside the table is NaN."""
    op, fallback = "look_up_8bit", "torch.nn.functional.embedding"
    if not isinstance(table, ScaledWeight):
        raise KernelInputError(op, f"a {type(table).__name__}", "a ScaledWeight", fallback)
    checks.require_tensors(op, fallback, ids=ids)
    given = f"ids of {ids.dtype} on {ids.device}"
    fits = ids.dtype in (torch.int64, torch.int32) and ids.device == table.values.device
    checks.require(fits, op, given, f"int64 or int32 on {table.values.device}", fallback)
    return _look_up_op(table.values, table.scales, *table.block, ids, table.dtype)
