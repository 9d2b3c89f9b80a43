"""Real steps on CPU tensors and the same steps on meta without CUDA's choices: the same events, one
by one."""

from __future__ import annotations

import pytest
import torch
from napkinmath_profiler.trace import TraceOptions, optimizer_of, prepared_model
from napkinmath_profiler.tracing.meta_model import TrainMethod, config_from, example_inputs
from napkinmath_profiler.tracing.observation import observe
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import TrainingLoop
from profiler.traced_families import FAMILIES, WITHOUT_ALL_LINEAR_LORA, Config

BATCH, SEQUENCE = 2, 16
# A CPU build's cat keeps another memory format than the meta kernel, so one more copy is made in
# qwen3_next's backward.
DIFFERENT_ON_CPU = frozenset({"qwen3_next"})
# PEFT's parametrized expert weights enter autocast by the tensor's device type, which meta has not
# without CUDA's choices.
AUTOCAST_BY_DEVICE = frozenset(
    {"mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "qwen3_next"}
)

Event = tuple[bool, int, str, str, str, int, int]


def traced(config: Config, device: str, **options: object) -> TraceResult:
    chosen = TraceOptions(dtype="fp32", attention="eager", optimizer="momentum", **options)  # type: ignore[arg-type]
    parsed = config_from(config)
    torch.manual_seed(0)
    model = prepared_model(parsed, chosen, device=device)
    inputs = example_inputs(
        model, parsed, micro_batch_size=BATCH, sequence_length=SEQUENCE, attention_mask=False
    )
    if device == "cpu":
        inputs = {
            k: torch.randint(0, 2, v.shape) if v.dtype == torch.long else torch.randn(v.shape)
            for k, v in inputs.items()
        }
    loop = TrainingLoop(model, optimizer_of(model, chosen), inputs, chosen.loop)
    return observe(model, loop.run, inputs=inputs, settings=None, device_type=device)


# Python scalars made into tensors: torch.tensor(1.0) is on the CPU in either run, and `x[0] = 1`
# makes one off the CPU only.
SCALAR_BYTES = 8
SCALARS = frozenset({"aten.lift_fresh.default", "aten.scalar_tensor.default"})


def events_of(result: TraceResult) -> list[Event]:
    """Every event but those of Python scalars made into tensors, and of tensors without bytes."""
    found: list[Event] = []
    for event in result.events:
        record = result.records[event.storage_id]
        if record.requested_bytes and (
            record.op not in SCALARS or record.requested_bytes > SCALAR_BYTES
        ):
            place = (record.op, event.phase.value, event.module, event.step, event.micro_step)
            found.append((event.is_allocation, record.requested_bytes, *place))
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - DIFFERENT_ON_CPU))
def test_every_family_agrees_event_by_event(family: str) -> None:
    assert events_of(traced(FAMILIES[family], "meta")) == events_of(traced(FAMILIES[family], "cpu"))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gpt2", "falcon", "t5", "deepseek_v3", "mamba2"]
)
def test_checkpointing_agrees(family: str, reentrant: bool) -> None:
    options = {"checkpointing": True, "use_reentrant": reentrant}
    assert events_of(traced(FAMILIES[family], "meta", **options)) == events_of(
        traced(FAMILIES[family], "cpu", **options)
    )


@pytest.mark.parametrize(
    "family",
    sorted(
        {"llama", "qwen2_moe", "gpt2", "bert", "phi3", "gpt_oss"}
        - WITHOUT_ALL_LINEAR_LORA
        - AUTOCAST_BY_DEVICE
    ),
)
def test_lora_agrees(family: str) -> None:
    options = {"method": TrainMethod.LORA, "checkpointing": family != "bert"}
    assert events_of(traced(FAMILIES[family], "meta", **options)) == events_of(
        traced(FAMILIES[family], "cpu", **options)
    )
