"""Divergence of a student's distribution from a teacher's over the whole vocabulary."""

from __future__ import annotations

from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.ops.elementwise import OUTPUT, mul, scale, unary
from napkinmath.ops.index import slice_of


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
