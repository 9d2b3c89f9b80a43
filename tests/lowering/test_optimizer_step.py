"""Temporaries of the step, clipping, and updates in the backward against traced steps of the real
optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowering.both_ways import BATCH, CLOSE, LLAMA, SEQUENCE, by_rules, differences, train_config
from lowering.test_optimizer_states import REAL
from napkinmath.config.train_config import AdapterConfig, OffloadConfig, Precision
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Timeline
from napkinmath_profiler.trace import TraceOptions, prepared_model
from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.meta_model import config_from, example_inputs
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import LoopOptions, TrainingLoop

# Optimizers whose step runs on meta tensors as it does on a GPU.
TRACEABLE = ("adamw", "adamw-foreach", "adamw-fused", "momentum", "adagrad", "rmsprop", "adafactor")
LARGE_STEP = {**LLAMA, "vocab_size": 4096}  # the embedding's temporaries set the peak of the step


def traced_with(
    make: Any, *, model: dict[str, Any] = LLAMA, clip: float | None = None, dtype: str = "bf16"
) -> TraceResult:
    """Two traced steps with an optimizer made from the model's parameters."""
    options = TraceOptions(
        micro_batch_size=BATCH,
        sequence_length=SEQUENCE,
        attention="sdpa",
        attention_backend=AttentionBackend.FLASH,
        dtype=dtype,
    )
    settings = config_from(dict(model))
    built = prepared_model(settings, options)
    inputs = example_inputs(
        built, settings, micro_batch_size=BATCH, sequence_length=SEQUENCE, attention_mask=False
    )
    optimizer = make(list(built.parameters()))
    return observe(
        built,
        TrainingLoop(built, optimizer, inputs, LoopOptions(max_grad_norm=clip)).run,
        inputs=inputs,
        settings=options.settings,
    )


@pytest.mark.parametrize("name", TRACEABLE)
def test_temporaries_of_the_step(name: str) -> None:
    rules = by_rules(train_config(optimizer=name), LARGE_STEP)
    difference = differences(rules, traced_with(REAL[name], model=LARGE_STEP))[Phase.STEP]
    assert abs(difference) < CLOSE, difference


def test_muon_and_its_fallback() -> None:
    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Muon on the layers' matrices, fused AdamW on everything else, as its users run the two
        together."""
        hidden = [p for p in parameters if p.ndim == 2 and p.shape[0] != LARGE_STEP["vocab_size"]]
        rest = [p for p in parameters if all(p is not q for q in hidden)]

        class Both(torch.optim.AdamW):
            def step(self, closure: Any = None) -> None:
                self.muon.step()
                super().step()

            def zero_grad(self, set_to_none: bool = True) -> None:
                self.muon.zero_grad(set_to_none)
                super().zero_grad(set_to_none)

        both = Both(rest, fused=True)
        both.muon = torch.optim.Muon(hidden)
        return both

    difference = differences(
        by_rules(train_config(optimizer="muon"), LARGE_STEP), traced_with(make, model=LARGE_STEP)
    )[Phase.STEP]
    assert abs(difference) < CLOSE, difference


def test_clipping() -> None:
    rules = by_rules(train_config(clip_gradients=True))
    for phase, difference in differences(rules, traced_with(REAL["adamw-fused"], clip=1.0)).items():
        assert abs(difference) < CLOSE, (phase, difference)


def in_backward(make: Any) -> Any:
    """torch's recipe: one optimizer a parameter, stepped and cleared by a post-accumulate hook."""

    def hooked(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        own = {p: make([p]) for p in parameters}

        def update(parameter: torch.nn.Parameter) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(update)
        empty = torch.nn.Parameter(torch.zeros(0))
        return torch.optim.SGD([empty], lr=0.0)

    return hooked


@pytest.mark.parametrize(
    "model", [LARGE_STEP, {**LARGE_STEP, "tie_word_embeddings": True}], ids=["untied", "tied"]
)
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd"])
def test_update_in_the_backward(name: str, model: dict[str, Any]) -> None:
    rules = by_rules(train_config(optimizer=name, optimizer_in_backward=True), model)
    difference = differences(rules, traced_with(in_backward(REAL[name]), model=model))[
        Phase.BACKWARD
    ]
    assert abs(difference) < CLOSE, difference


def end_by_role(timeline: Timeline) -> dict[Role, int]:
    """Bytes alive after the last event."""
    from napkinmath.ir.timeline import Point

    last = len(timeline.segments) - 1
    segment = timeline.segments[last]
    return timeline.breakdown(
        Point(segment=last, repetition=segment.repeat - 1, event=len(segment.events) - 1, nbytes=0)
    )


@pytest.mark.parametrize(("stack", "bytes_per_parameter"), [("megatron", 18), ("deepspeed", 16)])
def test_the_two_accountings_of_mixed_precision(stack: str, bytes_per_parameter: int) -> None:
    """2 + 4 + 4 + 8 with fp32 gradient buffers; 2 + 2 + 4 + 8 with half-precision gradients, alive
    at the end of the backward."""
    model = {**LLAMA, "hidden_size": 512, "intermediate_size": 2048}
    timeline = by_rules(train_config(clip_gradients=True), model, stack=stack)
    at_clip = timeline.breakdown(timeline.phase_peaks()[Phase.CLIP])
    elements = at_clip[Role.WEIGHTS] / 2
    kept = sum(
        at_clip[role] for role in (Role.WEIGHTS, Role.MASTER, Role.GRADIENTS, Role.OPTIMIZER)
    )
    assert kept / elements == pytest.approx(bytes_per_parameter, rel=0.01)


def test_states_and_gradients_move_to_the_host() -> None:
    plain, offloaded = (
        by_rules(train_config()),
        by_rules(train_config(offload=OffloadConfig(optimizer=True))),
    )
    roles = end_by_role(offloaded)
    assert Role.OPTIMIZER not in roles and Role.GRADIENTS not in roles
    elements = roles[Role.WEIGHTS] / 2
    assert offloaded.host_peak() == pytest.approx(
        (4 + 4 + 4 + 2) * elements, rel=0.01
    )  # master, two moments, gradient
    assert offloaded.peak().nbytes < plain.peak().nbytes


def test_loss_scaling_adds_scalars_only() -> None:
    fp16, bf16 = (
        by_rules(train_config(precision=p)).phase_peaks()
        for p in (Precision.FP16_AMP, Precision.BF16_AMP)
    )
    assert Phase.CLIP in fp16 and Phase.CLIP not in bf16


def test_paged_states_are_outside_the_allocator() -> None:
    model = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024}
    paged, plain = (
        by_rules(train_config(optimizer=name), model) for name in ("paged-adamw-8bit", "adamw-8bit")
    )
    moved = paged.host_peak(managed=True)
    assert moved > 0 and paged.host_peak() == 0
    assert plain.end_bytes() - paged.end_bytes() == pytest.approx(moved, rel=0.001)


def test_adapters_alone_have_states() -> None:
    timeline = by_rules(train_config(adapter=AdapterConfig(rank=8)))
    roles = end_by_role(timeline)
    assert roles[Role.OPTIMIZER] < 3 * roles[Role.ADAPTERS]
