"""Exits of a language model whose logits leave it, since the trainer computes the loss: a
student's, a teacher's, and those of preferences without a reference."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size, ceil_div, minimum
from napkinmath.config.workload_config import Head
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import Tape
from napkinmath.lowering.held_outputs import TAUGHT_LOGITS
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.score_head import ScoreHead, TokenClassificationHead
from napkinmath.ops.divergence import reverse_kl, top_k, top_k_divergence
from napkinmath.ops.elementwise import add, cast
from napkinmath.ops.index import constant
from napkinmath.ops.likelihood import (
    chosen_cross_entropy,
    completion_log_probabilities,
    divided_in_place,
    label_log_probabilities,
    shifted_log_probabilities,
    whole_log_probabilities,
)
from napkinmath.ops.loss import compiled_entropy, cross_entropy_in_place, cross_entropy_of_rows


def other_head(head: CausalLmHead, kind: Head) -> Part:
    """The exit of that kind in the place of a language model's own."""
    if kind is Head.SCORE:
        return ScoreHead(exit=head)
    if kind is Head.TOKEN_SCORES:
        return TokenClassificationHead(exit=head, dropout=0.0, kind="linear")
    if kind is Head.LOGITS:
        return LogitsHead(head=head)
    if kind is Head.STUDENT:
        return DistillationHead(head=head)
    if kind is Head.HIDDEN:
        return HiddenHead(head=head)
    if kind is Head.COMPLETION:
        return CompletionHead(head=head)
    if kind is Head.KERNEL:
        return KernelHead(head=head)
    return PreferenceHead(head=head, cross_entropy=kind is Head.ODDS_RATIO)


def returned_logits(t: Tape, head: CausalLmHead, x: Value, kept: Size = 0) -> Value:
    """What a model without labels returns: fp32 under autocast (accelerate utils/operations.py
    convert_outputs_to_fp32); `kept` positions at the end alone."""
    with t.scope() as frame:
        logits = head.logits(t, x, kept)
        frame.local(logits)
        return cast(t, logits, FP32, role=Role.LOGITS) if t.policy.autocast is not None else logits


class LogitsHead(Part):
    """The exit of a teacher: logits and no loss, or the largest of them alone."""

    head: CausalLmHead = CausalLmHead()
    kept: Size = 0
    """Logits of each token that leave it; 0: all."""
    upcasts: bool = False
    """The forward makes them fp32 (`logits.float()`, transformers before 4.46)."""

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if not self.kept:
            with t.scope() as frame:
                logits = returned_logits(t, self.head, x)
                if not self.upcasts:
                    return logits
                frame.local(logits)
                return cast(t, logits, FP32, role=Role.LOGITS)
        with t.scope() as frame:
            logits = returned_logits(t, self.head, x)
            frame.local(logits)
            return top_k(t, logits, self.kept, _vocabulary_ranks(t, logits))


def _vocabulary_ranks(t: Tape, logits: Value) -> int:
    """Ranks that each have a part of these logits."""
    tensor = t.policy.tensor
    return tensor.degree if tensor is not None and tensor.splits_loss(logits) else 1


class HiddenHead(Part):
    """The exit of a teacher whose logits are made in chunks beside a student's."""

    head: CausalLmHead = CausalLmHead()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        hidden = self.head.hidden(t, x)
        self.head.weight(t, hidden)
        with t.scope() as frame:
            frame.local(hidden)
            return hidden if t.policy.autocast is None else cast(t, hidden, t.policy.autocast)


class DistillationHead(Part):
    """A language model's head and the divergence from a teacher (trl gkd_trainer.py
    compute_loss)."""

    head: CausalLmHead = CausalLmHead()
    taught_width: Size = 0
    """Of the hidden states of a teacher whose logits are not made; 0: they are."""
    kept: Size = 0
    """Logits of each token that the teacher hands on; 0: all."""

    @property
    def returns_logits(self) -> bool:
        return True

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if self.taught_width:
            from napkinmath.models.layers.patched_distillation import patched_distillation

            hidden = self.head.hidden(t, x)
            adapted = self.head.name if self.head.is_adapted(t) else ""
            weight = self.head.weight(t, hidden)
            return patched_distillation(t, hidden, weight, self.taught_width, adapted)
        with t.scope() as frame:
            logits = returned_logits(t, self.head, x)
            if self.kept:
                frame.local(logits)
                return top_k_divergence(t, logits, self.kept, _vocabulary_ranks(t, logits))
            taught = constant(t, TAUGHT_LOGITS, logits.axes, logits.dtype, Role.LOGITS)
            frame.local(logits, taught)
            return reverse_kl(t, logits, taught)


class CompletionHead(Part):
    """A language model's head over the completions of a rollout, and the log-probabilities of their
    labels: of the last `tokens`, or of half the sequence."""

    head: CausalLmHead = CausalLmHead()
    tokens: Size = 0
    in_chunks: bool = False
    """By TRL's fused head, which is part of the model's forward."""
    shifted: bool = False
    """All labels, from copies of all logits (LossCode.shifts_rollouts)."""

    @property
    def returns_logits(self) -> bool:
        return not self.in_chunks

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if self.shifted:
            return shifted_log_probabilities(t, returned_logits(t, self.head, x))
        length = x.axes[-2]
        tokens = minimum(self.tokens or ceil_div(length, 2), length - 1)
        if self.in_chunks:
            hidden = self.head.hidden(t, x)
            with t.scope() as frame:
                frame.local(hidden)
                return self.head.log_probabilities(t, hidden, self.head.weight(t, hidden), tokens)
        kept = 0 if t.policy.stack.loss.all_rollout_logits else tokens + 1
        return completion_log_probabilities(t, returned_logits(t, self.head, x, kept), tokens)


class KernelHead(Part):
    """A language model's head and the log-probabilities of all labels by flash-attention's
    cross-entropy (catalog/rollout_trainers.py label_kernel)."""

    head: CausalLmHead = CausalLmHead()
    in_place: bool = True
    whole: bool = False
    """By torch's log_softmax instead (OpenRLHF v0.5.0 models/utils.py log_probs_from_logits)."""
    entropy: bool = False
    """The loss has their entropy in it too: nothing is then written over the logits."""

    @property
    def returns_logits(self) -> bool:
        return True

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        if self.whole:
            return whole_log_probabilities(t, returned_logits(t, self.head, x))
        with t.scope() as frame:
            logits = self.head.logits(t, x)
            frame.local(logits)
            if self.in_place:  # verl divides `logits.squeeze(0)`, a view
                logits = divided_in_place(t, logits, logits.axes)
            else:
                logits = cast(t, logits, FP32, role=Role.LOGITS)
                frame.local(logits)
            trained = self.entropy and logits.requires_grad
            entropy = compiled_entropy(t, logits) if trained else None
            alone = self.in_place and not trained
            loss = (cross_entropy_in_place if alone else cross_entropy_of_rows)(t, logits)
            return loss if entropy is None else add(t, loss, entropy)


class PreferenceHead(Part):
    """A language model's head and the log-probabilities of the labels of both answers; with
    `cross_entropy` that of the chosen half before.

    Source: trl 1.16 experimental/orpo/orpo_trainer.py and experimental/cpo/cpo_trainer.py
    concatenated_forward; SimPO is the latter with cpo_alpha 0.
    """

    head: CausalLmHead = CausalLmHead()
    cross_entropy: bool = False

    @property
    def returns_logits(self) -> bool:
        return True

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        patch = t.policy.patch
        if patch is not None and patch.defers_logits:
            weight = self.head.plain_weight(t, x)
            if weight is not None:
                from napkinmath.models.layers.patched_preferences import patched_preferences

                return patched_preferences(t, self.head.hidden(t, x), weight, self.cross_entropy)
        with t.scope() as frame:
            logits = returned_logits(t, self.head, x)
            frame.local(logits)
            if not self.cross_entropy:
                return label_log_probabilities(t, logits)
            chosen = chosen_cross_entropy(t, logits)
            return add(t, chosen, label_log_probabilities(t, logits))
