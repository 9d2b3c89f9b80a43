"""Log-probabilities of labels from logits that are all there, as trainers of preferences without a
reference compute them."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.elementwise import copy
from napkinmath.ops.index import constant, slice_of
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.nodes import freed, gradients_of, made, result, workspaces


def label_log_probabilities(t: Tape, logits: Value) -> Value:
    """One log-probability a sequence, from one kernel that keeps the logits and two numbers a
    token.

    Source: trl 1.16 trainer/utils.py selective_log_softmax, which on a GPU is
    kernels/logprob_entropy.py _LogProbEntropyFunction.
    """
    *batch, length, vocabulary = logits.axes
    tokens = (*batch, length - 1)
    scored = slice_of(t, logits, (*tokens, vocabulary))
    labels = constant(t, "labels to score", tokens, INT64, Role.LOGITS)
    out = result(t, "log-probabilities", tokens, FP32, (scored,), Role.LOGITS)
    names = ("entropy", "normalizer", "expected logit")
    entropy, normalizer, expected = workspaces(t, tokens, FP32, names, Role.LOGITS)
    gradients = gradients_of(t, (scored,))
    for gradient in gradients:
        assert gradient.tensor is not None
        gradient.tensor.role = Role.LOGITS
    kept = (normalizer, expected)
    t.append(
        "log-probabilities of the labels",
        (scored,),
        (out,),
        forward=(*made(out.tensor, entropy, *kept), *freed(entropy)),
        saves=(scored.tensor, labels.tensor, *kept),
        costs=(Move(traffic(scored)),),
        backward=made(*(g.tensor for g in gradients)),
        gradients=gradients,
        backward_costs=(Move(2 * traffic(scored)),),
    )
    t.touch(labels.tensor, *kept)
    return t.op("mean of the loss", (out,), (1,), FP32, gradients=(LIKE,), role=Role.LOGITS)


def chosen_cross_entropy(t: Tape, logits: Value) -> Value:
    """Cross-entropy of the first half of the batch, over a contiguous copy without the last
    position."""
    sequences, length, vocabulary = logits.axes
    chosen = slice_of(t, logits, (sequences // 2, length, vocabulary))
    with t.scope() as frame:
        shifted = slice_of(t, chosen, (sequences // 2, length - 1, vocabulary))
        flat = copy(t, shifted, name="shifted logits", role=Role.LOGITS)
        frame.local(flat)
        return cross_entropy(t, flat, upcast=False)
