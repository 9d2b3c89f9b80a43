"""Norm, rotation, gate and loss as a set of patched operations runs them: recorded from the rows of
catalog/kernels.py.

The fused projections are in lowering/patched_linears.py.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32, DType
from napkinmath.base.expr import Size, ceil_div, maximum, minimum, power_of_two, product
from napkinmath.catalog import kernels, loss_kernels
from napkinmath.catalog.kernel_cost import KernelCost
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.symbols import s
from napkinmath.ir.tape import Tape
from napkinmath.lowering.adapters import low_rank_pair
from napkinmath.lowering.patching import active, scratch
from napkinmath.ops.elementwise import cast, copy, dropout, scale
from napkinmath.ops.loss import linear_cross_entropy, next_token_labels
from napkinmath.ops.matmul import autocast_weight, dense_linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.ledger import Steps


def patched_norm(t: Tape, x: Value, *, name: str, width: Size) -> Value:
    """RMS norm in one kernel each way, in the type of x; keeps x and one fp32 statistic a row. The
    gradient may overwrite the incoming one.

    Heads in front of positions do not lie in rows: ours copies them for each reading, the others
    once, and keep the copy.
    """
    patch = active(t)
    transposed = len(x.axes) == 4 and x.axes[2] is s
    with t.scope(name) as frame:
        frame.local(x)
        again, copies = (0, 0) if not transposed else (traffic(x), 2 * traffic(x))
        if transposed and patch.name != "napkinmath":
            again, copies = 0, 0
            x = copy(t, x, name="heads laid out in rows")
        weight = t.weight("weight", (width,), kind="norm").value
        trains = weight.requires_grad
        processors = patch.norm_processors * t.policy.processors // 2
        cost = kernels.rms_norm(
            product(x.axes[:-1]),
            width,
            x.dtype,
            trains_weight=trains,
            processors=processors,
            weight_dtype=weight.dtype,
        )
        tensor, statistics = (
            t.tensor("rms_norm", x.axes, x.dtype),
            t.tensor("rstd", x.axes[:-1], FP32),
        )
        out = Value(tensor, x.axes, x.dtype, x.requires_grad or trains)
        rows, dropped = scratch(t, "heads laid out in rows", copies)
        forward: Steps = (*rows, (ALLOC, tensor), (ALLOC, statistics), *dropped)
        if not out.requires_grad:
            t.append(
                "patched rms_norm",
                (x, weight),
                (out,),
                forward=(*forward, (FREE, statistics)),
                costs=(Move(cost.forward_moved),),
            )
            return out
        fresh = t.gradient_of(x) if x.requires_grad and not patch.norm_in_place else None
        of_weight = t.gradient_of(weight) if trains else None
        made, gone = scratch(
            t, "partial sums of the weight's gradient", cost.backward_temporary + again
        )
        backward = (
            *(((ALLOC, fresh),) if fresh else ()),
            *made,
            *(((ALLOC, of_weight),) if of_weight else ()),
            *gone,
        )
        gradients = [Gradient(x, fresh)] if x.requires_grad else []
        gradients += [Gradient(weight, of_weight)] if of_weight else []
        t.append(
            "patched rms_norm",
            (x, weight),
            (out,),
            forward=forward,
            saves=(x.tensor, statistics),
            costs=(Move(cost.forward_moved),),
            backward=backward,
            gradients=gradients,
            backward_costs=(Move(cost.backward_moved),),
        )
        t.last_use[statistics] = len(t.ops) - 1
        return out


def patched_rotary(
    t: Tape,
    q: Value,
    key: Value,
    tables: tuple[Value, Value],
    *,
    dense: bool,
    sliced: bool = False,
) -> tuple[Value, Value]:
    """Queries and keys of axes (b, heads, s, dh) turned in one launch: in new tensors or where they
    lie. Keeps cos and sin (kernels/napkinmath_kernels/ops/rope.py; Liger 0.8.5 ops/rope.py;
    unsloth 2026.10 kernels/rope_embedding.py).

    `dense`: gradients come back with the heads outside the rows; kernels that work in place then
    work on a copy. `sliced`: queries and keys lie side by side in one projection, which such a
    kernel takes apart first.
    """
    how = active(t).rope
    moves = how == "new" or sliced
    cost = kernels.rope(
        q.axes[0], q.axes[1], key.axes[1], q.axes[2], q.axes[3], q.dtype, tables[0].dtype
    )
    needs = q.requires_grad or key.requires_grad
    pairs = ((q, "turned queries"), (key, "turned keys"))
    made = [t.tensor(label, x.axes, x.dtype) if moves else x.tensor for x, label in pairs]
    outs = tuple(
        Value(tensor, x.axes, x.dtype, needs) for tensor, (x, _) in zip(made, pairs, strict=True)
    )
    fresh = (
        [t.gradient_of(x) if how != "in place" or dense else None for x, _ in pairs]
        if needs
        else []
    )
    backward = [(ALLOC, gradient) for gradient in fresh if gradient is not None]
    gradients = [
        Gradient(x, g, output)
        for output, ((x, _), g) in enumerate(zip(pairs, fresh, strict=False))
        if x.requires_grad
    ]
    backward += [
        (FREE, g)
        for (x, _), g in zip(pairs, fresh, strict=False)
        if g is not None and not x.requires_grad
    ]
    forward = tuple((ALLOC, tensor) for tensor in made) if moves else ()
    t.append(
        "patched rotary",
        (q, key, *tables),
        outs,
        forward=forward,
        saves=tuple(table.tensor for table in tables) if needs else (),
        costs=(Move(cost.forward_moved),),
        backward=tuple(backward),
        gradients=gradients,
        backward_costs=(Move(cost.backward_moved),) if needs else (),
    )
    return outs[0], outs[1]


def patched_gate(t: Tape, gate: Value, up: Value, *, joint: bool = False) -> Value:
    """act(gate) * up in one kernel each way; keeps both, whose gradients may overwrite them.
    `joint`: both are halves of one tensor."""
    patch = active(t)
    if joint and patch.copies_halves:
        gate, up = copy(t, gate, name="gate's half"), copy(t, up, name="up's half")
    cost = kernels.gated(product(gate.axes[:-1]), gate.axes[-1], gate.dtype)
    overwrites = patch.gate_in_place
    out = t.op(
        "patched gate",
        (gate, up),
        gate.axes,
        gate.dtype,
        saves=(gate, up),
        gradients=("like", "like"),
        costs=(Move(cost.forward_moved),),
        backward_costs=(Move(cost.backward_moved),),
    )
    op = t.ops[-1]
    if overwrites and out.requires_grad:
        op.gradients = tuple(Gradient(g.of, g.of.tensor) for g in op.gradients)
        op.backward = ()
    return out


def takes_adapted_head(t: Tape) -> bool:
    """Whether the patch's loss makes no logits of a head with an adapter."""
    config = t.policy.adapter
    is_lora = config is not None and config.kind is AdapterKind.LORA
    return is_lora and bool(active(t).adapted_head)


def patched_loss(t: Tape, hidden: Value, weight: Value, adapted: str = "") -> Value:
    """Head and loss in one operation that makes the gradients in the forward and keeps them.
    `adapted` names the head where an adapter sits on it."""
    name = active(t).name
    with t.scope() as frame:
        thin = adapter_of_head(t, hidden, weight, adapted) if adapted else ()
        labels = next_token_labels(t, hidden)
        frame.local(labels, *thin[:1])
        if name == "napkinmath":
            *batch, length, _ = hidden.axes
            return chunked_cross_entropy(t, hidden, weight, product((*batch, length - 1)), thin)
        if name == "liger":
            return liger_loss(t, hidden, weight)
        if t.policy.autocast is not None:
            hidden, weight = cast(t, hidden, t.policy.autocast), autocast_weight(t, weight)
        rows, vocabulary = product(hidden.axes[:-1]), t.known(weight.axes[0])
        width = t.known(hidden.axes[-1])
        least = max(512, 1 << ((512 * 151936 // vocabulary).bit_length() - 1))
        chunk = minimum(4096, maximum_rows(rows, width, vocabulary, least))
        return linear_cross_entropy(
            t, hidden, weight, chunk_rows=chunk, chunk_copies=1, chunk_dtype=FP32
        )


def liger_loss(t: Tape, hidden: Value, weight: Value) -> Value:
    """As many logits as hidden states at a time, rounded up to a power of two; gradients in the
    types of what they belong to.

    Under autocast the weight is cast for the products with the gradients, once, and its transpose
    for those that make logits, each time: a view is no leaf, which autocast's cache asks for.
    Source: liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py.
    """
    rows, vocabulary = product(hidden.axes[:-1]), t.known(weight.axes[0])
    chunk = power_of_two(ceil_div(rows, ceil_div(vocabulary, t.known(hidden.axes[-1]))))
    computed = hidden.dtype if t.policy.autocast is None else t.policy.autocast
    casts: list[Tensor] = []
    if weight.dtype is not computed:
        if weight.requires_grad:
            autocast_weight(t, weight)
        casts.append(
            t.tensor(f"transposed weight in {computed}", weight.axes, computed, Role.WORKSPACE)
        )
    return linear_cross_entropy(
        t, hidden, weight, chunk_rows=chunk, chunk_copies=1, chunk_dtype=computed, temporaries=casts
    )


def maximum_rows(rows: Size, width: int, vocabulary: int, least: int) -> Size:
    """unsloth_zoo's fused_linear_rows: a power of two not above rows · width / vocabulary, and at
    least `least`."""
    return maximum(min(least, 4096), power_of_two((rows * width) // vocabulary + 1) // 2)


def adapter_of_head(t: Tape, hidden: Value, weight: Value, name: str) -> tuple[Value, ...]:
    """(scaling A x, B) of the adapter on the head of that name; nothing of one that is not run,
    whose matrices get no gradient.

    Source: kernels/napkinmath_kernels/patching/heads.py read_head.
    """
    config, runs = t.policy.adapter, active(t).adapted_head == "run"
    assert config is not None
    with t.scope(name):
        a, b = low_rank_pair(t, hidden.axes[-1], weight.axes[0], config, trained=runs)
        if not runs:
            return ()
        x = hidden if t.policy.autocast is None else cast(t, hidden, t.policy.autocast)
        x = dropout(t, x, config.dropout, of_adapter=True)
        low = dense_linear(t, x, cast(t, a, x.dtype), None, label="A x")
        return scale(t, low), b


def chunked_cross_entropy(
    t: Tape, hidden: Value, weight: Value, valid: Size, thin: tuple[Value, ...] = ()
) -> Value:
    """Ours: chunks of so many bytes; `valid` positions have a label, and are copied together. `thin`
    are an adapter's first product and its second matrix."""
    if t.policy.autocast is not None:
        hidden = cast(t, hidden, t.policy.autocast)
    rows, width = product(hidden.axes[:-1]), hidden.axes[-1]
    vocabulary, dtype = t.known(weight.axes[0]), hidden.dtype
    cost = loss_kernels.linear_cross_entropy(
        rows,
        width,
        vocabulary,
        dtype,
        valid=valid,
        trains_head=weight.requires_grad,
        head_dtype=weight.dtype,
        adapter_rank=thin[1].axes[-1] if thin else 0,
        adapter_dtype=thin[1].dtype if thin else None,
    )
    widths = ((width, weight.requires_grad), *((x.axes[-1], True) for x in thin[:1]))
    costs = [
        *head_products(rows=valid, vocabulary=vocabulary, dtype=dtype, widths=widths),
        Move(2 * valid * vocabulary * (dtype.bits // 8)),
    ]
    return loss_in_forward(t, "linear_cross_entropy", (hidden, weight, *thin), (), cost, costs)


def loss_in_forward(
    t: Tape,
    name: str,
    trained: tuple[Value, ...],
    read: tuple[Value, ...],
    cost: KernelCost,
    costs: Sequence[Gemm | Move],
) -> Value:
    """A loss whose forward makes the gradients of what is trained, and keeps them; `read` gets
    none."""
    sources = [x for x in trained if x.requires_grad]
    loss = t.tensor("loss", (1,), FP32, Role.LOGITS)
    out = Value(loss, (1,), FP32, bool(sources))
    kept = [
        Tensor(f"gradient of {x.tensor.name}, kept", x.axes, x.dtype, gradient_role(x), t.module)
        for x in sources
    ]
    made, gone = logits_scratch(t, cost.forward_temporary)
    gradients = [Gradient(x, t.gradient_of(x)) for x in sources]
    t.append(
        name,
        (*trained, *read),
        (out,),
        forward=(*((ALLOC, k) for k in kept), *made, (ALLOC, loss), *gone),
        saves=kept,
        costs=costs,
        backward=tuple((ALLOC, g.tensor) for g in gradients if g.tensor),
        gradients=gradients,
        backward_costs=(Move(cost.backward_moved),),
    )
    for tensor in (loss, *kept):
        t.last_use[tensor] = len(t.ops) - 1
    return out


def patched_log_probabilities(
    t: Tape, x: Value, w: Value, targets: Value, rows: Size, *, statistics: bool = True
) -> Value:
    """Ours in the place of TRL's function: with a frozen head the gradients of the rows are made in
    the forward; a trained one's logits are made again in the backward."""
    if t.policy.autocast is not None:
        x = cast(t, x, t.policy.autocast)
    width, vocabulary = t.known(x.axes[-1]), t.known(w.axes[0])
    trains = w.requires_grad
    cost = loss_kernels.linear_log_probabilities(
        rows,
        width,
        vocabulary,
        x.dtype,
        trains_head=trains,
        head_dtype=w.dtype,
        statistics=statistics,
    )
    names = ("log-probabilities", "entropy", "mean logit")[: 3 if statistics else 1]
    found = [t.tensor(name, (rows,), FP32, Role.LOGITS) for name in names]
    if statistics:
        found.append(t.tensor("whether the target is first", (rows,), BOOL, Role.LOGITS))
    out = Value(found[0], (rows,), FP32, x.requires_grad or trains)
    made, gone = logits_scratch(t, cost.forward_temporary)
    again, dropped = logits_scratch(t, cost.backward_temporary)
    kept: list[Tensor] = [x.tensor, targets.tensor] if trains else []
    forward: Steps = (*made, *((ALLOC, one) for one in found))
    if x.requires_grad and not trains:
        name = "gradients of the log-probabilities, kept"
        kept = [t.tensor(name, x.axes, x.dtype, Role.ACTIVATION_GRADIENTS)]
        forward = (*forward, (ALLOC, kept[0]))
    gradients = [Gradient(one, t.gradient_of(one)) for one in (x, w) if one.requires_grad]
    products = [Gemm(rows, vocabulary, width, x.dtype)]
    back = [Gemm(rows, width, vocabulary, x.dtype)] * x.requires_grad
    passes = Move(2 * rows * vocabulary * (x.dtype.bits // 8))
    late = [*products, *back, Gemm(vocabulary, width, rows, x.dtype, of_weight=True), passes]
    t.append(
        "linear_log_probabilities",
        (x, w),
        (out,),
        forward=(*forward, *gone),
        saves=kept if out.requires_grad else (),
        costs=[*products, *([] if trains else back), passes],
        backward=(*again, *((ALLOC, g.tensor) for g in gradients if g.tensor), *dropped),
        gradients=gradients,
        backward_costs=late if trains else (Move(cost.backward_moved),),
    )
    for tensor in (*found, targets.tensor, *kept):
        t.last_use[tensor] = len(t.ops) - 1
    return out


def logits_scratch(t: Tape, nbytes: Size) -> tuple[Steps, Steps]:
    """What a loop over chunks of logits makes and lets go."""
    made, gone = scratch(t, "chunk of logits", nbytes)
    for step in made:
        step[1].role = Role.LOGITS
    return made, gone


def gradient_role(x: Value) -> Role:
    """What the gradient of x is: a parameter's, or an activation's."""
    return Role.GRADIENTS if x.weight is not None else Role.ACTIVATION_GRADIENTS


def head_products(
    *, rows: Size, vocabulary: int, dtype: DType, widths: tuple[tuple[Size, bool], ...]
) -> list[Gemm]:
    """The products with a head, and with an adapter on it, each of a width and trained or not."""
    products: list[Gemm] = []
    for width, trains in widths:
        products += [Gemm(rows, vocabulary, width, dtype), Gemm(rows, width, vocabulary, dtype)]
        products += [Gemm(vocabulary, width, rows, dtype, of_weight=True)] * trains
    return products
