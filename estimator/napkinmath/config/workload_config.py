"""Workload: what is trained besides plain next-token prediction, and what happens in the middle of
training."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record


class WorkloadKind(str, Enum):
    """The training method around the step; SFT is the step itself."""

    SFT = "sft"
    DPO = "dpo"
    """Pairs of sequences, and a reference's forward while the policy's activations are held."""
    DISTILL = "distill"
    """A teacher's forward, and both models' log-probabilities in the loss."""
    REWARD = "reward"
    """Pairs of sequences, a score instead of logits."""
    GRPO = "grpo"
    """Rollouts from a key/value cache, a reference's forward, then the step on them."""
    PPO = "ppo"
    """GRPO with a critic that is trained beside the policy."""


class Workload(Record):
    """Phases beside the step. The default is none of them."""

    kind: WorkloadKind = WorkloadKind.SFT
    teacher: str = ""
    """Catalogued name of the model that teaches (distill) or scores rollouts (grpo, ppo)."""
    reference: bool = True
    """The reference's log-probabilities are computed in the step; False: computed before training,
    or not needed (beta 0)."""
    completion_tokens: int = 0
    """Tokens that a rollout generates; 0 is half the sequence."""
    eval_batch: int = 0
    """Sequences of an evaluation in the middle of training; 0 is no evaluation."""
    generate_tokens: int = 0
    """Tokens generated for one micro-batch in the middle of training; 0 is none."""

    @property
    def sequences(self) -> int:
        """Sequences that go through the model for one sample of the batch: a pair, or one."""
        return 2 if self.kind in (WorkloadKind.DPO, WorkloadKind.REWARD) else 1

    @property
    def rolls_out(self) -> bool:
        """Whether the step generates what it trains on."""
        return self.kind in (WorkloadKind.GRPO, WorkloadKind.PPO)

    @property
    def is_plain(self) -> bool:
        """Whether the step is all there is."""
        return self.kind is WorkloadKind.SFT and not self.eval_batch and not self.generate_tokens

    def validate(self) -> None:
        if min(self.completion_tokens, self.eval_batch, self.generate_tokens) < 0:
            raise InputError(
                "completion_tokens, eval_batch and generate_tokens are counts; use 0 for none"
            )
        if self.kind is WorkloadKind.DISTILL and not self.teacher:
            raise InputError("distillation needs a teacher; add --teacher MODEL")
        if self.teacher and self.kind not in (
            WorkloadKind.DISTILL,
            WorkloadKind.GRPO,
            WorkloadKind.PPO,
        ):
            raise InputError(
                f"a teacher has no part in {self.kind.value}; use --workload distill, grpo or ppo"
            )
