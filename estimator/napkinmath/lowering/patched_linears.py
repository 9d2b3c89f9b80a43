"""Frozen linears with LoRA adapters as a set of patched operations runs them: several that read one
x, or a whole feed-forward, in one node.

Ours keep each adapter's projection of x; unsloth's make it again and write the gradient of x over
x. Both decode 4-bit weights into a buffer that lives on. axolotl's make it again, keep the adapters
in the products' type and what dropout left of x, which all of a group share, and decode into a
tensor for each product. Sources: kernels/napkinmath_kernels/ops/qlora.py, qlora_mlp.py,
patching/linears.py; unsloth 2026.10 kernels/fast_lora.py LoRA_QKV, LoRA_W, LoRA_MLP,
kernels/utils.py fast_dequantize; axolotl 0.19 kernels/lora.py LoRA_QKV, LoRA_O, matmul_lora.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, INT64, DType
from napkinmath.base.expr import Size, product
from napkinmath.catalog import adapter_kernels
from napkinmath.catalog.adapter_kernels import FusedLinear
from napkinmath.catalog.kernel_cost import Saved
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.costs import Dequantize, Gemm
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.lowering.adapters import low_rank_pair
from napkinmath.lowering.patching import active, scratch
from napkinmath.ops.elementwise import cast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.weight_format import WeightFormat


class FusedBranch:
    """A linear that can be fused: its weight and the format of a packed one, its low-rank pair if
    it has one, and sizes."""

    __slots__ = ("format", "pair", "shape", "weight")

    def __init__(
        self,
        weight: Weight,
        format: WeightFormat | None,
        pair: tuple[Value, Value] | None,
        shape: FusedLinear,
    ) -> None:
        self.weight, self.format, self.pair, self.shape = weight, format, pair, shape

    @property
    def casts(self) -> bool:
        """Whether it multiplies in a type of its own and gives back that of x (bitsandbytes)."""
        return self.format is not None and self.format.of_bitsandbytes

    def decoding(self, dtype: DType) -> list[Cost]:
        """What expands a packed weight into `dtype`."""
        if self.format is None:
            return []
        return [
            Dequantize(self.format.dequantize_kernel, self.shape.elements, self.format.bits, dtype)
        ]


def branch(
    t: Tape, x: Value, name: str, outputs: Size, *, bias: bool, kind: str
) -> FusedBranch | None:
    """The named linear as the fused operations take it; None where they leave it to the library."""
    with t.scope(name):
        return branch_here(t, x, outputs, bias=bias, kind=kind)


def branch_here(
    t: Tape, x: Value, outputs: Size, *, bias: bool, kind: str, weight: Weight | None = None
) -> FusedBranch | None:
    """The same of the linear whose scope is open: frozen, dense or packed, with plain LoRA or
    none."""
    policy = t.policy
    weight = weight or t.weight("weight", (outputs, x.axes[-1]), kind=kind)
    packed = bool(weight.constants)
    if weight.trainable or (
        packed and (policy.format is None or active(t).name not in policy.format.fused_by)
    ):
        return None
    pair, rank = None, 0
    if policy.adapter is not None and policy.targets(t.module, kind):
        if policy.adapter.kind is not AdapterKind.LORA:
            return None
        pair, rank = low_rank_pair(t, x.axes[-1], outputs, policy.adapter), policy.adapter.rank
    elif not packed and policy.adapter is None:
        return None
    if (
        bias and t.weight("bias", (outputs,), kind="bias").trainable
    ):  # stays as it is: Linear4bit.forward, which casts it, does not run
        return None
    stored = (
        tuple(
            Saved(name=s.name, axes=s.axes, dtype=s.dtype, is_new=False)
            for s in (weight.tensor, *weight.constants)
        )
        if packed
        else ()
    )
    return FusedBranch(
        weight,
        policy.format if packed else None,
        pair,
        FusedLinear(outputs=outputs, inputs=x.axes[-1], rank=rank, stored=stored),
    )


def is_worth_fusing(found: FusedBranch | None) -> bool:
    """Whether there is an adapter or a weight to decode; a plain linear is best left alone."""
    return found is not None and (found.pair is not None or bool(found.shape.stored))


def drops(t: Tape) -> bool:
    """Whether the adapters' input goes through dropout."""
    return t.policy.adapter is not None and t.policy.adapter.dropout > 0


def as_group(t: Tape, found: Sequence[FusedBranch | None]) -> list[FusedBranch] | None:
    """All of them, or None where one cannot be fused or they differ in dropout; unsloth's want an
    adapter on each."""
    known = [one for one in found if one is not None]
    with_adapter = [one for one in known if one.pair is not None]
    if len(known) < len(found) or (drops(t) and 0 < len(with_adapter) < len(known)):
        return None
    if active(t).adapters_only and len(with_adapter) < len(known):
        return None
    if len({bool(one.shape.stored) for one in known}) > 1:  # their products' types differ
        return None
    return known


def fused_projections(
    t: Tape, x: Value, linears: tuple[tuple[str, Size], ...], *, bias: bool
) -> list[Value]:
    """Queries, keys and values from one operation; nothing where their linears are left to
    themselves."""
    found = [branch(t, x, name, outputs, bias=bias, kind="linear") for name, outputs in linears]
    group = as_group(t, found) if all(is_worth_fusing(one) for one in found) else None
    return [] if group is None else fused_linears(t, x, group)


def single_linear(
    t: Tape, x: Value, outputs: Size, *, bias: bool, kind: str, weight: Weight | None
) -> Value | None:
    """One linear with its adapter; unsloth has one for the attention's output alone."""
    if active(t).adapters_only and not t.module.endswith(".o_proj"):
        return None
    found = branch_here(t, x, outputs, bias=bias, kind=kind, weight=weight)
    group = as_group(t, [found]) if is_worth_fusing(found) else None
    return None if group is None else fused_linears(t, x, group)[0]


def product_input(t: Tape, x: Value, casts: bool) -> Value:
    """x in the type of a base's products that is its own, and in autocast's."""
    if casts and not active(t).adapters_only:
        x = cast(t, x, t.policy.product_dtype)
    return cast(t, x, t.policy.autocast) if t.policy.autocast is not None else x


def fused_linears(t: Tape, x: Value, group: Sequence[FusedBranch]) -> list[Value]:
    """The outputs of linears that read one x, each in the type of x."""
    source = product_input(t, x, group[0].casts)
    outs = _record(t, source, group)
    return [cast(t, out, x.dtype) for out in outs] if group[0].casts else outs


def _record(t: Tape, x: Value, group: Sequence[FusedBranch]) -> list[Value]:
    patch = active(t)
    dtype, rows, dropped = x.dtype, product(x.axes[:-1]), drops(t)
    adapter_dtype = t.policy.adapter_dtype if t.policy.adapter is not None else dtype
    shapes = tuple(one.shape for one in group)
    cost = adapter_kernels.qlora_linears(
        rows,
        shapes,
        dtype,
        adapter_dtype=adapter_dtype,
        dropout=dropped and not patch.own_copies,
    )
    pairs = [value for one in group if one.pair is not None for value in one.pair]
    needs = x.requires_grad or bool(pairs)
    outputs = [t.tensor("output", (*x.axes[:-1], one.shape.outputs), dtype) for one in group]
    outs = [Value(tensor, tensor.axes, dtype, needs) for tensor in outputs]
    kept = made_to_keep(t, x, cost.new, group)
    made, gone = scratch(t, "adapter inputs in the products' type", cost.forward_temporary)
    decoded = decoded_anew(t, group, dtype)
    forward = (*((ALLOC, k) for k in kept), *((ALLOC, y) for y in outputs), *made, *gone, *decoded)
    forward = forward if needs else (*forward, *((FREE, k) for k in kept))
    costs = [c for one in group for c in forward_products(one, rows, dtype)]
    note_buffers(t, group, dtype)
    if not needs:
        t.append("fused linears", (x,), outs, forward=forward, costs=costs)
        return outs
    # three projections write over what the attention's norm made for them, the last keeps its own
    # gradient
    reuse = patch.input_in_place and len(group) > 1
    temporary = cost.backward_temporary + dropped_share(t, x, dtype)
    backward, gradients = adapters_backward(t, x, group, temporary, dtype, in_place=reuse)
    t.append(
        "fused linears",
        (x, *pairs),
        outs,
        forward=forward,
        saves=(x.tensor, *kept),
        costs=costs,
        backward=(*backward, *decoded_anew(t, group, dtype)),
        gradients=gradients,
        backward_costs=[c for one in group for c in backward_products(one, rows, dtype)],
    )
    for tensor in kept:
        t.last_use[tensor] = len(t.ops) - 1
    return outs


def made_to_keep(
    t: Tape, x: Value, new: Sequence[Saved], group: Sequence[FusedBranch]
) -> list[Tensor]:
    """What is made to be saved: ours projections and a seed; unsloth's the masks of dropout;
    axolotl's what dropout left and its mask, and the adapters in x's type."""
    if active(t).own_copies:
        made = [t.tensor("adapters' input after dropout", x.axes, x.dtype)] if drops(t) else []
        made += [t.tensor("dropout mask", x.axes, BOOL)] if drops(t) else []
        return made + adapters_kept(t, group, x.dtype)
    if active(t).adapters_only:
        return [
            t.tensor("dropout mask", x.axes, BOOL)
            for one in group
            if one.pair is not None and drops(t)
        ]
    return [
        t.tensor(s.name, s.axes, s.dtype) for s in new if s.axes != (0,) and s.dtype is not INT64
    ] + [t.tensor(s.name, s.axes, s.dtype) for s in new if s.dtype is INT64]


def adapters_backward(
    t: Tape,
    x: Value,
    group: Sequence[FusedBranch],
    temporary: Size,
    dtype: DType,
    *,
    in_place: bool,
) -> tuple[tuple[tuple[str, Tensor], ...], list[Gradient]]:
    """The gradient of x, then each adapter's: unsloth and axolotl make those in the products' type,
    which the engine casts to the adapters'."""
    casts = active(t).adapters_only
    gradients: list[Gradient] = []
    steps: list[tuple[str, Tensor]] = []
    if x.requires_grad:
        of_x = x.tensor if in_place else t.gradient_of(x)
        gradients.append(Gradient(x, of_x))
        steps += [] if in_place else [(ALLOC, of_x)]
    made, gone = scratch(t, "gradients through the adapters", temporary)
    steps += made
    narrow: list[Tensor] = []
    for one in group:
        for value in one.pair or ():
            gradients.append(Gradient(value, t.gradient_of(value)))
            if casts and value.dtype is not dtype:
                narrow.append(
                    t.tensor(
                        "adapter's gradient before its cast", value.axes, dtype, Role.WORKSPACE
                    )
                )
                steps.append((ALLOC, narrow[-1]))
            else:
                steps.append((ALLOC, gradients[-1].tensor))  # type: ignore[arg-type]
    steps += gone
    if narrow:
        wide = [g.tensor for g in gradients if g.of.weight is not None and g.tensor is not None]
        steps += [(ALLOC, w) for w in wide] + [(FREE, n) for n in narrow]
    return tuple(steps), gradients


def forward_products(one: FusedBranch, rows: Size, dtype: DType) -> list[Cost]:
    """Products of a linear and its adapter in the forward, the weight dequantized first."""
    shape = one.shape
    costs = one.decoding(dtype)
    costs.append(Gemm(rows, shape.outputs, shape.inputs, dtype))
    if shape.rank:
        costs += [
            Gemm(rows, shape.rank, shape.inputs, dtype),
            Gemm(rows, shape.outputs, shape.rank, dtype),
        ]
    return costs


def backward_products(one: FusedBranch, rows: Size, dtype: DType) -> list[Cost]:
    """Products of a linear and its adapter in the backward, the weight dequantized first."""
    shape = one.shape
    costs = one.decoding(dtype)
    costs.append(Gemm(rows, shape.inputs, shape.outputs, dtype))
    if shape.rank:
        thin = [
            Gemm(rows, shape.rank, shape.outputs, dtype),
            Gemm(rows, shape.inputs, shape.rank, dtype),
        ]
        costs += [
            *thin,
            Gemm(shape.rank, shape.inputs, rows, dtype, of_weight=True),
            Gemm(shape.outputs, shape.rank, rows, dtype, of_weight=True),
        ]
    return costs


def adapters_kept(t: Tape, group: Sequence[FusedBranch], dtype: DType) -> list[Tensor]:
    """Adapters of another type in that of the products, which axolotl's backward reads."""
    pairs = [value for one in group for value in one.pair or ()]
    name = "adapter in the products' type"
    return [t.tensor(name, x.axes, dtype) for x in pairs if x.dtype is not dtype]


def decoded_anew(t: Tape, group: Sequence[FusedBranch], dtype: DType) -> Steps:
    """The largest weight of a group, decoded for its product alone where no buffer lives on; in the
    forward after the outputs, in the backward after the gradients."""
    if not active(t).own_copies:
        return ()
    largest = max(
        (one for one in group if one.shape.stored),
        key=lambda one: t.known(one.shape.elements),
        default=None,
    )
    if largest is None:
        return ()
    tensor = t.tensor("unpacked weight", largest.weight.axes, dtype, Role.WORKSPACE)
    return (ALLOC, tensor), (FREE, tensor)


def dropped_share(t: Tape, x: Value, dtype: DType) -> Size:
    """Bytes of the gradient of what dropout left of x, which axolotl makes beside that of x."""
    return product(x.axes) * (dtype.bits // 8) if active(t).own_copies and drops(t) else 0


def note_buffers(t: Tape, group: Sequence[FusedBranch], dtype: DType) -> None:
    """Remembers how large the buffer must be that weights are decoded into; it is made once, before
    the first forward. axolotl's have none."""
    if active(t).own_copies:
        return
    for one in group:
        if one.shape.stored:
            t.decoded = max(t.decoded, t.known(one.shape.elements) * dtype.bits // 8)
