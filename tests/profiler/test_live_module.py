"""``trace(model=..., optimizer=..., step=...)``: any module and any loop."""

from __future__ import annotations

import pytest
import torch
from napkinmath.ir.ledger import Phase, Role
from napkinmath_profiler.trace import trace, trace_module
from napkinmath_profiler.tracing.storage_events import StorageRole, TracePhase
from napkinmath_profiler.tracing.trace_errors import TraceError
from profiler.traced_families import COMMON
from torch import nn

WIDTH, BATCH = 256, 32


class Tower(nn.Module):
    """Two linears around a ReLU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, device=device)
        self.down = nn.Linear(4 * WIDTH, WIDTH, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.empty(BATCH, WIDTH, device=next(model.parameters()).device)
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_a_meta_module_is_traced_through_all_its_phases() -> None:
    model = Tower("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    timeline = trace(model=model, optimizer=optimizer, step=one_step)
    assert timeline.stamp.origin == "traced"
    assert {Phase.LOAD, Phase.FORWARD, Phase.BACKWARD, Phase.CLIP, Phase.STEP} <= {
        s.phase for s in timeline.segments
    }
    parameters = sum((p.numel() * 4 + 511) // 512 * 512 for p in model.parameters())
    assert timeline.end_bytes() == 2 * parameters, "weights and momentum remain"
    assert sum(timeline.breakdown(timeline.peak()).values()) == timeline.peak().nbytes


def test_a_module_with_data_is_traced_as_a_meta_copy_and_left_alone() -> None:
    model = Tower("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = trace_module(model, one_step, optimizer=optimizer)
    assert result.device_type == "meta"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_a_module_with_data_and_a_closed_step_is_observed_where_it_is() -> None:
    model = Tower("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    timeline = trace(model=model, step=lambda: one_step(model, optimizer))
    assert timeline.stamp.origin == "observed on cpu"
    assert timeline.breakdown(timeline.peak())[Role.WEIGHTS] == sum(
        p.numel() * 4 for p in model.parameters()
    )


def test_functions_build_the_module_on_meta_and_the_optimizer_over_it() -> None:
    def build() -> nn.Module:
        return Tower(torch.get_default_device().type)

    built = trace(build, optimizer=torch.optim.AdamW, step=one_step)
    model = Tower("cpu")
    given = trace(model, optimizer=torch.optim.AdamW(model.parameters()), step=one_step)
    assert built.stamp.origin == "traced"
    assert built.peak().nbytes == given.peak().nbytes > 0


def on_the_cpu(model: nn.Module, _: object) -> None:
    model(torch.zeros(BATCH, WIDTH))


def reads_a_value() -> nn.Module:
    return Tower("meta" if torch.ones(1).item() else "cpu")


@pytest.mark.parametrize(
    ("model", "step", "said"),
    [
        (Tower("meta"), on_the_cpu, r"up \(forward\) got a tensor on another device.*within step="),
        (Tower("meta"), one_step, r"got none \(test_live_module.py:\d+\); pass optimizer="),
        (Tower("meta"), lambda model, optimizer, batch: None, r"takes \(model, optimizer, batch\)"),
        (Tower("meta"), lambda model: None, r"called with \(model, optimizer\) or with nothing"),
        (reads_a_value, one_step, r"reads_a_value\(\) raises RuntimeError.*test_live_module.py"),
        (dict, one_step, r"dict\(\) returns a dict"),
    ],
)
def test_what_cannot_be_traced_says_what_to_do(model: object, step: object, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace(model, step=step)  # pyright: ignore[reportArgumentType]


def test_the_activation_of_the_relu_is_what_backward_holds() -> None:
    model = Tower("meta")
    result = trace_module(model, one_step, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert {r.shape for r in result.records if r.role is StorageRole.INPUTS} == {(BATCH, WIDTH)}
    saved = {
        (r.op, r.shape)
        for r in result.saved_records()
        if r.role is StorageRole.SAVED_ACTIVATIONS and r.shape
    }
    assert saved == {
        ("aten.relu.default", (BATCH, 4 * WIDTH)),
        ("aten.addmm.default", (BATCH, WIDTH)),
    }


def test_gradient_accumulation_is_seen_as_micro_steps() -> None:
    model = Tower("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            model(torch.empty(BATCH, WIDTH, device="meta")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    result = trace_module(model, accumulate, optimizer=optimizer)
    assert {(e.step, e.micro_step) for e in result.events if e.phase is TracePhase.BACKWARD} == {
        (s, m) for s in (0, 1) for m in (0, 1, 2)
    }


class Picky(nn.Module):
    """Needs values: how many inputs are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.masked_select(x * self.weight, x > 0)


def test_a_value_dependent_shape_is_named_with_a_way_out() -> None:
    model = Picky()
    with pytest.raises(TraceError, match=r"aten\.masked_select.*depends on values.*CPU"):
        trace_module(model, lambda m, o: m(torch.empty(4, WIDTH, device="meta")).sum().backward())


def test_reading_real_data_is_named() -> None:
    model = Tower("meta")
    with pytest.raises(TraceError, match="wants real data"):
        trace_module(model, lambda m, o: m(torch.empty(4, WIDTH, device="meta")).detach().numpy())


def test_what_a_library_raises_is_named_with_its_file_and_line() -> None:
    from napkinmath_profiler.tracing.meta_model import build_model, config_from

    model = build_model(
        config_from({"model_type": "llama", **COMMON}), dtype="bf16", attn_implementation=None
    )
    with pytest.raises(
        TraceError,
        match=(
            r"transformers refuses this run: .*"
            r"transformers/models/llama/modeling_llama\.py:\d+"
        ),
    ):
        trace_module(model, lambda m, o: m())


def test_mistakes_of_the_program_are_its_own() -> None:
    model = Tower("meta")
    with pytest.raises(RuntimeError, match="same reduction dim"):
        trace_module(model, lambda m, o: m(torch.empty(4, WIDTH + 1, device="meta")))


@pytest.mark.parametrize("arguments", [{}, {"config": {}, "model": nn.Identity()}])
def test_config_or_model_but_not_both(arguments: dict[str, object]) -> None:
    with pytest.raises(TraceError, match="either a config or a live model"):
        trace(**arguments)
