"""Variants of a step that change what is kept and when: gradient scaling, selective checkpointing,
torch.compile, caches."""

from __future__ import annotations

import functools

import pytest
import torch
from napkinmath_profiler.trace import trace_config, trace_module
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import LoopOptions
from profiler.traced_families import FAMILIES
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH, ROWS = 64, 32


def test_a_gradient_scaler_unscales_and_steps() -> None:
    loop = LoopOptions(autocast_dtype=torch.float16, max_grad_norm=1.0)
    result = trace_config(FAMILIES["llama"], sequence_length=16, dtype="fp32", loop=loop)
    assert result.persistent_bytes()[StorageRole.OPTIMIZER_STATES] > 0, (
        "no overflow was found, so the step was taken"
    )
    assert {e.step for e in result.events if e.phase is TracePhase.OPTIMIZER} >= {0}
    products = {
        r.dtype
        for r in result.records
        if r.op == "aten.mm.default" and r.phase is TracePhase.FORWARD
    }
    assert products == {"float16"}


class Block(nn.Module):
    """Two linears around a GELU, checkpointed with a policy."""

    def __init__(self, kept: tuple[object, ...] | None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, device="meta")
        self.down = nn.Linear(4 * WIDTH, WIDTH, device="meta")
        self._kept = kept

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kept is None:
            return checkpoint(self._inner, x, use_reentrant=False)

        def policy(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
            return (
                CheckpointPolicy.MUST_SAVE
                if op in self._kept
                else CheckpointPolicy.PREFER_RECOMPUTE
            )  # type: ignore[operator]

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self._inner, x, use_reentrant=False, context_fn=contexts)


def checkpointed(kept: tuple[object, ...] | None) -> TraceResult:
    model = nn.Sequential(*(Block(kept) for _ in range(3)))

    def step(model: nn.Module, _: object) -> None:
        model(torch.empty(ROWS, WIDTH, device="meta")).sum().backward()

    return trace_module(model, step, num_steps=1)


def test_a_selective_policy_keeps_what_it_names() -> None:
    full, selective = checkpointed(None), checkpointed((torch.ops.aten.addmm.default,))
    kept = 3 * ROWS * 5 * WIDTH * 4  # the outputs of both linears of three blocks
    assert kept * 0.7 <= selective.saved_bytes - full.saved_bytes <= kept
    recomputed = [r.op for r in selective.records if r.phase is TracePhase.RECOMPUTE]
    assert "aten.addmm.default" not in recomputed
    assert "aten.addmm.default" in [r.op for r in full.records if r.phase is TracePhase.RECOMPUTE]


def test_a_compiled_step_keeps_what_the_partitioner_says() -> None:
    config = {**FAMILIES["llama"], "hidden_size": 128, "intermediate_size": 512}
    eager, compiled = (
        trace_config(config, sequence_length=256, loop=LoopOptions(compile=flag))
        for flag in (False, True)
    )
    assert compiled.saved_bytes < 0.9 * eager.saved_bytes
    assert compiled.persistent_bytes() == eager.persistent_bytes()
    assert {r.module for r in compiled.saved_records()} >= {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    }
    leftover = [
        r
        for r in compiled.live_at(len(compiled.events) - 1)
        if r.role in (StorageRole.SAVED_ACTIVATIONS, StorageRole.LOGITS)
    ]
    assert leftover == []


def test_a_warning_within_the_model_does_not_break_a_compiled_step() -> None:
    """GPT-2's config names no loss, of which transformers warns where the loss is taken."""
    config = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 128,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    result = trace_config(config, sequence_length=32, loop=LoopOptions(compile=True))
    assert result.saved_bytes > 0


def test_outputs_kept_through_the_backward_hold_the_logits() -> None:
    gone, kept = (
        trace_config(FAMILIES["llama"], sequence_length=256, loop=LoopOptions(keep_outputs=flag))
        for flag in (False, True)
    )
    assert kept.saved_bytes - gone.saved_bytes >= 256 * 512 * 2  # rows x vocabulary in bfloat16


def test_accumulated_gradients_are_made_once() -> None:
    result = trace_config(
        FAMILIES["llama"], sequence_length=16, loop=LoopOptions(gradient_accumulation_steps=3)
    )
    held = result.persistent_bytes()
    assert held[StorageRole.GRADIENTS] == held[StorageRole.WEIGHTS]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_trainable_bytes_follow_the_method(method: str) -> None:
    from napkinmath_profiler.tracing.meta_model import TrainMethod

    held = trace_config(
        FAMILIES["llama"], sequence_length=16, method=TrainMethod(method)
    ).persistent_bytes()
    trained = held[StorageRole.ADAPTER_WEIGHTS if method == "lora" else StorageRole.WEIGHTS]
    assert held[StorageRole.GRADIENTS] == trained
