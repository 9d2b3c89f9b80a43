"""The divergences of TRL's distillation trainers, of patched models computed by ours.

GKD's trainer asks student and teacher for their logits and compares them (trl 1.16
experimental/gkd/gkd_trainer.py generalized_jsd_loss). Where both models are patched, the logits of
neither are made (`DeferredLogits`). Its `DistillationTrainer` calls both models without their heads
and takes the divergence in fp32 tiles (trainer/distillation_trainer.py _chunked_divergence_loss);
a look at the student's head decides there whose function runs. What ours does not do stays TRL's:
heads with a bias or spread over ranks, reductions that give a tensor.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.divergence import linear_divergence

GKD, TRAINER, LOSS = "trl.experimental.gkd.gkd_trainer", "GKDTrainer", "generalized_jsd_loss"
CHUNKED, CHUNKED_LOSS = "trl.trainer.distillation_trainer", "_chunked_divergence_loss"
_REDUCTIONS = ("batchmean", "sum")


@dataclass(frozen=True)
class ChosenDivergence:
    """Stands in GKD's trainer for its loss."""

    theirs: Any

    def __call__(
        self,
        student_logits: Any,
        teacher_logits: Any,
        labels: torch.Tensor | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: Any = None,
    ) -> Any:
        """The same loss, of hidden states where neither model's logits are made yet."""
        compared = getattr(student_logits, "divergence", None)
        if compared is not None and (num_items_in_batch is not None or reduction in _REDUCTIONS):
            if labels is None and num_items_in_batch is None and reduction == "batchmean":
                num_items_in_batch = max(student_logits.shape[0], 1)
            found = compared(
                teacher_logits,
                None if labels is None else labels != -100,
                beta,
                temperature,
                "sum" if reduction == "sum" else "mean",
                num_items_in_batch,
            )
            if found is not None:
                return found
            warnings.warn(
                "the teacher is not patched: GKD makes the logits of both models; patch(teacher) too",
                stacklevel=2,
            )
        made = [
            getattr(x, "materialize", lambda x=x: x)() for x in (student_logits, teacher_logits)
        ]
        given = (labels, beta, temperature, reduction, num_items_in_batch)
        return self.theirs(*made, *given)


@dataclass(frozen=True)
class ChosenChunks:
    """Stands in the module of TRL's distillation trainer for its chunked loss."""

    theirs: Any
    is_ours: Any
    """Whether a head's weight is a patched model's."""

    def __call__(
        self,
        student_hidden: torch.Tensor,
        teacher_hidden: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_weight: torch.Tensor,
        mask: torch.Tensor,
        beta: float,
        **options: Any,
    ) -> Any:
        """(loss, the student's entropies summed, number of tokens that count)."""
        given = (student_hidden, teacher_hidden, student_weight, teacher_weight, mask, beta)
        biases = [options.get(f"{who}_lm_head_bias") for who in ("student", "teacher")]
        scales = [options.get(f"{who}_logit_scale", 1.0) for who in ("student", "teacher")]
        whole = type(teacher_weight) in (torch.Tensor, torch.nn.Parameter)
        plain = biases == [None, None] and min(scales) > 0 and whole
        if not (plain and self.is_ours(student_weight)):
            return self.theirs(*given, **options)
        caps = [
            options.get(f"{who}_final_logit_softcapping") or 0.0 for who in ("student", "teacher")
        ]
        found = linear_divergence(
            student_hidden,
            student_weight,
            teacher_hidden,
            teacher_weight,
            mask=mask,
            beta=float(beta),
            temperature=options.get("temperature", 1.0),
            num_items=options.get("num_items_in_batch"),
            logit_scale=scales[0],
            softcap=caps[0],
            teacher_logit_scale=scales[1],
            teacher_softcap=caps[1],
            entropy=True,
        )
        return found.loss, found.entropy, (mask != 0).sum()


def compares_logits() -> bool:
    """Whether GKD's trainer is loaded."""
    return GKD in sys.modules


def homes() -> list[tuple[Any, str]]:
    """(what has it, name) of the functions that are replaced, of the trainers that are loaded."""
    trainer = getattr(sys.modules.get(GKD), TRAINER, None)
    return [(trainer, LOSS), (sys.modules.get(CHUNKED), CHUNKED_LOSS)]
