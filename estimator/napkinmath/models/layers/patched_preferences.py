"""Preferences without a reference (ORPO, SimPO) as patched operations run them: no logits of the
pair, which are made in chunks twice where the chosen half has a cross-entropy too."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.patched import chunked_cross_entropy, patched_log_probabilities
from napkinmath.models.layers.patched_distillation import shifted_rows
from napkinmath.ops.elementwise import add, cast
from napkinmath.ops.index import constant, slice_of


def patched_preferences(t: Tape, hidden: Value, weight: Value, cross_entropy: bool) -> Value:
    """The loss of hidden states (sequences, s, h): log-probabilities of every label, and with
    `cross_entropy` that of the chosen half.

    Source: kernels/napkinmath_kernels/patching/deferred_logits.py.
    """
    with t.scope() as frame:
        frame.local(hidden)
        if t.policy.autocast is not None:
            hidden = cast(t, hidden, t.policy.autocast)
            frame.local(hidden)
        if not cross_entropy:
            return _log_probabilities(t, hidden, weight)
        chosen = _chosen_cross_entropy(t, hidden, weight)
        return add(t, chosen, _log_probabilities(t, hidden, weight))


def _chosen_cross_entropy(t: Tape, hidden: Value, weight: Value) -> Value:
    """Of the first half of the batch. Padding has no label, so the rows that have one are copied
    together."""
    sequences, length, width = hidden.axes
    with t.scope() as frame:
        rows = shifted_rows(t, slice_of(t, hidden, (sequences // 2, length, width)))
        frame.local(rows)
        return chunked_cross_entropy(t, rows, weight, rows.axes[0] - 1)


def _log_probabilities(t: Tape, hidden: Value, weight: Value) -> Value:
    with t.scope() as frame:
        rows = shifted_rows(t, hidden)
        labels = constant(t, "labels to score", (rows.axes[0],), INT64, Role.LOGITS)
        frame.local(rows, labels)
        found = patched_log_probabilities(t, rows, weight, labels, rows.axes[0], statistics=False)
        return t.op("mean of the loss", (found,), (1,), FP32, gradients=(LIKE,), role=Role.LOGITS)
