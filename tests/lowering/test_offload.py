"""Offload of saved tensors and checkpoints against the trace of saved-tensor hooks that drop device
copies.

The hooks stand in for save_on_cpu and for TRL's OffloadActivations: meta tensors hold no data, so
packing keeps shape and type, counts the bytes the host would hold, and unpacking makes a new
tensor, in the order in which autograd asks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lowering.both_ways import CLOSE, LLAMA, by_rules, differences, traced, train_config
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import (
    AdapterConfig,
    OffloadConfig,
    RecomputeConfig,
    RecomputeKind,
)
from napkinmath.ir.ledger import Phase
from napkinmath.lowering.saved_offload import STYLES
from napkinmath.models.families import read_config
from napkinmath_profiler.tracing.meta_model import TrainMethod
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# The model's forward keeps the embedding's output in a local variable to its end; the rules let it
# go with the first layer.
HELD_EMBEDDING = 0.01


class Host:
    """Bytes that packed tensors take on the host, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


class Packed:
    """A tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, host: Host) -> None:
        self.like = (tensor.shape, tensor.stride(), tensor.dtype)
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.host = host
        host.add(self.num_bytes)

    def back(self) -> torch.Tensor:
        shape, stride, dtype = self.like
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def __del__(self) -> None:
        self.host.add(-self.num_bytes)


def everything(host: Host) -> saved_tensors_hooks:
    """save_on_cpu: every saved tensor, weights too, one copy each time it is saved."""
    return saved_tensors_hooks(lambda tensor: Packed(tensor, host), lambda packed: packed.back())


def inside_checkpoint(host: Host, model: Any) -> None:
    """transformers' offload=True: the checkpoint's inputs are what the hooks see."""

    def checkpointed(function: Any, *args: Any, **kwargs: Any) -> Any:
        with everything(host):
            return checkpoint(function, *args, **kwargs)

    model.activation_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(checkpointed, use_reentrant=False)


class OffloadedCheckpoint(torch.autograd.Function):
    """unsloth's offloaded checkpointing: the layer's input goes to the host, and comes back to be
    run again with gradients."""

    @staticmethod
    def forward(ctx: Any, function: Any, host: Host, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = function(x)
        ctx.function, ctx.saved = function, Packed(x, host)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        x = ctx.saved.back().detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, gradient)
        return None, None, x.grad


def unsloth_like(host: Host, model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda function, x, **_: OffloadedCheckpoint.apply(
            function, host, x
        )


def whole_forward(hooks: Any, model: Any) -> None:
    """Wraps the model's forward in saved-tensor hooks."""
    forward = model.forward

    def hooked(*args: Any, **kwargs: Any) -> Any:
        with hooks:
            return forward(*args, **kwargs)

    model.forward = hooked


def check(rules: Any, result: Any, tolerance: float = CLOSE) -> None:
    for phase, difference in differences(rules, result).items():
        assert abs(difference) < tolerance, (phase, difference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_host_memory(reentrant: bool) -> None:
    host = Host()
    rules = by_rules(
        train_config(
            recompute=RecomputeConfig(kind=RecomputeKind.FULL, reentrant=reentrant),
            offload=OffloadConfig(checkpoints=True),
        )
    )
    check(rules, traced(change=partial(unsloth_like if reentrant else inside_checkpoint, host)))
    assert rules.host_peak() == host.most == 5 * 2 * 128 * 256 * 2


def test_save_on_cpu() -> None:
    host = Host()
    rules = by_rules(train_config(offload=OffloadConfig(activations=True, style="save_on_cpu")))
    check(rules, traced(change=partial(whole_forward, everything(host))), HELD_EMBEDDING)
    assert rules.host_peak() == pytest.approx(host.most, rel=CLOSE)


def test_adapters_leave_frozen_products_nothing_to_save() -> None:
    host = Host()
    rules = by_rules(
        train_config(
            adapter=AdapterConfig(), offload=OffloadConfig(activations=True, style="save_on_cpu")
        )
    )
    check(
        rules,
        traced(method=TrainMethod.LORA, change=partial(whole_forward, everything(host))),
        HELD_EMBEDDING,
    )
    assert rules.host_peak() == pytest.approx(host.most, rel=CLOSE)


@pytest.mark.parametrize("style", STYLES)
def test_offload_lowers_the_backward_and_fills_the_host(style: str) -> None:
    plain, offloaded = (
        by_rules(train_config()),
        by_rules(train_config(offload=OffloadConfig(activations=True, style=style))),
    )
    assert plain.host_peak() == 0
    assert offloaded.host_peak() > 0
    assert (
        offloaded.phase_peaks()[Phase.BACKWARD].nbytes < plain.phase_peaks()[Phase.BACKWARD].nbytes
    )


def test_unknown_style_is_refused() -> None:
    with pytest.raises(InputError, match="torchtune"):
        by_rules(train_config(offload=OffloadConfig(activations=True, style="torchtunes")))


def test_streamed_weights() -> None:
    """Frozen layers live on the host; one layer and what is prefetched are on the device, twice a
    step across the link."""
    adapter = AdapterConfig(rank=4)
    plain, streamed, ahead = (
        by_rules(
            train_config(adapter=adapter, offload=OffloadConfig(parameters=on, prefetch=prefetch))
        )
        for on, prefetch in ((False, 0), (True, 0), (True, 1))
    )
    layer = 2 * (
        256 * 256 * 2 + 128 * 256 * 2 + 704 * 256 * 3 + 2 * 256
    )  # bf16 bytes of a layer's weights
    assert streamed.host_peak() == 5 * layer
    assert (
        plain.phase_peaks()[Phase.LOAD].nbytes - streamed.phase_peaks()[Phase.LOAD].nbytes
        == 5 * layer
    )
    forward = [t.phase_peaks()[Phase.FORWARD].nbytes for t in (plain, streamed, ahead)]
    assert forward[0] - 5 * layer <= forward[1] <= forward[0] - 4 * layer
    assert forward[1] <= forward[2] <= forward[1] + layer


def test_trained_weights_on_the_host_need_the_optimizer_there() -> None:
    with pytest.raises(InputError, match="need --offload optimizer,parameters or --zero 3"):
        train_config(offload=OffloadConfig(parameters=True))
    timeline = by_rules(train_config(offload=OffloadConfig(parameters=True, optimizer=True)))
    assert timeline.host_peak() > 0


def test_copies_beside_computation_cost_only_what_sticks_out() -> None:
    from napkinmath.estimate import estimate
    from napkinmath.planning.sweep import sweep

    spec = read_config(
        {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    )
    seconds = {}
    for name, offload in (
        ("none", OffloadConfig()),
        ("stream", OffloadConfig(activations=True)),
        ("wait", OffloadConfig(activations=True, style="save_on_cpu")),
    ):
        config = train_config(offload=offload).replace(micro_batch_size=8, sequence_length=2048)
        found = estimate(spec, config, hardware="RTX 4090")
        assert found.time is not None
        seconds[name] = found.time.seconds
        assert sweep(spec, config, hardware=found.hardware).seconds == pytest.approx(
            seconds[name], rel=1e-6
        )
        assert found.host_bytes > 0 or name == "none"
        if name == "wait":
            assert found.time.share("host link") > 0.3
    assert seconds["none"] <= seconds["stream"] < seconds["wait"]
