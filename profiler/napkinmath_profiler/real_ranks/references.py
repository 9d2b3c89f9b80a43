"""A reference's forward within the steps of real ranks, in the order of trl's
dpo_trainer.py _compute_loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from napkinmath_profiler.tracing.observation import mark_persistent
from napkinmath_profiler.tracing.storage_tracker import StorageTracker
from napkinmath_profiler.tracing.training_step import TrainingLoop


def prepared_reference(
    model: nn.Module, strategy: str, spread: Callable[[nn.Module], tuple[Any, Any]], mesh: Any
) -> Any:
    """The reference as trl's models/utils.py prepare_fsdp has it: FSDP1 wraps it as the policy,
    FSDP2 makes one unit of it; whole under DDP."""
    model.requires_grad_(False)
    if strategy == "fsdp1":
        return spread(model)[0].eval()
    if strategy == "fsdp2":
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model.eval()


def refer(loop: TrainingLoop, reference: nn.Module, inputs: dict[str, Any], steps: int) -> None:
    """Makes every micro-step of the loop run the reference between forward and backward."""
    run = loop.run

    def micro_step(forward: Callable[..., Any]) -> None:
        loss = forward(**inputs)["loss"]
        with torch.no_grad():
            reference(**inputs)
        (loss / steps if steps > 1 else loss).backward()

    def marked() -> None:
        tracker = StorageTracker.active
        if tracker is not None:
            mark_persistent(reference, {}, tracker)
        run()

    loop._micro_step = micro_step  # type: ignore[method-assign]
    loop.run = marked  # type: ignore[method-assign]
