"""The exit of a student: its logits beside the teacher's, and their divergence for a loss."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.ir.ledger import Role, Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.ops.divergence import reverse_kl
from napkinmath.ops.elementwise import cast
from napkinmath.ops.index import constant


def returned_logits(t: Tape, head: CausalLmHead, x: Value) -> Value:
    """What a model without labels returns: fp32 under autocast (accelerate utils/operations.py
    convert_outputs_to_fp32)."""
    with t.scope() as frame:
        logits = head.logits(t, x)
        frame.local(logits)
        return cast(t, logits, FP32, role=Role.LOGITS) if t.policy.autocast is not None else logits


class LogitsHead(Part):
    """The exit of a teacher: logits and no loss."""

    head: CausalLmHead = CausalLmHead()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        return returned_logits(t, self.head, x)


class DistillationHead(Part):
    """A language model's head whose logits leave the model, since the trainer computes the loss
    (trl gkd_trainer.py compute_loss)."""

    head: CausalLmHead = CausalLmHead()

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            logits = returned_logits(t, self.head, x)
            taught = constant(t, "teacher's logits", logits.axes, logits.dtype, Role.LOGITS)
            frame.local(logits, taught)
            return reverse_kl(t, logits, taught)
