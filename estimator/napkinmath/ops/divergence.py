"""Divergence of a student's distribution from a teacher's, over the whole vocabulary or over the
teacher's likeliest words."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.ir.costs import Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Role, Value
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.ops.elementwise import OUTPUT, cast, mul, scale, unary
from napkinmath.ops.index import constant, slice_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.costs import Cost


def reverse_kl(t: Tape, student: Value, teacher: Value) -> Value:
    """KL(student || teacher) of all but the last position, summed over what the labels do not mask:
    ten tensors of b·s·v at its height.

    Both logits are divided by the temperature, both log-probabilities and the masked divergence are
    locals until the function returns; autograd keeps the student's log-probabilities, their
    exponential and the difference. Source: trl 1.16 experimental/gkd/gkd_trainer.py
    generalized_jsd_loss (beta 1); aten/src/ATen/native/Loss.cpp _kl_div_log_target.
    """
    first = len(t.ops)
    with t.scope() as frame:
        *batch, length, vocabulary = student.axes
        axes = (*batch, length - 1, vocabulary)
        scaled = [scale(t, slice_of(t, logits, axes)) for logits in (student, teacher)]
        frame.local(*scaled)
        own, taught = (log_softmax(t, logits) for logits in scaled)
        frame.local(own, taught)
        probabilities = unary(t, "exp", own, saves=OUTPUT)
        masked = _masked(t, mul(t, probabilities, _difference(t, own, taught)))
        frame.local(masked)
        cost = Move(traffic(own))
        loss = t.op("sum", (masked,), (1,), own.dtype, gradients=(PASS,), costs=(cost,))
    for op in t.ops[first:]:
        for tensor in (*(v.tensor for v in op.outputs), *(g.tensor for g in op.gradients)):
            if tensor is not None:
                tensor.role = Role.LOGITS
    return loss


def top_k_divergence(t: Tape, student: Value, kept: Size, ranks: int) -> Value:
    """Divergence over the `kept` words of each token that a teacher finds likeliest: the student's
    logits (b, s, v) in fp32 are read there and nothing of them is saved; their gradient is zeros
    with the words' own.

    `ranks` share the vocabulary: each reads the words that it has, and they are summed. Source:
    NeMo-RL 7ea279ab distributed/model_utils.py get_distillation_topk_logprobs_from_logits,
    gather_logits_at_global_indices; algorithms/loss/loss_functions.py DistillationLossFn.
    """
    with t.scope() as frame:
        axes = (*student.axes[:-1], kept)
        wide = cast(t, student, FP32, role=Role.LOGITS)
        words = constant(t, "teacher's likeliest words", axes, INT64, Role.LOGITS)
        taught = constant(t, "teacher's largest logits", axes, FP32, Role.LOGITS)
        frame.local(wide, words, taught)
        cost: tuple[Cost, ...] = (Move(2 * traffic(taught)),)
        if ranks > 1:
            sent = traffic(taught)
            cost += (Collective("all-reduce", sent, ranks=ranks, axis="tensor", overlaps=False),)
        chosen = t.op(
            "gather",
            (wide,),
            axes,
            FP32,
            saves=(words,),
            gradients=(LIKE,),
            costs=cost,
            backward_costs=(Move(traffic(wide)),),
            role=Role.LOGITS,
        )
        for gradient in t.ops[-1].gradients:
            if gradient.tensor is not None:
                gradient.tensor.role = Role.LOGITS
        own, target = log_softmax(t, chosen), log_softmax(t, taught)
        frame.local(own, target)
        divergence = mul(t, unary(t, "exp", own, saves=OUTPUT), _difference(t, own, target))
        cost = (Move(traffic(divergence)),)
        return t.op("sum", (divergence,), (1,), FP32, gradients=(PASS,), costs=cost)


def top_k(t: Tape, logits: Value, kept: Size, ranks: int) -> Value:
    """The `kept` largest of each token's logits, found in an fp32 copy of them; ranks that share the
    vocabulary exchange theirs. Source: NeMo-RL 7ea279ab distributed/model_utils.py
    distributed_vocab_topk."""
    with t.scope() as frame:
        wide = cast(t, logits, FP32, role=Role.LOGITS)
        frame.local(wide)
        axes = (*logits.axes[:-1], kept)
        words = t.tensor("likeliest words", axes, INT64, Role.LOGITS)
        out = Value(t.tensor("largest logits", axes, FP32, Role.LOGITS), axes, FP32)
        costs: tuple[Cost, ...] = (Move(traffic(wide)),)
        if ranks > 1:
            sent = 3 * ranks * traffic(out)  # fp32 values, int64 words
            costs += (Collective("all-gather", sent, ranks=ranks, axis="tensor", overlaps=False),)
        made = ((ALLOC, words), (ALLOC, out.tensor), (FREE, words))
        t.append("top-k", (wide,), (out,), forward=made, costs=costs)
        return out


def _difference(t: Tape, own: Value, taught: Value) -> Value:
    both, cost = (own, taught), Move(3 * traffic(own))
    return t.op("sub", both, own.axes, own.dtype, gradients=(PASS, PASS), costs=(cost,))


def _masked(t: Tape, divergence: Value) -> Value:
    moved = 3 * traffic(divergence)
    return t.op(
        "index by mask",
        (divergence,),
        divergence.axes,
        divergence.dtype,
        gradients=(LIKE,),
        costs=(Move(moved),),
        backward_costs=(Move(moved, 2),),
    )


def log_softmax(t: Tape, x: Value) -> Value:
    """Log-probabilities over the last axis in the type of `x`; keeps its output."""
    out = unary(t, "log_softmax", x, saves=OUTPUT)
    if out.requires_grad:
        t.ops[-1].backward_costs = (Move(3 * traffic(x)),)
    return out
