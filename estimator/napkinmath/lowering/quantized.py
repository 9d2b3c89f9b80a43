"""Linears over packed weights: what is stored, and what each forward and backward unpacks.

The formats are rows of catalog/quantization.py; this file is how any of them is multiplied.
"""

from __future__ import annotations

from napkinmath.costs import Dequantize, Gemm, Move, traffic
from napkinmath.dtypes import FP16, FP32, UINT8, DType
from napkinmath.expr import Size, ceil_div, product
from napkinmath.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ops.elementwise import add, cast
from napkinmath.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.tape import Tape
    from napkinmath.train_config import QuantizationConfig


class WeightFormat(Record):
    """A quantized storage format: packed bits, scales for each group, and how a product unpacks it."""

    name: str
    meaning: str
    source: str
    bits: int
    group_size: int
    scale_dtype: DType = FP32
    zero_point_bits: int = 0
    """Bits of the zero point of each group, 0 where the format is symmetric."""
    table_elements: int = 0
    """fp32 entries of a code table stored with every tensor."""
    double_quant: bool = False
    """Scales themselves quantized to 8 bits in blocks of 256 with an fp32 scale each, a 256-entry table and one offset a tensor."""
    dequantize_kernel: str = "nf4"
    unpacks_whole: bool = True
    """A full-size copy of the weight exists while it is multiplied (false: the kernel unpacks tiles)."""
    output_dtype_is_input: bool = True
    widened_rest: bool = True
    """k-bit preparation makes what is left unquantized fp32 (peft utils/other.py prepare_model_for_kbit_training leaves GPTQ and HQQ models alone)."""
    packs_experts: bool = False
    """The library packs experts held as 3-D parameters too (bitsandbytes packs only nn.Linear)."""

    output_is_cloned: bool = False
    """PEFT copies the output of the product before it adds an adapter's (4-bit layers of bitsandbytes)."""

    def pack(self, name: str, axes: tuple[Size, ...], path: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The packed tensor of a weight, and its constants."""
        count = product(axes)
        groups = ceil_div(count, self.group_size)
        packed = Tensor(name, (ceil_div(count * self.bits, 8),), UINT8, Role.WEIGHTS, path, self.source)
        constants: list[Tensor] = []

        def constant(label: str, size: Size, dtype: DType) -> None:
            constants.append(Tensor(label, (size,), dtype, Role.QUANTIZATION, path, self.source))

        if self.double_quant:
            constant("absmax", groups, UINT8)
            constant("nested absmax", ceil_div(groups, 256), FP32)
            constant("nested code", 256, FP32)
            constant("offset", 1, FP32)
        else:
            constant("scales", groups, self.scale_dtype)
        if self.zero_point_bits:
            constant("zero points", ceil_div(groups * self.zero_point_bits, 8), UINT8)
        if self.table_elements:
            constant("code", self.table_elements, FP32)
        return packed, tuple(constants)

    def linear(self, t: Tape, x: Value, w: Weight, bias: Value | None, *, role: Role) -> Value:
        """y = x·W^T with W unpacked into the compute type for the product, forward and again backward; x is not kept."""
        compute = t.policy.compute_dtype
        source_dtype = x.dtype
        if t.policy.autocast is not None or x.dtype is not compute:
            x = cast(t, x, compute)
        rows, outputs, inputs = product(x.axes[:-1]), w.axes[0], w.axes[1]
        axes = (*x.axes[:-1], outputs)
        tensor = t.tensor("output", axes, compute, role)
        out = Value(tensor, axes, compute, x.requires_grad)
        temporaries = self.unpacked(t, w, compute)
        allocs, frees = [(ALLOC, y) for y in temporaries], [(FREE, y) for y in temporaries]
        unpack = Dequantize(self.dequantize_kernel, w.elements, self.bits, compute)
        gradient = Gradient(x, t.gradient_of(x)) if x.requires_grad else None
        backward = (*allocs, (ALLOC, gradient.tensor), *frees) if gradient is not None and gradient.tensor is not None else ()
        t.append(
            f"{self.name} linear", (x, w.value), (out,), forward=(*allocs, (ALLOC, tensor), *frees), costs=(unpack, Gemm(rows, outputs, inputs, compute)),
            saves=(x.tensor,) if t.policy.stack.quantized_keeps_input and x.requires_grad else (),
            backward=backward, gradients=(gradient,) if gradient else (), backward_costs=(unpack, Gemm(rows, inputs, outputs, compute)),
        )  # fmt: skip
        if bias is not None and bias.requires_grad:  # a frozen bias is added by the product itself
            out = add(t, out, Value(bias.tensor, axes, compute, bias.requires_grad))
        return cast(t, out, source_dtype)  # Linear4bit.forward returns the type it was given, under autocast too

    def unpacked(self, t: Tape, w: Weight, compute: DType, *, whole: bool = False) -> list[Tensor]:
        """What exists while a weight is unpacked: nested scales in fp32, before and after adding the offset, then the weight."""
        made: list[Tensor] = []
        if self.double_quant:
            groups = ceil_div(w.elements, self.group_size)
            made.append(t.tensor("scales in fp32", (groups,), FP32, Role.WORKSPACE))
        if self.unpacks_whole or whole:
            made.append(t.tensor("unpacked weight", w.axes, compute, Role.WORKSPACE))
            if t.policy.stack.unpacks_by_half:
                made.append(t.tensor("unpacked weight in fp16", w.axes, FP16, Role.WORKSPACE))
        return made


def weight_format(config: QuantizationConfig) -> WeightFormat:
    """The catalog's row for a configuration, with its group size and double quantization."""
    from napkinmath.catalog.quantization import find_format

    row = find_format(config.format)
    changes: dict[str, object] = {}
    if config.group_size:
        changes["group_size"] = config.group_size
    if config.double_quant and row.dequantize_kernel == "nf4":
        changes["double_quant"] = True
    return row.replace(**changes) if changes else row


def stored_bits_per_element(fmt: WeightFormat) -> float:
    """Bits a parameter costs with its constants, tables aside: 4.127 for NF4 with double quantization."""
    scales = 8 / fmt.group_size + 32 / (fmt.group_size * 256) if fmt.double_quant else fmt.scale_dtype.bits / fmt.group_size
    return fmt.bits + scales + fmt.zero_point_bits / fmt.group_size


def mixed_traffic(x: Value) -> Move:
    """Reading a value once."""
    return Move(traffic(x))
