"""Estimates and hand-made timelines that the report's tests share."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from napkinmath.config.train_config import (
    AdapterConfig,
    Loss,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Kernel, Stamp, TensorInfo, Timeline, TimelineSegment

LLAMA_7B = {
    "model_type": "llama",
    "_name_or_path": "llama-7b",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
FULL_CHECKPOINTING = RecomputeConfig(kind=RecomputeKind.FULL)
CONFIGS = {
    "qlora": TrainConfig(
        micro_batch_size=4,
        quantization=QuantizationConfig(),
        adapter=AdapterConfig(),
        recompute=FULL_CHECKPOINTING,
        optimizer="paged-adamw-8bit",
    ),
    "lora": TrainConfig(
        micro_batch_size=2, adapter=AdapterConfig(targets=("q_proj", "v_proj"), dropout=0.05)
    ),
    "full": TrainConfig(micro_batch_size=1, recompute=FULL_CHECKPOINTING),
    "full, chunked loss": TrainConfig(
        loss=Loss.CHUNKED, gradient_accumulation_steps=3, optimizer="adamw-foreach"
    ),
    "eval mode": TrainConfig(
        adapter=AdapterConfig(), recompute=FULL_CHECKPOINTING, training_mode=False
    ),
}


@cache
def priced(name: str, gpu: str | None = "RTX 4090") -> Estimate:
    """An estimate of llama-7b by the name of its configuration."""
    return estimate(LLAMA_7B, CONFIGS[name], hardware=gpu)


def tiny(name: str = "tiny") -> Estimate:
    """A model of a few hundred kilobytes, on no GPU."""
    return estimate(
        {
            **LLAMA_7B,
            "_name_or_path": name,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 100,
        },
        sequence_length=16,
    )


PHASES = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.STEP,
)  # a saving phase would end the step that is drawn


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any valid timeline: what is freed was alive, segments repeat, kernels take time or none
    do."""
    sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
    roles = draw(st.lists(st.sampled_from(list(Role)), min_size=len(sizes), max_size=len(sizes)))
    tensors = [
        TensorInfo(f"t{i}", role, f"layers.{i}", size, -(-size // 512) * 512)
        for i, (size, role) in enumerate(zip(sizes, roles, strict=True))
    ]
    timed = draw(st.booleans())
    alive = [0] * len(tensors)
    segments = [draw(_segment(tensors, alive, timed)) for _ in range(draw(st.integers(1, 6)))]
    starts = (draw(st.integers(0, len(segments) - 1)),) if draw(st.booleans()) else ()
    return Timeline(tensors, segments, Stamp(origin="traced", details=(("torch", "2.13"),)), starts)


@st.composite
def _segment(
    draw: st.DrawFn, tensors: list[TensorInfo], alive: list[int], timed: bool
) -> TimelineSegment:
    events: list[tuple[str, int]] = []
    kernels: list[Kernel] = []
    pairs: list[tuple[int, int]] = []
    change = [0] * len(alive)
    for action in draw(st.lists(st.sampled_from("+-!="), max_size=12)):
        if action == "!":
            events.append(("!", len(kernels)))
            kernels.append(
                Kernel(
                    f"op{len(kernels)}",
                    "",
                    draw(st.floats(0, 1)) if timed else 0.0,
                    10,
                    10,
                    "compute",
                )
            )
            continue
        here = [
            i for i in range(len(alive)) if alive[i] + change[i] > 0 and change[i] > 0
        ]  # made in this repetition
        tensor = draw(st.integers(0, len(alive) - 1))
        if action == "+":
            change[tensor] += 1
            events.append(("+", tensor))
        elif here and action == "-":
            old = draw(st.sampled_from(here))
            change[old] -= 1
            events.append(("-", old))
        elif old_ones := [i for i in here if tensors[i].requested == tensors[tensor].requested]:
            old = draw(st.sampled_from(old_ones))
            change[old] -= 1
            change[tensor] += 1
            events.append(("=", len(pairs)))
            pairs.append((old, tensor))
    repeat = draw(st.integers(1, 4))
    for i, amount in enumerate(change):
        alive[i] += amount * repeat
    return TimelineSegment(
        draw(st.sampled_from(("model.layers.0..3", "head", "update"))),
        draw(st.sampled_from(PHASES)),
        repeat,
        events,
        pairs,
        kernels,
        sum(k.seconds for k in kernels),
    )


def spelled_out(timeline: Timeline, first: int = 0) -> list[int]:
    """Total requested bytes after every event from a segment on, counted the slow way."""
    level, totals = 0, []
    for number, segment in enumerate(timeline.segments):
        for _ in range(segment.repeat):
            for action, index in segment.events:
                if action == "+":
                    level += timeline.tensors[index].requested
                elif action == "-":
                    level -= timeline.tensors[index].requested
                elif action == "=":
                    old, new = segment.pairs[index]
                    level += timeline.tensors[new].requested - timeline.tensors[old].requested
                if number >= first:
                    totals.append(level)
    return totals
