"""WeightFormat: how a quantized weight is stored: packed values and the constants of its groups."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.dtypes import FP32, INT8, INT32, UINT8, DType
from napkinmath.base.expr import Size, ceil_div, product
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Role, Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class Grouping(str, Enum):
    """Which elements share a scale."""

    FLAT = "flat"
    """`group_size` neighbours of the flattened tensor."""
    INPUT = "input"
    """`group_size` inputs of one output: every row begins a group."""
    ROW = "row"
    """A whole row."""
    SQUARE = "square"
    """`group_size` outputs by as many inputs."""


class WeightFormat(Record):
    """A quantized storage format: packed bits, scales for each group, and how a product unpacks
    it."""

    name: str
    meaning: str
    source: str
    bits: int
    group_size: int
    grouping: Grouping = Grouping.FLAT
    words: str = ""
    """'inputs' or 'outputs': values packed into int32 words along that axis, zero points along the
    outputs; '' packs bytes."""
    byte_dtype: DType = INT8
    """Type of values of 8 bits."""
    scale_dtype: DType = FP32
    zero_point_bits: int = 0
    """Bits of the zero point of each group, 0 where the format is symmetric."""
    table_elements: int = 0
    """Entries of a code table stored with every tensor."""
    table_dtype: DType = FP32
    tensor_scales: int = 0
    """fp32 scales of the whole tensor."""
    group_index: bool = False
    """An int32 for each input says which group it belongs to."""
    double_quant: bool = False
    """Scales themselves quantized to 8 bits in blocks of 256 with an fp32 scale each, a 256-entry
    table and one offset a tensor."""
    dequantize_kernel: str = "nf4"
    unpacks_whole: bool = True
    """A full-size copy of the weight exists while it is multiplied (false: the kernel unpacks
    tiles)."""
    multiplies_integers: bool = False
    """The forward quantizes the activations and multiplies int8 by int8 (LLM.int8())."""
    multiplies_fp8: bool = False
    """The forward casts the activations and multiplies in FP8; the backward unpacks by torch's
    operations (transformers' FP8Linear). PEFT wraps it as a plain linear."""
    multiplied_in: str = ""
    """Engines bring the inputs into this format too and multiply in it, where the GPU can; '' unpacks
    the weights to 16 bits."""
    by_marlin: bool = False
    """Experts run in Marlin's kernel, which unpacks the weights in registers."""
    by_blocks: bool = False
    """Products in FP8 scale the sums of every block of inputs as they go."""
    packs_experts: bool = False
    """Experts held as 3-D parameters are packed too (bitsandbytes by itself packs nn.Linear)."""
    pads: tuple[int, int] = (1, 1)
    """Experts in an engine are stored at multiples of so many hidden numbers, and of so many of a
    rank's own width."""
    packs_linears: bool = True
    """Of a model in an engine linears are packed, not experts alone."""
    widened_rest: bool = True
    """k-bit preparation makes what is left unquantized fp32 (peft utils/other.py
    prepare_model_for_kbit_training leaves GPTQ and HQQ models alone)."""
    output_is_cloned: bool = False
    """PEFT copies the output of the product before it adds an adapter's (4-bit layers of
    bitsandbytes)."""
    saves_input: bool = False
    """The product's node saves its input, though a frozen weight's backward does not read it."""
    of_bitsandbytes: bool = False
    """transformers packs the weights by bitsandbytes, module by module."""
    takes_adapters: bool = True
    """transformers' Trainer trains adapters over such weights (is_trainable of their quantizer)."""
    fused_by: tuple[str, ...] = ()
    """Sets of kernels whose fused adapter operations decode it."""

    def pack(
        self, name: str, axes: tuple[Size, ...], path: str
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The packed tensor of a weight (..., outputs, inputs), and its constants."""
        packed = Tensor(name, *self._packed(axes), Role.WEIGHTS, path, self.source)
        return packed, tuple(
            Tensor(label, size, dtype, Role.QUANTIZATION, path, self.source)
            for label, size, dtype in self._constants(axes)
        )

    def _packed(self, axes: tuple[Size, ...]) -> tuple[tuple[Size, ...], DType]:
        *stack, outputs, inputs = axes
        if self.words == "inputs":
            return (*stack, ceil_div(inputs * self.bits, 32), outputs), INT32
        if self.words == "outputs":
            return (*stack, inputs, ceil_div(outputs * self.bits, 32)), INT32
        if self.bits == 8:
            return axes, self.byte_dtype
        return (ceil_div(product(axes) * self.bits, 8),), UINT8

    def groups(self, axes: tuple[Size, ...]) -> Size:
        """Groups of a weight: each has a scale."""
        if self.grouping is Grouping.ROW:
            return product(axes[:-1])
        if self.grouping is Grouping.SQUARE:
            sides = (ceil_div(side, self.group_size) for side in axes[-2:])
            return product((*axes[:-2], *sides))
        return (
            product(axes[:-1]) * ceil_div(axes[-1], self.group_size)
            if self.grouping is Grouping.INPUT
            else ceil_div(product(axes), self.group_size)
        )

    def _constants(self, axes: tuple[Size, ...]) -> Iterator[tuple[str, tuple[Size, ...], DType]]:
        groups = self.groups(axes)
        if self.double_quant:
            yield "absmax", (groups,), UINT8
            yield "nested absmax", (ceil_div(groups, 256),), FP32
            yield "nested code", (256,), FP32
            yield "offset", (1,), FP32
        else:
            yield "scales", (groups,), self.scale_dtype
        if self.zero_point_bits:
            yield self._zero_points(axes, groups)
        if self.table_elements:
            yield "code", (self.table_elements,), self.table_dtype
        if self.tensor_scales:
            yield "scale of the tensor", (self.tensor_scales,), FP32
        if self.group_index:
            yield "group of each input", (*axes[:-2], axes[-1]), INT32

    def _zero_points(
        self, axes: tuple[Size, ...], groups: Size
    ) -> tuple[str, tuple[Size, ...], DType]:
        if not self.words:
            return "zero points", (ceil_div(groups * self.zero_point_bits, 8),), UINT8
        return (
            "zero points",
            (
                *axes[:-2],
                ceil_div(axes[-1], self.group_size),
                ceil_div(axes[-2] * self.zero_point_bits, 32),
            ),
            INT32,
        )


def stored_bits_per_element(fmt: WeightFormat, axes: tuple[int, int] = (4096, 4096)) -> float:
    """Bits a parameter of a weight of that shape costs with all its constants: 4.127 for NF4 with
    double quantization."""
    packed, constants = fmt.pack("weight", axes, "")
    stored = sum(t.nbytes for t in (packed, *constants))
    assert isinstance(stored, int)
    return 8 * stored / (axes[0] * axes[1])
