"""Outputs that a loop's variable keeps through the optimizer step, until the next forward binds it
anew."""

from __future__ import annotations

from napkinmath.ir.ledger import ALLOC, FREE, Phase, Tensor
from napkinmath.ir.step import Run, Segment, Update

RETURNED = "returned logits"
TAUGHT_LOGITS, TAUGHT_STATES = "teacher's logits", "teacher's hidden states"


def hold_through_update(update: Update, runs: list[Run]) -> None:
    """Keeps the logits that the head returned from clipping to zero_grad. Source: litgpt 0.4
    finetune/full.py, lora.py fit."""
    made = next(
        (v.tensor for op in runs[-1].block.ops for v in op.outputs if v.tensor.name == RETURNED),
        None,
    )
    if made is None:
        return
    held = Tensor(
        "returned logits, still bound", made.axes, made.dtype, made.role, made.module, made.source
    )
    update.clip = [Segment("loop's variables", Phase.STEP, [(ALLOC, held)]), *update.clip]
    update.zero = [*update.zero, Segment("loop's variables", Phase.STEP, [(FREE, held)])]
