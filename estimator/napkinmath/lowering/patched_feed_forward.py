"""A whole feed-forward with LoRA adapters in one node, as a set of patched operations runs it.

Sources: kernels/napkinmath_kernels/ops/qlora_mlp.py, patching/linears.py; unsloth 2026.10
kernels/fast_lora.py LoRA_MLP; axolotl 0.19 kernels/lora.py LoRA_MLP.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, DType
from napkinmath.base.expr import Size, product
from napkinmath.catalog import adapter_kernels
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.tape import Tape
from napkinmath.lowering.patched_linears import (
    FusedBranch,
    adapters_backward,
    adapters_kept,
    as_group,
    backward_products,
    branch,
    decoded_anew,
    dropped_share,
    drops,
    forward_products,
    is_worth_fusing,
    made_to_keep,
    note_buffers,
    product_input,
)
from napkinmath.lowering.patching import active, scratch
from napkinmath.ops.elementwise import cast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.costs import Cost


def fused_feed_forward(
    t: Tape, x: Value, names: tuple[str, str, str], width: Size, *, bias: bool, kind: str
) -> Value | None:
    """The whole feed-forward as one operation, or None: a dense one without adapters has nothing to
    fuse."""
    middle = Value(x.tensor, (*x.axes[:-1], width), x.dtype, x.requires_grad)
    found = [branch(t, x, name, width, bias=bias, kind=kind) for name in names[:2]]
    found.append(branch(t, middle, names[2], x.axes[-1], bias=bias, kind=kind))
    group = as_group(t, found) if any(is_worth_fusing(one) for one in found) else None
    return None if group is None else fused_mlp(t, x, group)


def fused_mlp(t: Tape, x: Value, group: Sequence[FusedBranch]) -> Value:
    """down(act(gate(x)) * up(x)) as one node, in the type of x."""
    source = product_input(t, x, group[0].casts)
    out = _record_mlp(t, source, group)
    return cast(t, out, x.dtype) if group[0].casts else out


def _record_mlp(t: Tape, x: Value, group: Sequence[FusedBranch]) -> Value:
    patch = active(t)
    dtype, rows, dropped = x.dtype, product(x.axes[:-1]), drops(t)
    adapter_dtype = t.policy.adapter_dtype if t.policy.adapter is not None else dtype
    gate, up, down = group
    cost = adapter_kernels.qlora_mlp(
        rows,
        (gate.shape, up.shape, down.shape),
        dtype,
        adapter_dtype=adapter_dtype,
        dropout=dropped and not patch.own_copies,
    )
    pairs = [value for one in group if one.pair is not None for value in one.pair]
    output = t.tensor("output", (*x.axes[:-1], down.shape.outputs), dtype)
    out = Value(output, output.axes, dtype, x.requires_grad or bool(pairs))
    wide = [t.tensor(name, (*x.axes[:-1], gate.shape.outputs), dtype) for name in ("gate", "up")]
    new = [s for s in cost.new if s.name not in ("gate", "up")]
    kept = [*wide, *made_to_keep(t, x, new, (gate, up))]
    if patch.input_in_place and dropped and down.pair is not None:
        kept.append(t.tensor("dropout mask", wide[0].axes, BOOL))
    if patch.own_copies:  # no dropout before down
        kept += adapters_kept(t, (down,), dtype)
    made, gone = scratch(t, "the gated product", cost.forward_temporary)
    decoded = decoded_anew(t, group, dtype)
    forward = (*((ALLOC, k) for k in kept), *made, (ALLOC, output), *decoded, *gone)
    note_buffers(t, group, dtype)
    gate_moved = product(wide[0].axes) * (dtype.bits // 8)
    costs: list[Cost] = [c for one in group for c in forward_products(one, rows, dtype)]
    costs.append(Move(3 * gate_moved))
    if not out.requires_grad:
        t.append(
            "fused feed-forward",
            (x,),
            (out,),
            forward=(*forward, *((FREE, k) for k in kept)),
            costs=costs,
        )
        return out
    again = _overwriting_backward if patch.adapters_only else _mlp_backward
    backward, gradients = again(t, x, group, wide, dtype)
    back: list[Cost] = [c for one in group for c in backward_products(one, rows, dtype)]
    t.append(
        "fused feed-forward",
        (x, *pairs),
        (out,),
        forward=forward,
        saves=(x.tensor, *kept),
        costs=costs,
        backward=backward,
        gradients=gradients,
        backward_costs=[*back, Move(6 * gate_moved)],
    )
    for tensor in kept:
        t.last_use[tensor] = len(t.ops) - 1
    return out


def _mlp_backward(
    t: Tape, x: Value, group: Sequence[FusedBranch], wide: Sequence[Tensor], dtype: DType
) -> tuple[tuple[tuple[str, Tensor], ...], list[Gradient]]:
    """The down projection's adapter with the product made again; then the product is dropped, and
    gate and up follow."""
    rows = product(x.axes[:-1])
    adapter_dtype = t.policy.adapter_dtype if t.policy.adapter is not None else dtype
    of_h, of_up, again = (
        t.tensor(n, wide[0].axes, dtype, Role.WORKSPACE)
        for n in ("gradient of the product", "gradient of up", "the product again")
    )
    steps: list[tuple[str, Tensor]] = [(ALLOC, of_h), (ALLOC, of_up), (ALLOC, again)]
    gradients: list[Gradient] = []
    through, closed = scratch(
        t, "gradient through down's adapter", rows * group[2].shape.rank * (dtype.bits // 8)
    )
    for which in (2, 0, 1):
        one = group[which]
        before = group[0].shape.rank if which == 1 else 0
        need = one.shape.backward_temporary(
            rows, dtype, adapter_dtype, dropout=drops(t), before=before
        )
        if which == 2:
            need = need - rows * one.shape.rank * (dtype.bits // 8)
            steps += through
        made, gone = scratch(t, "gradients through the adapter", need)
        steps += made
        for value in one.pair or ():
            gradients.append(Gradient(value, t.gradient_of(value)))
            steps.append((ALLOC, gradients[-1].tensor))  # type: ignore[arg-type]
        steps += gone
        if which == 2:
            steps.append((FREE, again))
            if x.requires_grad:
                gradients.append(Gradient(x, t.gradient_of(x)))
                steps.append((ALLOC, gradients[-1].tensor))  # type: ignore[arg-type]
    return (*steps, *closed, (FREE, of_h), (FREE, of_up)), gradients


def _overwriting_backward(
    t: Tape, x: Value, group: Sequence[FusedBranch], wide: Sequence[Tensor], dtype: DType
) -> tuple[tuple[tuple[str, Tensor], ...], list[Gradient]]:
    """One new tensor as wide as the product; gate and up are overwritten by their gradients, and in
    unsloth's x by its own."""
    product_gradient = t.tensor("gradient of the product", wide[0].axes, dtype, Role.WORKSPACE)
    largest = (
        t.tensor("unpacked weight", group[1].weight.axes, dtype, Role.WORKSPACE)
        if group[1].shape.stored
        else None
    )
    share, in_place = dropped_share(t, x, dtype), active(t).input_in_place
    steps, gradients = adapters_backward(t, x, group, share, dtype, in_place=in_place)
    unpack = ((ALLOC, largest), (FREE, largest)) if largest is not None else ()
    return ((ALLOC, product_gradient), *steps, *unpack, (FREE, product_gradient)), gradients
