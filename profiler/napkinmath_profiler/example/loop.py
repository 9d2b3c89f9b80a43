"""The loop of the training example: steps, a progress bar, checkpoints that a later run goes on
from, and seconds per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from napkinmath.base.whole_file import write_whole
from torch import nn

from napkinmath_profiler.example.model import load_trained_state, trained_state


@dataclass
class Progress:
    """Losses and seconds of the steps so far."""

    losses: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return len(self.losses)

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Median speed, first step aside: it allocates and compiles."""
        later = sorted(self.seconds[1:] or self.seconds)
        return tokens_per_step / later[len(later) // 2]


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Writes a checkpoint whole or not at all."""
    state = {
        "trained": trained_state(model),
        "optimizer": optimizer.state_dict(),
        "losses": progress.losses,
        "seconds": progress.seconds,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: torch.save(state, file), force=True)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Goes back to where a checkpoint was written; a new Progress if there is none."""
    if not path.exists():
        return Progress()
    state = torch.load(path, map_location="cpu", weights_only=True)
    load_trained_state(model, state["trained"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return Progress(list(state["losses"]), list(state["seconds"]))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """One step on one batch; its loss."""
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def run_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_of: Callable[[int], torch.Tensor],
    num_steps: int,
    *,
    checkpoint: Path,
    save_every: int,
    advance: Callable[[float], Any],
) -> Progress:
    """Trains until `num_steps` steps are done, from the checkpoint if there is one; `advance` is
    given each loss."""
    model.train()
    progress = load_checkpoint(checkpoint, model, optimizer)
    for loss in progress.losses:
        advance(loss)
    for step in range(progress.num_steps, num_steps):
        start = time.perf_counter()
        loss = train_step(model, optimizer, batch_of(step))
        progress.seconds.append(time.perf_counter() - start)
        progress.losses.append(loss)
        advance(loss)
        if progress.num_steps % save_every == 0 or progress.num_steps == num_steps:
            save_checkpoint(checkpoint, model, optimizer, progress)
    return progress
