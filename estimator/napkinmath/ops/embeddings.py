"""Embeddings of whole texts: the mean over a text's tokens, and the loss over a batch of them.

Source: sentence-transformers 6.2 sentence_transformer/modules/pooling.py _forward_padded,
util/similarity.py cos_sim, sentence_transformer/losses/multiple_negatives_ranking.py
compute_loss_from_embeddings; torch nn/functional.py normalize.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.ops.elementwise import cast, scale
from napkinmath.ops.index import concatenate, constant
from napkinmath.ops.matmul import bmm


def mean_of_tokens(t: Tape, states: Value) -> Value:
    """(b, s, h) to (b, h): every state times its token's mask, the sum in fp32, divided by the sum
    of the mask."""
    rows, length, width = states.axes
    with t.scope() as frame:
        mask = constant(t, "mask of tokens", (rows, length, 1), states.dtype, Role.ACTIVATIONS)
        frame.local(mask)
        masked = t.op(
            "mul",
            (states, mask),
            states.axes,
            states.dtype,
            gradients=(LIKE, None),
            saves=(mask,),
            costs=(Move(2 * traffic(states)),),
            backward_costs=(Move(2 * traffic(states)),),
        )
        total = t.op(
            "sum",
            (masked,),
            (rows, width),
            FP32,
            gradients=(PASS if masked.dtype is FP32 else LIKE,),  # expanded, or cast once more
            costs=(Move(traffic(masked)),),
            backward_costs=(Move(traffic(masked)),),
        )
        count = constant(t, "sum of the mask", (rows, 1), FP32, Role.ACTIVATIONS)
        frame.local(total, count)
        mean = _row_op(t, "div", total, count)
        return mean if mean.dtype is states.dtype else cast(t, mean, states.dtype)


def in_batch_negatives(t: Tape, anchors: Value, others: Value) -> Value:
    """The cross-entropy of each anchor's positive among all other texts of the batch, by the
    cosine."""
    rows, width = anchors.axes
    candidates = others.axes[0]
    with t.scope() as frame:
        joined = concatenate(t, (others,), others.axes, name="candidates")
        one, other = _normalized(t, anchors), _normalized(t, joined)
        frame.local(joined, one, other)
        axes = (rows, candidates)
        cosines = bmm(t, one, other, 1, rows, candidates, width, axes, name="cosines")
        scores = scale(t, cosines)
        frame.local(scores)
        joined_scores = concatenate(t, (scores,), scores.axes, name="scores")
        frame.local(joined_scores)
        normalizer = t.op(
            "logsumexp",
            (joined_scores,),
            (rows,),
            FP32,
            gradients=(LIKE,),
            saves=(joined_scores,),
            role=Role.LOGITS,
        )
        return t.op("mean of the loss", (normalizer,), (1,), FP32, gradients=(LIKE,))


def _normalized(t: Tape, x: Value) -> Value:
    """Each row divided by its length."""
    lengths = t.op("norm", (x,), (x.axes[0], 1), FP32, gradients=(LIKE,), saves=(x,))
    return _row_op(t, "div", x, lengths)


def _row_op(t: Tape, name: str, x: Value, rows: Value) -> Value:
    """A matrix by one number a row."""
    how = LIKE if rows.requires_grad else None
    saves = (x if rows.requires_grad else None, rows)
    return t.op(name, (x, rows), x.axes, x.dtype, gradients=(LIKE, how), saves=saves)
