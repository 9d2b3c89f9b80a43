"""Checkpointing: the same gradients under every policy, the bytes each keeps, offloading order,
tiles, and the planner's optimum."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath_kernels.checkpoint import (
    HostStore,
    LayerOption,
    OffloadCheckpoint,
    Recompute,
    TiledMLP,
    checkpoint_layers,
    every,
    full,
    plan_layers,
    run_layer,
)
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import swiglu

HIDDEN, HEADS = 32, 2


class Layer(torch.nn.Module):
    """A small decoder layer with dropout, so that a recompute that draws anew would show."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.gate_up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)
        self.calls = 0

    def forward(self, hidden_states, scale=1.0):
        self.calls += 1
        q, k, v = (
            x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for x in self.qkv(self.norm(hidden_states)).chunk(3, -1)
        )
        attended = flash_attention(q, k, v, causal=True).transpose(1, 2).flatten(2)
        hidden_states = hidden_states + F.dropout(attended, 0.2, self.training) * scale
        gate, up = self.gate_up(hidden_states).chunk(2, -1)
        return hidden_states + self.down(swiglu(gate, up))


def make_layers(count=3):
    torch.manual_seed(0)
    return torch.nn.ModuleList(Layer() for _ in range(count))


def step(layers, x):
    torch.manual_seed(5)
    for layer in layers:
        x = layer(x, scale=0.5)
    loss = x.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(layers.parameters()))]


@pytest.mark.parametrize("how", list(Recompute))
def test_every_policy_gives_the_gradients_of_none(how):
    layers, x = make_layers(), torch.randn(2, 6, HIDDEN, requires_grad=True)
    want = step(layers, x)
    handle = checkpoint_layers(layers, [how] * 3)
    for got, expected in zip(step(layers, x), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    handle.remove()
    for got, expected in zip(step(layers, x), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def bytes_kept(how):
    """Bytes of activations that live between forward and backward, by the storages that the graph
    keeps alive."""
    layers, x = make_layers(), torch.randn(2, 6, HIDDEN, requires_grad=True)
    own = {p.untyped_storage()._cdata for p in layers.parameters()}
    storages = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage()._cdata] = (
                        weakref.ref(tensor.untyped_storage()),
                        tensor.untyped_storage().nbytes(),
                    )
            return out

    checkpoint_layers(layers, [how] * 3)
    with Watch():
        y = x
        for layer in layers:
            y = layer(y)
    gc.collect()
    alive = {
        pointer: size
        for pointer, (reference, size) in storages.items()
        if reference() is not None and pointer not in own
    }
    return sum(alive.values()) - y.untyped_storage().nbytes()


def test_each_policy_keeps_less_than_the_one_before():
    kept = {how: bytes_kept(how) for how in Recompute}
    boundary = 2 * 6 * HIDDEN * 4
    assert (
        kept[Recompute.FULL] == 2 * boundary
    )  # the inputs of layers 1 and 2; x itself was there before
    assert (
        kept[Recompute.FULL]
        < kept[Recompute.KEEP_ATTENTION]
        < kept[Recompute.KEEP_MATMULS]
        < kept[Recompute.KEEP]
    )


def test_selective_policies_do_not_run_the_kept_op_again():
    for how, runs in ((Recompute.FULL, 2), (Recompute.KEEP_ATTENTION, 1)):
        seen = []

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                seen.append(func.name())
                return func(*args, **(kwargs or {}))

        layer, x = make_layers(1)[0], torch.randn(1, 4, HIDDEN, requires_grad=True)
        with Count():
            run_layer(layer, how, x).sum().backward()
        assert seen.count("napkinmath::flash_attention") == runs


def test_chosen_ops_can_be_kept():
    layer, x = make_layers(1)[0], torch.randn(1, 4, HIDDEN, requires_grad=True)
    seen = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Count():
        run_layer(layer, Recompute.FULL, x, kept=frozenset({"napkinmath::gated"})).sum().backward()
    assert seen.count("napkinmath::gated") == 1 and seen.count("napkinmath::flash_attention") == 2


def test_offloading_lets_go_of_the_boundary_and_fetches_one_ahead():
    layers, store = make_layers(), HostStore()
    checkpoint_layers(layers, [Recompute.OFFLOAD] * 3, store=store)
    boundaries = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, inputs: boundaries.append(weakref.ref(inputs[0].untyped_storage()))
        )
    hidden = layers[0](torch.randn(1, 4, HIDDEN, requires_grad=True) * 1)
    for layer in layers[1:]:
        hidden = layer(hidden)
    gc.collect()
    assert store.num_parked == 3 and all(boundary() is None for boundary in boundaries)
    order = []
    start, fetch = store._start_back, store.fetch
    store._start_back = lambda parked: (
        order.append(("start", next(n for n, p in store._parked.items() if p is parked))),
        start(parked),
    )[1]
    store.fetch = lambda number: (order.append(("fetch", number)), fetch(number))[1]
    hidden.sum().backward()
    assert [number for what, number in order if what == "fetch"] == [2, 1, 0]
    assert order.index(("start", 1)) < order.index(("fetch", 1)) and order.index(
        ("start", 0)
    ) < order.index(("fetch", 0))
    assert store.num_parked == 0


def test_host_buffers_are_reused_from_step_to_step():
    layers, store = make_layers(), HostStore()
    checkpoint_layers(layers, [Recompute.OFFLOAD] * 3, store=store)
    sizes = []
    for _ in range(3):
        step(layers, torch.randn(2, 6, HIDDEN, requires_grad=True))
        sizes.append(store.num_bytes())
    assert sizes == [3 * 2 * 6 * HIDDEN * 4] * 3


def test_a_step_that_is_broken_off_gives_its_buffers_back():
    """A loss that is only looked at, an out-of-memory error: what was parked must not pile up, nor
    come back to the GPU later."""
    layers, store = make_layers(), HostStore()
    checkpoint_layers(layers, [Recompute.OFFLOAD] * 3, store=store)
    for _ in range(3):
        hidden = torch.randn(2, 6, HIDDEN, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden)
        del hidden
        gc.collect()
        assert store.num_parked == 0 and store.num_bytes() == 3 * 2 * 6 * HIDDEN * 4
    step(layers, torch.randn(2, 6, HIDDEN, requires_grad=True))
    assert store.num_parked == 0


def test_a_second_backward_over_what_was_fetched_says_so():
    layers, store = make_layers(1), HostStore()
    checkpoint_layers(layers, [Recompute.OFFLOAD], store=store)
    loss = layers[0](torch.randn(1, 4, HIDDEN, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(KernelInputError, match="one backward a forward"):
        loss.backward()


def test_the_offloading_module_gives_the_gradients_of_the_layer_and_parks_its_input():
    layers = make_layers()
    want = step(layers, torch.ones(2, 6, HIDDEN, requires_grad=True))
    store = HostStore()
    wrapped = torch.nn.ModuleList(OffloadCheckpoint(layer, store) for layer in layers)
    got = step(wrapped, torch.ones(2, 6, HIDDEN, requires_grad=True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (
        [layer.calls for layer in layers] == [3] * 3
        and store.num_bytes() == 3 * 2 * 6 * HIDDEN * 4
        and store.num_parked == 0
    )
    wrapped.eval()
    wrapped[0](torch.ones(2, 6, HIDDEN, requires_grad=True)).sum().backward()
    assert layers[0].calls == 4 and store.num_parked == 0


def test_evaluation_is_a_plain_call():
    layers = make_layers(1)
    checkpoint_layers(layers, full(1))
    layers.eval()
    layers[0](torch.randn(1, 4, HIDDEN, requires_grad=True)).sum().backward()
    assert layers[0].calls == 1


def test_every_k():
    keep, again = Recompute.KEEP, Recompute.FULL
    assert every(5, 2) == [again, keep, again, keep, again] and every(3, 1) == full(3)


@pytest.mark.parametrize("tokens", [1, 5, 7, 8])
def test_tiles_change_nothing(tokens):
    torch.manual_seed(1)
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(2, 4, 8, requires_grad=True)
    want = torch.autograd.grad(mlp(x).square().sum(), (x, *mlp.parameters()))
    tiled = TiledMLP(mlp, tokens)
    for got, expected in zip(
        torch.autograd.grad(tiled(x).square().sum(), (x, *mlp.parameters())), want, strict=True
    ):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), mlp(x))


def test_a_tile_at_a_time_is_alive():
    widths = []

    class Wide(torch.nn.Module):
        def forward(self, x):
            widths.append(x.shape[0])
            return torch.tanh(x.repeat(1, 4)).sum(-1, keepdim=True) * x

    TiledMLP(Wide(), 3)(torch.randn(2, 4, 8, requires_grad=True)).sum().backward()
    assert widths == [3, 3, 2, 2, 3, 3]  # forward in order, recomputed in the backward's


def options_of(draw):
    return [
        [
            LayerOption(
                f"{i}", draw(st.integers(0, 20)), draw(st.integers(0, 20)), draw(st.integers(0, 9))
            )
            for i in range(draw(st.integers(1, 3)))
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]


def peak_and_seconds(choice):
    held = peak = 0
    for option in choice:
        held += option.saved_bytes
        peak = max(peak, held + option.transient_bytes)
    return peak, sum(option.extra_seconds for option in choice)


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_plan_is_the_best_of_all_choices(data):
    layers = options_of(data.draw)
    budget = data.draw(st.integers(0, 120))
    feasible = [
        choice for choice in itertools.product(*layers) if peak_and_seconds(choice)[0] <= budget
    ]
    if not feasible:
        smallest = min(peak_and_seconds(choice)[0] for choice in itertools.product(*layers))
        with pytest.raises(KernelInputError, match=f"at least {smallest} bytes"):
            plan_layers(layers, budget)
        return
    plan = plan_layers(layers, budget)
    assert plan.extra_seconds == min(peak_and_seconds(choice)[1] for choice in feasible)
    assert (plan.peak_bytes, plan.extra_seconds) == peak_and_seconds(plan.options)


def test_the_last_layers_are_kept_first():
    """A kept layer needs no second copy in its backward, and late ones are freed before early ones
    run theirs."""
    options = [LayerOption("keep", 10, 0, 0.0), LayerOption("full", 1, 9, 1.0)]
    assert plan_layers([options] * 4, 40).names == ("keep",) * 4
    plan = plan_layers([options] * 4, 22)
    assert plan.extra_seconds == 2.0 and plan.peak_bytes <= 22


def test_eighty_layers_plan_in_moments():
    rng = random.Random(0)
    layers = [
        [
            LayerOption("keep", 1000 + rng.randrange(100), 0, 0.0),
            LayerOption("attention", 300, 700, 0.6),
            LayerOption("full", 100, 900, 1.0),
        ]
        for _ in range(80)
    ]
    plan = plan_layers(layers, 40_000)
    assert plan.peak_bytes <= 40_000 and len(plan.names) == 80


def test_bad_input_is_refused_in_one_line():
    layers = make_layers(2)
    bad = [
        (lambda: checkpoint_layers(layers, full(3)), "3 policies"),
        (lambda: every(3, 0), "k=0"),
        (lambda: TiledMLP(layers[0], 0), "tile_tokens 0"),
        (
            lambda: run_layer(layers[0], Recompute.OFFLOAD, torch.randn(1, 2, HIDDEN)),
            "without a store",
        ),
        (lambda: plan_layers([[]], 10), "without options"),
        (
            lambda: [checkpoint_layers(layers, full(2)) for _ in range(2)],
            "a Layer that is checkpointed",
        ),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
