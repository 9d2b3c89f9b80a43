"""Heads of models that score: one score for each token, of which the last one's counts, and two
for each that ends a step."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.models.layers.norm import Norm
from napkinmath.ops.index import slice_of
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear


class ScoreHead(Part):
    """A reward model or a critic: norm, one output a token, and a mean that stands for the loss over
    scores, which are too few to matter (transformers ForSequenceClassification)."""

    norm: Norm | None = Norm()
    norm_name: str = "model.norm"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = self.norm.record(t, x, self.norm_name) if self.norm else x
            frame.local(hidden)
            scores = linear(t, hidden, "score", 1, bias=False, role=Role.LOGITS)
            frame.local(scores)
            last = slice_of(t, scores, (b, 1))
            return t.op(
                "mean",
                (last,),
                (1,),
                FP32 if t.policy.autocast else last.dtype,
                gradients=(LIKE,),
                costs=(Move(traffic(last)),),
                role=Role.LOGITS,
            )


class TokenScoreHead(Part):
    """A process reward model: norm, a label or none for every token, and their cross-entropy in
    fp32.

    Source: transformers 5.23 modeling_layers.py GenericForTokenClassification, loss/loss_utils.py
    ForTokenClassification; trl 1.10 experimental/prm/prm_trainer.py, which switches dropout off.
    """

    norm: Norm | None = Norm()
    norm_name: str = "model.norm"
    labels: int = 2

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = self.norm.record(t, x, self.norm_name) if self.norm else x
            frame.local(hidden)
            scores = linear(t, hidden, "score", self.labels, bias=True, role=Role.LOGITS)
            frame.local(scores)
            return cross_entropy(t, scores)
