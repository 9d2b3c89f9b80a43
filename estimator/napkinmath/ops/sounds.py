"""Operations on sounds of axes (rows, channels, steps): convolutions over time, a weight that is
normed anew each time, rows that are masked, and the CTC loss."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Value
from napkinmath.ir.tape import Tape, joined
from napkinmath.ops.divergence import log_softmax
from napkinmath.ops.elementwise import cast
from napkinmath.ops.matmul import autocast_weight
from napkinmath.ops.nodes import freed, gradients_of, made, node, result, same_storage


def convolution(
    t: Tape,
    x: Value,
    name: str,
    outputs: Size,
    kernel: int,
    length: Size,
    *,
    groups: int = 1,
    bias: bool = True,
    weight: Value | None = None,
) -> Value:
    """`nn.Conv1d` of x to `length` steps: keeps its input for the weight's gradient and the weight
    for the input's, one as soon as the other (torch derivatives.yaml convolution_overrideable).

    cuDNN's workspaces are left out: what it takes turns on the algorithm that it picks.
    """
    inputs = x.axes[1] if groups == 1 else x.axes[1] // groups
    with t.scope(name):
        if weight is None:
            weight = t.weight("weight", (outputs, inputs, kernel), kind="conv").value
        values = [x, weight]
        if bias:
            values.append(t.weight("bias", (outputs,), kind="bias").value)
    if t.policy.autocast is not None:
        read = cast(t, x, t.policy.autocast)
        values = [read, *(autocast_weight(t, one) for one in values[1:])]
    x, weight = values[:2]
    out = result(t, "convolved", (x.axes[0], outputs, length), weight.dtype, values)
    cost = Gemm(x.axes[0] * length, outputs, inputs * kernel, weight.dtype)
    node(
        t,
        "conv1d",
        values,
        (out,),
        new=(out.tensor,),
        saves=(x.tensor, weight.tensor),
        costs=(cost,),
        backward_costs=[cost for one in (x, weight) if one.requires_grad],
    )
    return out


def weight_norm(t: Tape, name: str, axes: tuple[Size, ...]) -> Value:
    """`parametrizations.weight_norm` over the last axis: the weight is made for each forward, and
    its norms in fp32 (aten/src/ATen/native/WeightNorm.cpp)."""
    one = (1, 1, axes[-1])
    with t.scope(joined(name, "parametrizations.weight")):
        sizes = t.weight("original0", one, kind="conv").value
        direction = t.weight("original1", axes, kind="conv").value
        values = [direction, sizes]
        out = result(t, "normed weight", axes, direction.dtype, values)
        norms = t.tensor("norms", one, FP32)
        gradients = gradients_of(t, values)
        t.append(
            "weight_norm",
            values,
            (out,),
            forward=(*made(out.tensor, norms), *(() if out.requires_grad else freed(norms))),
            saves=(direction.tensor, sizes.tensor, norms),
            costs=(Move(2 * traffic(out)),),
            backward=made(*(g.tensor for g in gradients)),
            gradients=gradients,
            backward_costs=(Move(4 * traffic(out)),),
        )
        t.touch(norms)
        return out


def masked_rows(t: Tape, x: Value, mask: Value, word: Value | None) -> Value:
    """`x[mask] = word` in place: the backward copies the incoming gradient to blank those rows.

    The few rows that are masked, and their gradients, are left out.
    """
    out = same_storage(x)
    gradients: list[Gradient] = []
    if word is not None and word.requires_grad:
        out.requires_grad = True
        gradients.append(Gradient(word, t.gradient_of(word)))
    if x.requires_grad:
        gradients.append(Gradient(x, t.gradient_of(x)))
    t.append(
        "index_put_",
        (x, mask) if word is None else (x, mask, word),
        (out,),
        forward=(),
        saves=(mask.tensor,),
        backward=made(*(g.tensor for g in gradients)),
        gradients=gradients,
        backward_costs=(Move(2 * traffic(x)),),
    )
    return out


def ctc_loss(t: Tape, logits: Value, labels: Size) -> Value:
    """transformers' ForCTCLoss: log-probabilities in fp32, a table of every step and label with the
    blanks between, and in the backward a second one (ATen/native/cuda/LossCTC.cu; cuDNN's is
    switched off)."""
    wide = log_softmax(t, cast(t, logits, FP32, role=Role.LOGITS))
    rows, steps, _ = wide.axes
    axes = (rows, steps, 2 * labels + 1)
    table = t.tensor("log-probabilities of the paths", axes, FP32, Role.LOGITS)
    second = t.tensor("the same from the end", axes, FP32, Role.LOGITS)
    out = result(t, "ctc_loss", (rows,), FP32, (wide,), Role.LOGITS)
    gradients = gradients_of(t, (wide,))
    for gradient in gradients:
        assert gradient.tensor is not None
        gradient.tensor.role = Role.LOGITS
    moved = Move(2 * traffic(Value(table, axes, FP32)))
    t.append(
        "ctc_loss",
        (wide,),
        (out,),
        forward=(*made(table, out.tensor), *(() if out.requires_grad else freed(table))),
        saves=(wide.tensor, table, out.tensor),
        costs=(moved,),
        backward=(*made(second, *(g.tensor for g in gradients)), *freed(second)),
        gradients=gradients,
        backward_costs=(moved, moved),
    )
    t.touch(table)
    return t.op("reduced loss", (out,), (1,), FP32, gradients=("like",), role=Role.LOGITS)
