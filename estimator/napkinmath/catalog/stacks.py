"""Stacks: whose training code runs, and when: each quirk of a library or era that moves memory is a field of a row here."""

from __future__ import annotations

from napkinmath.record import Record


class Stack(Record):
    """How a library of an era runs the same model; a field is priced wherever the builders and the loss ask for it."""

    name: str
    meaning: str
    source: str
    reentrant_checkpointing: bool = False
    default_optimizer: str = "adamw-fused"
    logits_upcast: bool = True
    """The loss makes an fp32 copy of the logits."""
    logits_shift_copy: bool = False
    """`logits[..., :-1, :].contiguous()` before the loss (transformers before 4.46)."""
    logits_upcast_in_model: bool = False
    """The model itself upcasts (`logits = logits.float()` in forward, transformers before 4.46) and returns the copy."""
    logits_held: bool = False
    """The caller keeps the returned logits through the backward."""
    rms_norm: str = "eager"
    """'eager' is the chain of small ops, 'fused' is F.rms_norm."""


STACKS: dict[str, Stack] = {
    row.name: row
    for row in (
        Stack(name="hf", meaning="transformers 5 with its Trainer or TRL", source="transformers 5.23"),
        Stack(name="hf-bare", meaning="a bare loop over transformers 5: torch's AdamW, outputs dropped before the backward", source="transformers 5.23", default_optimizer="adamw-foreach"),
        Stack(name="hf-2024", meaning="transformers 4.3x to 4.45 with its Trainer", source="transformers 4.40 modeling_llama.py, trainer.py", reentrant_checkpointing=True, default_optimizer="adamw-foreach", logits_shift_copy=True, logits_upcast_in_model=True),
    )
}  # fmt: skip
