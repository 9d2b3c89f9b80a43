"""Heads that score the hidden states of a language model or an encoder: a sequence by one token,
every token, the ends of an answer; a reward model's, and none.

Sources: transformers 5.23 modeling_layers.py GenericForSequenceClassification,
GenericForTokenClassification, GenericForQuestionAnswering; loss/loss_utils.py. Classes of their own
(GPT-2, BERT) differ in no tensor larger than (b, s) scores.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.config.workload_config import Head
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import LIKE, PASS, Tape
from napkinmath.lowering.linears import TASK_HEAD, TOKEN_HEAD
from napkinmath.lowering.untrained import leave_untrained
from napkinmath.ops.elementwise import copy, dropout
from napkinmath.ops.embeddings import mean_of_tokens
from napkinmath.ops.index import chunk, slice_of
from napkinmath.ops.loss import cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.ops.nodes import node, result


class ScoringHead(Part):
    """What all heads of scores share: the layers of the replaced exit before its logits, and the
    number of scores."""

    exit: Part | None = None
    """Its norm (and projection) come first; None where the last layer's output is scored."""
    labels: int = 2
    name: str = "score"
    bias: bool = False
    dropout: float = 0.0
    kind: str = TASK_HEAD

    def scores(self, t: Tape, x: Value, labels: int = 0) -> Value:
        """Norm, dropout and one linear: (b, s, labels)."""
        with t.scope() as frame:
            hidden = x if self.exit is None else self.exit.hidden(t, x)
            frame.local(hidden)
            dropped = dropout(t, hidden, self.dropout)
            frame.local(dropped)
            return linear(
                t,
                dropped,
                self.name,
                labels or self.labels,
                bias=self.bias,
                kind=self.kind,
                role=Role.LOGITS,
            )


class ScoreHead(ScoringHead):
    """A reward model or a critic: one output a token, and a mean that stands for the loss over
    scores, which are too few to matter (trl 1.16 reward_trainer.py)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            hidden = x if self.exit is None else self.exit.hidden(t, x)
            frame.local(hidden)
            if t.policy.stack.loss.scores_beside_logits and self.exit is not None:
                self.exit.unread_logits(t, hidden)
            scores = linear(t, hidden, "score", 1, bias=False, role=Role.LOGITS)
            frame.local(scores)
            return mean_of(t, slice_of(t, scores, (b, 1)))


class SequenceClassificationHead(ScoringHead):
    """Scores of every token, of which the last one's that is no padding are picked; cross-entropy
    in their type, or a mean of squares where there is one score."""

    pads: bool = True
    """The config has a padding token, without which the class takes one sequence at a time."""

    @property
    def task(self) -> str:
        return "sequence-classification"

    def ending_in(self, head: Head) -> Part | None:
        """A reward trainer makes the same class with one score."""
        return ScoreHead(exit=self.exit) if head is Head.SCORE else None

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            scores = self.scores(t, x)
            frame.local(scores)
            picked = result(t, "picked scores", (b, self.labels), scores.dtype, (scores,))
            node(
                t,
                "index",
                (scores,),
                (picked,),
                new=(picked.tensor,),
                costs=(Move(2 * traffic(picked)),),
                backward_costs=(Move(traffic(scores, picked)),),
            )
            frame.local(picked)
            if self.labels == 1:
                return mean_of(t, picked)
            return cross_entropy(t, picked, upcast=False)


class TokenClassificationHead(ScoringHead):
    """Dropout, scores of every token, and their cross-entropy in fp32. A process reward model is
    one (trl 1.10 experimental/prm/prm_trainer.py, which switches dropout off)."""

    bias: bool = True
    kind: str = TOKEN_HEAD
    dropout: float = 0.1
    upcast: bool = True
    """The loss is loss_utils.ForTokenClassification; classes with a loss of their own do not
    widen."""

    @property
    def task(self) -> str:
        return "token-classification"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            scores = self.scores(t, x)
            frame.local(scores)
            return cross_entropy(t, scores, upcast=self.upcast)


class QuestionAnsweringHead(ScoringHead):
    """Two scores of every token, split and copied; the mean of the cross-entropies over positions
    of the first and of the last token of the answer."""

    name: str = "qa_outputs"
    bias: bool = True
    kind: str = TOKEN_HEAD

    @property
    def task(self) -> str:
        return "question-answering"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            both = self.scores(t, x, 2)
            frame.local(both)
            ends = [t.view(part, (b, s)) for part in chunk(t, both, (1, 1), name="split")]
            copies = [copy(t, end, name="scores of one end", role=Role.LOGITS) for end in ends]
            frame.local(*copies)
            losses = tuple(cross_entropy(t, one, upcast=False) for one in copies)
            return t.op("add", losses, (1,), losses[0].dtype, gradients=(PASS, PASS))


class HiddenStatesMean(ScoringHead):
    """No head: the mean of the last hidden states stands for a loss that others compute (a model
    that embeds)."""

    @property
    def task(self) -> str:
        return "feature-extraction"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            hidden = self.hidden(t, x)
            frame.local(hidden)
            return mean_of(t, hidden)

    def hidden(self, t: Tape, x: Value) -> Value:
        return x if self.exit is None else self.exit.hidden(t, x)

    def ending_in(self, head: Head) -> Part | None:
        return EmbeddingHead(exit=self) if head is Head.EMBEDDINGS else None


class EmbeddingHead(Part):
    """The mean of a text's last hidden states. The states stay in the trainer's dictionary of
    features until the loss is there (sentence-transformers 6.2 base/modules/transformer.py
    forward)."""

    exit: Part

    @property
    def task(self) -> str:
        return "feature-extraction"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        states = self.exit.hidden(t, x)
        t.outliving.append(states.tensor)
        embeddings = mean_of_tokens(t, states)
        leave_untrained(t, (embeddings,))
        return embeddings


def mean_of(t: Tape, x: Value) -> Value:
    """The mean of all elements: fp32 under autocast."""
    return t.op(
        "mean",
        (x,),
        (1,),
        FP32 if t.policy.autocast else x.dtype,
        gradients=(LIKE,),
        costs=(Move(traffic(x)),),
        role=Role.LOGITS,
    )
