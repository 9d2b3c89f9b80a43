"""What holds for every model, method and knob: books that balance, nothing left over, more work
never less memory."""

from __future__ import annotations

from typing import Any

import pytest
from agreement.tiny_configs import TINY
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.optimizers import OPTIMIZERS
from napkinmath.catalog.quantization import FORMATS
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    Loss,
    OffloadConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.ledger import Role, Tensor
from napkinmath.ir.step import Step
from napkinmath.ir.timeline import Point, Timeline
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.saved_offload import STYLES
from napkinmath.memory.simulate import run_order, simulate
from napkinmath.models.families import read_config
from published.stacks import PUBLISHED

# Past a size at which the library runs other operations (a batch of 2), some tiny tensors are no
# longer made: a few granules of 512 B.
THRESHOLD_SLACK = 8 * 512
PERSISTENT = {
    Role.WEIGHTS,
    Role.QUANTIZATION,
    Role.ADAPTERS,
    Role.MASTER,
    Role.OPTIMIZER,
    Role.COMMUNICATION,
}
KERNELS = (Attention.FLASH, Attention.EFFICIENT, Attention.MATH)

adapters = st.builds(
    AdapterConfig,
    kind=st.sampled_from([AdapterKind.LORA]),
    rank=st.integers(1, 24),
    dropout=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from(["auto", "fp32", "bf16"]),
    targets=st.sampled_from([("all-linear",), ("q_proj", "v_proj")]),
)
quantizations = st.builds(
    QuantizationConfig,
    format=st.sampled_from(sorted(FORMATS)),
    double_quant=st.booleans(),
    kbit_preparation=st.booleans(),
)
recomputes = st.builds(
    RecomputeConfig,
    kind=st.sampled_from([k for k in RecomputeKind if k is not RecomputeKind.SELECTIVE]),
    every=st.integers(1, 4),
    reentrant=st.booleans(),
) | st.builds(
    RecomputeConfig,
    kind=st.just(RecomputeKind.SELECTIVE),
    keep=st.sampled_from([("sdpa",), ("linear",), ("sdpa", "linear"), ("o_proj",)]),
)
offloads = st.builds(
    OffloadConfig,
    optimizer=st.booleans(),
    activations=st.booleans(),
    checkpoints=st.booleans(),
    parameters=st.booleans(),
    prefetch=st.integers(0, 2),
    style=st.sampled_from(sorted(STYLES)),
)


@st.composite
def train_configs(draw: st.DrawFn) -> TrainConfig:
    adapter = draw(st.none() | adapters)
    fields: dict[str, Any] = {
        "micro_batch_size": draw(st.integers(1, 4)),
        "sequence_length": draw(st.integers(2, 160)),
        "gradient_accumulation_steps": draw(st.sampled_from([1, 1, 2, 3])),
        "precision": draw(st.sampled_from(Precision)),
        "adapter": adapter,
        "quantization": draw(st.none() | quantizations) if adapter else None,
        "recompute": draw(recomputes),
        "offload": draw(st.just(OffloadConfig()) | offloads),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "optimizer_in_backward": draw(st.booleans()),
        "clip_gradients": draw(st.booleans()),
        "attention": draw(st.sampled_from([Attention.EAGER, Attention.SDPA, Attention.SDPA])),
        "loss": draw(st.sampled_from(Loss)),
        "stack": draw(st.sampled_from(sorted(STACKS | PUBLISHED))),
        "training_mode": draw(st.booleans()),
    }
    try:
        return TrainConfig(**fields)
    except InputError:
        assume(False)
        raise


def built(model: dict[str, object], config: TrainConfig, kernel: Attention) -> Step:
    """The step, or another draw where the model refuses the configuration by name."""
    try:
        return build_step(
            read_config(model), Policy(config, STACKS[config.stack], sdpa_choice=kernel)
        )
    except InputError:
        assume(False)
        raise


models = st.sampled_from(sorted(TINY))
slow = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def ends_of_steps(timeline: Timeline) -> list[Point]:
    """The last moment of each training step."""
    starts = [*timeline.step_starts[1:], len(timeline.segments)]
    lasts = [max(i for i in range(start) if timeline.segments[i].events) for start in starts]
    return [
        Point(
            segment=i,
            repetition=timeline.segments[i].repeat - 1,
            event=len(timeline.segments[i].events) - 1,
            nbytes=0,
        )
        for i in lasts
    ]


@pytest.mark.slow
@slow
@example(  # a gradient that a view hands through to adapters of experts
    model="qwen3_next",
    config=TrainConfig(
        sequence_length=2,
        precision=Precision.BF16,
        adapter=AdapterConfig(rank=1, targets=("all-linear",)),
        attention=Attention.EAGER,
        stack="hf-2022",
    ),
    kernel=Attention.FLASH,
)
@example(  # a bias's gradient that the kernel writes in rows of 16, handed from layer to layer
    model="t5",
    config=TrainConfig(sequence_length=8, precision=Precision.BF16),
    kernel=Attention.EFFICIENT,
)
@example(  # a layer's cache that selective checkpointing keeps for the backward
    model="gpt_bigcode",
    config=TrainConfig(
        sequence_length=2,
        precision=Precision.BF16,
        recompute=RecomputeConfig(kind=RecomputeKind.SELECTIVE, keep=("linear",)),
        stack="hf-2023",
    ),
    kernel=Attention.FLASH,
)
@example(  # fp32 gradients have no buffer of the stack's: they leave for the host
    model="llama",
    config=TrainConfig(
        sequence_length=2,
        precision=Precision.BF16,
        adapter=AdapterConfig(rank=1, dtype="fp32"),
        offload=OffloadConfig(optimizer=True),
        stack="megatron",
    ),
    kernel=Attention.FLASH,
)
@example(  # what a loss keeps is on the host until its backward
    model="llama",
    config=TrainConfig(
        sequence_length=2,
        precision=Precision.BF16,
        offload=OffloadConfig(activations=True, style="save_on_cpu"),
        loss=Loss.CHUNKED,
        stack="torchtune",
    ),
    kernel=Attention.FLASH,
)
@given(model=models, config=train_configs(), kernel=st.sampled_from(KERNELS))
def test_books_balance(model: str, config: TrainConfig, kernel: Attention) -> None:
    step = built(TINY[model], config, kernel)
    timeline = simulate(step)
    counts = [0] * len(timeline.tensors)
    live = highest = 0
    sizes = [t.requested for t in timeline.tensors]
    for segment, repetition, action, index in timeline.events():
        if action == "+":
            counts[index] += 1
            live += sizes[index]
            highest = max(highest, live)
        elif action == "-":
            counts[index] -= 1
            live -= sizes[index]
            assert counts[index] >= 0, (
                segment.name,
                segment.phase,
                repetition,
                timeline.tensors[index].module,
                timeline.tensors[index].name,
            )
        elif action == "=":
            old, new = segment.pairs[index]
            counts[old] -= 1
            counts[new] += 1
            assert counts[old] >= 0, (
                segment.name,
                segment.phase,
                repetition,
                timeline.tensors[old].name,
                timeline.tensors[new].name,
            )
            assert sizes[old] == sizes[new], (
                segment.name,
                timeline.tensors[old].name,
                timeline.tensors[new].name,
            )
    peak = timeline.peak()
    assert peak.nbytes == highest
    assert sum(timeline.breakdown(peak).values()) == peak.nbytes
    assert live == timeline.end_bytes()
    # Old libraries fill gradients with zeros instead of dropping them.
    lasting = {
        *PERSISTENT,
        *([Role.GRADIENTS] if step.policy.stack.optimizer.keeps_gradients else []),
    }
    for point in ends_of_steps(timeline):
        left = {
            (t.role.value, t.module, t.name)
            for t, count in zip(timeline.tensors, timeline.live_counts(point), strict=True)
            if count
            and t.role not in lasting
            and t.host_bytes == 0
            and not t.name.startswith("main gradient")
            and t.name != "logits of an earlier micro-batch"  # which DeepSpeed's engine keeps
        }
        assert not left


@pytest.mark.slow
@slow
@given(
    model=models,
    config=train_configs(),
    kernel=st.sampled_from(KERNELS),
    more=st.tuples(st.integers(0, 3), st.integers(0, 64)),
)
def test_more_tokens_never_take_less(
    model: str, config: TrainConfig, kernel: Attention, more: tuple[int, int]
) -> None:
    larger = config.replace(
        micro_batch_size=config.micro_batch_size + more[0],
        sequence_length=config.sequence_length + more[1],
    )
    small, large = (simulate(built(TINY[model], c, kernel)).peak().nbytes for c in (config, larger))
    assert small <= large + THRESHOLD_SLACK


@pytest.mark.slow
@slow
@given(model=models, config=train_configs(), kernel=st.sampled_from(KERNELS))
def test_the_formula_is_the_number(model: str, config: TrainConfig, kernel: Attention) -> None:
    """Bytes are the product of the named axes at their values, for every tensor of the step."""
    step = built(TINY[model], config, kernel)
    top = Bindings(step.symbols)
    for segment in run_order(step)[0]:
        bind = top.extended(dict(segment.symbols))
        for _, payload in segment.events:
            if isinstance(payload, Tensor):
                elements = 1
                for axis in payload.axes:
                    elements *= bind(axis)
                assert bind(payload.nbytes) + bind(payload.host_bytes) == -(
                    -elements * payload.dtype.bits // 8
                )
                assert elements >= 0, payload


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(TINY))
@pytest.mark.parametrize("kind", [k for k in RecomputeKind if k is not RecomputeKind.NONE])
def test_recompute_never_raises_what_the_forward_leaves(model: str, kind: RecomputeKind) -> None:
    """Whatever is recomputed, less is alive when the backward starts."""

    def held(recompute: RecomputeConfig) -> int:
        config = TrainConfig(
            micro_batch_size=2, sequence_length=64, recompute=recompute, clip_gradients=False
        )
        timeline = simulate(build_step(read_config(TINY[model]), Policy(config, STACKS["hf"])))
        first = next(i for i, s in enumerate(timeline.segments) if s.name == "gradient of the loss")
        return sum(
            timeline.breakdown(Point(segment=first, repetition=0, event=0, nbytes=0)).values()
        )

    assert held(RecomputeConfig(kind=kind, every=2)) <= held(RecomputeConfig())
