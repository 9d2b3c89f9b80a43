"""The same training step by the rules and by the real libraries on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analytic_vs_traced import phase_peaks, traced_phase_peaks
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import Attention, Precision, TrainConfig
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import TraceOptions, prepared_model
from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.meta_model import config_from, example_inputs
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.optimizer_choices import OPTIMIZERS
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import TrainingLoop

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 512,
    "num_hidden_layers": 5,
}
BATCH, SEQUENCE = 2, 128
# The token ids and labels are the batch's own in the rules and the caller's in the trace; both are
# the same 2 x 2 KiB.
CLOSE = 0.002


def by_rules(
    config: TrainConfig, model: dict[str, Any] = LLAMA, *, stack: str = "hf-bare"
) -> Timeline:
    """Two steps by the rules; flash attention where the inputs allow."""
    return simulate(
        build_step(read_config(model), Policy(config, STACKS[stack], sdpa_choice=Attention.FLASH)),
        steps=2,
    )


def traced(
    model: dict[str, Any] = LLAMA, *, change: Callable[[Any], Any] | None = None, **options: Any
) -> TraceResult:
    """Two traced steps; `change` edits the model before the optimizer is made."""
    options.setdefault("optimizer", "adamw-fused")
    options.setdefault("attention_backend", AttentionBackend.FLASH)
    chosen = TraceOptions(
        micro_batch_size=BATCH, sequence_length=SEQUENCE, attention="sdpa", **options
    )
    settings = config_from(dict(model))
    built = prepared_model(settings, chosen)
    if change is not None:
        built = change(built) or built
    inputs = example_inputs(
        built, settings, micro_batch_size=BATCH, sequence_length=SEQUENCE, attention_mask=False
    )
    optimizer = OPTIMIZERS[chosen.optimizer]([p for p in built.parameters() if p.requires_grad])
    return observe(
        built,
        TrainingLoop(built, optimizer, inputs, chosen.loop).run,
        inputs=inputs,
        settings=chosen.settings,
    )


def train_config(**fields: Any) -> TrainConfig:
    """Pure bf16, no clipping, fused AdamW, the batch of these tests."""
    fields = {
        "precision": Precision.BF16,
        "clip_gradients": False,
        "optimizer": "adamw-fused",
        "attention": Attention.SDPA,
        **fields,
    }
    return TrainConfig(micro_batch_size=BATCH, sequence_length=SEQUENCE, **fields)


def differences(timeline: Timeline, result: TraceResult) -> dict[Phase, float]:
    """Relative difference of each phase's peak, rules over trace minus one."""
    ours, theirs = phase_peaks(timeline), traced_phase_peaks(result)
    return {phase: ours[phase] / theirs[phase] - 1 for phase in theirs}
