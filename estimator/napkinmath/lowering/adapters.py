"""Low-rank adapters, op by op as PEFT runs them.

Source: peft 0.21 tuners/lora/layer.py Linear.forward (dense base) and tuners/lora/bnb.py
Linear4bit.forward.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size, product
from napkinmath.config.train_config import AdapterConfig, AdapterKind
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import (
    ALLOC,
    FREE,
    Gradient,
    Role,
    Tensor,
    Value,
    Weight,
    allocs,
    frees,
)
from napkinmath.ir.tape import LIKE
from napkinmath.ops.elementwise import add, cast, dropout, scale
from napkinmath.ops.index import embedding, input_leaf
from napkinmath.ops.matmul import LOW_RANK, dense_linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.ir.tape import Tape

DEFAULT_GROUP = 16  # peft 0.21 tuners/lora/config.py qalora_group_size


def lora_update(t: Tape, source: Value, outputs: Size, config: AdapterConfig, role: Role) -> Value:
    """scaling · B(A(dropout(x))); QA-LoRA averages x over the groups of the quantized weight first
    and scales the averages."""
    known = t.shared.get((LOW_RANK, id(source)))
    low = known[1] if known else _low_rank(t, source, config)
    if t.policy.stack.model.joined_projections:
        t.shared[LOW_RANK, id(source)] = source, low
    with t.scope("lora"):
        b = lora_weight(t, "lora_B.weight", (outputs, config.rank))
    return scale(t, dense_linear(t, low, b, None, label="B A x", role=role))


def _low_rank(t: Tape, source: Value, config: AdapterConfig) -> Value:
    """A(dropout(x))."""
    x = dropout(t, source, config.dropout, of_adapter=True)
    if source in t.turned:
        t.turned.add(x)
    if config.kind is AdapterKind.QALORA:
        x = _group_averages(t, x)
    with t.scope("lora"):
        a = lora_weight(t, "lora_A.weight", (config.rank, x.axes[-1]))
    return dense_linear(t, x, a, None, label="A x")


def _group_averages(t: Tape, x: Value) -> Value:
    """Means of x over each group of inputs that share a scale, times the group's size: two small
    tensors.

    Source: peft 0.21 tuners/lora/variants.py QALoraLinearVariant.forward (arXiv 2309.14717).
    """
    size = t.policy.format.group_size if t.policy.format is not None else DEFAULT_GROUP
    axes = (*x.axes[:-1], x.axes[-1] // size)
    mean = t.op(
        "mean over groups",
        (x,),
        axes,
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        backward_costs=(Move(2 * traffic(x), 2),),
    )
    return scale(t, mean)


def adapted_embedding(t: Tape, ids: Value, base: Value, rows: Size) -> Value:
    """LoRA on an embedding: rows of A looked up in its transposed view, times B; the gradient of A
    is laid out anew as A is.

    Source: peft 0.21 tuners/lora/layer.py Embedding.forward (lora_embedding_A, lora_embedding_B);
    no dropout there.
    """
    base = input_leaf(t, base)  # the hook sits on the embedding inside
    config = t.policy.adapter
    assert config is not None
    if config.kind is not AdapterKind.LORA:
        raise InputError(
            f"{config.kind.value} on the embedding {t.module} is not priced; use --lora, or"
            " --train-modules to train it whole"
        )
    with t.scope() as frame, t.scope("lora"):
        frame.local(base)
        a = lora_weight(t, "lora_embedding_A", (config.rank, rows))
        b = lora_weight(t, "lora_embedding_B", (base.axes[-1], config.rank))
        looked = embedding(t, ids, "lora_embedding_A", rows, config.rank, weight=a.weight)
        _lay_gradient_anew(t, a)
        update = scale(t, dense_linear(t, looked, b, None, label="A[ids] B"))
        return cast(t, add(t, base, update), base.dtype)


def _lay_gradient_anew(t: Tape, a: Value) -> None:
    """The gradient that the look-up makes is that of a transposed view."""
    op = t.ops[-1]
    gradient = op.gradients[0].tensor
    assert gradient is not None
    laid = Tensor("gradient of the transposed view", a.axes, a.dtype, Role.WORKSPACE, t.module)
    op.backward = tuple(
        (action, laid if tensor is gradient else tensor) for action, tensor in op.backward
    )
    op.fitting = ((ALLOC, gradient), (FREE, laid))


def low_rank_pair(
    t: Tape, inputs: Size, outputs: Size, config: AdapterConfig, *, trained: bool = True
) -> tuple[Value, Value]:
    """The two matrices of a low-rank adapter: (rank, inputs) and (outputs, rank)."""
    with t.scope("lora"):
        return lora_weight(t, "lora_A.weight", (config.rank, inputs), trained), lora_weight(
            t, "lora_B.weight", (outputs, config.rank), trained
        )


def fused_adapted_linear(
    t: Tape, x: Value, outputs: Size, base: Callable[[Value], Value], config: AdapterConfig
) -> Value:
    """Base product and adapter as one autograd node, which keeps x and, with dropout, the dropped
    copy of x.

    The update is added to the base product in place; backward adds the adapter's share to the
    gradient of x in place, with dropout only where the dropped copy is not zero. Source: unsloth
    kernels/fast_lora.py LoRA_QKV and LoRA_W with dropout, as carried by fms-acceleration
    fused_ops/unsloth_lora/bnb/fast_lora.py, utils.py matmul_lora.
    """
    result = base(x)
    a, b = low_rank_pair(t, x.axes[-1], outputs, config)
    rows, inputs, rank, dtype = product(x.axes[:-1]), x.axes[-1], config.rank, result.dtype
    dropped = (t.tensor("dropped input", x.axes, dtype),) if config.dropout else ()
    kept = (t.tensor("dropout mask", x.axes, BOOL),) if config.dropout else ()
    low = t.tensor("A x", (*x.axes[:-1], rank), dtype, Role.WORKSPACE)
    update = t.tensor("B A x", (*x.axes[:-1], outputs), dtype, Role.WORKSPACE)
    made = [t.gradient_of(w) for w in (a, b)]
    share = t.tensor("adapter's share of the gradient", x.axes, dtype, Role.WORKSPACE)
    masked = (t.tensor("masked share", x.axes, dtype, Role.WORKSPACE),) if config.dropout else ()
    out = Value(result.tensor, result.axes, dtype, True)
    moved, elements = traffic(x), product(x.axes)
    draws = [Move(2 * moved + elements)] if config.dropout else []
    masks = [Move(moved + elements), Move(2 * moved + elements)] if config.dropout else []
    t.append(
        "adapter in one node",
        (x, result, a, b),
        (out,),
        forward=(
            *allocs(*dropped, *kept),
            *frees(*kept),
            *allocs(low, update),
            *frees(update, low),
        ),
        saves=(x.tensor, *dropped),
        costs=(
            *draws,
            Gemm(rows, rank, inputs, dtype),
            Gemm(rows, outputs, rank, dtype),
            Move(3 * traffic(result)),
        ),
        backward=(
            *allocs(*made, *kept, share, *masked),
            *frees(share, *kept, *masked),
        ),
        gradients=(Gradient(result, None), Gradient(a, made[0]), Gradient(b, made[1])),
        backward_costs=(
            *(Gemm(rows, rank, outputs, dtype) for _ in range(2)),  # for A, and for x
            Gemm(inputs, rank, rows, dtype, of_weight=True),
            Gemm(rank, rows, inputs, dtype),
            Gemm(rank, outputs, rows, dtype, of_weight=True),
            Gemm(rows, inputs, rank, dtype),
            *masks,
            Move(3 * moved),
        ),
    )
    for tensor in dropped:
        t.last_use[tensor] = len(t.ops) - 1
    return out


def lora_weight(t: Tape, name: str, axes: tuple[Size, ...], trained: bool = True) -> Value:
    """An adapter's tensor in the adapter's type, `trained` unless nothing runs it; further adapters
    that are resident take its bytes again, and nothing else."""
    config = t.policy.adapter
    assert config is not None
    if (known := t.declared(f"{t.module}.{name}")) is not None:
        return known.value
    trained = trained and t.policy.trains_adapters
    weight = _adapter_weight(t, name, axes, trainable=trained)
    if config.num_adapters > 1:
        idle = (config.num_adapters - 1, *axes)
        _adapter_weight(t, f"{name} of the other adapters", idle, trainable=False)
    return weight.value


def _adapter_weight(t: Tape, name: str, axes: tuple[Size, ...], *, trainable: bool) -> Weight:
    tensor = Tensor(name, axes, t.policy.adapter_dtype, Role.ADAPTERS, t.module)
    path, trained = f"{t.module}.{name}", trainable and not t.records_no_graph
    t.weights.append(Weight(path, axes, tensor, trainable=trained, kind="adapter"))
    return t.weights[-1]
