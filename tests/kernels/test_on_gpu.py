"""Every kernel at sizes of real models on a GPU (NAPKINMATH_GPU_TESTS=1), against float64 and plain
torch; small in the interpreter.

What the interpreter cannot show is here: synchronisation, real tiles, bf16 as the hardware rounds
it.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from kernel_numerics import assert_no_worse_than_torch
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.checkpoint import Recompute, checkpoint_layers
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.dropout import drop, keep_mask
from napkinmath_kernels.ops.expert_linear import ExpertAdapter, expert_linear
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import geglu, swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.linear_group import FrozenLinear, LoraAdapter
from napkinmath_kernels.ops.log_probabilities import linear_log_probabilities
from napkinmath_kernels.ops.nf4 import QuantizedWeight, dequantize, quantize
from napkinmath_kernels.ops.qlora import qlora_linears
from napkinmath_kernels.ops.qlora_mlp import qlora_mlp
from napkinmath_kernels.ops.rms_norm import rms_norm
from napkinmath_kernels.ops.rope import rope
from napkinmath_kernels.patching import patch

pytestmark = pytest.mark.usefixtures("triton_backend")
DTYPES = (torch.bfloat16, torch.float16)


def sized(device, small, large):
    return large if device == "cuda" else small


def new(device, dtype, *shape, scale=1.0):
    return (scale * torch.randn(*shape, device=device)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [(64, 4096), (48, 5120), (80, 16384)])
def test_norms(device, dtype, hidden):
    rows, width = sized(device, 5, 1000), sized(device, *hidden)
    x, weight, bias, residual = (
        new(device, dtype, *shape) for shape in ((rows, width), (width,), (width,), (rows, width))
    )

    def plain(x, w):
        if x.dtype is torch.float64:
            return F.rms_norm(x, (width,), w, 1e-6)
        return F.rms_norm(x.float(), (width,), None, 1e-6).to(x.dtype) * w

    assert_no_worse_than_torch(lambda x, w: rms_norm(x, w, 1e-6), plain, [x, weight])
    added = lambda x, w, r: (plain(x + r, w), x + r)  # noqa: E731
    assert_no_worse_than_torch(
        lambda x, w, r: rms_norm(x, w, 1e-6, residual=r), added, [x, weight, residual]
    )
    assert_no_worse_than_torch(
        layer_norm, lambda x, w, b: F.layer_norm(x, (width,), w, b), [x, weight, bias]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(device, dtype):
    shape = sized(device, (3, 70), (513, 14336))
    inputs = [new(device, dtype, *shape) for _ in range(2)]
    assert_no_worse_than_torch(swiglu, lambda g, u: F.silu(g) * u, inputs)
    assert_no_worse_than_torch(geglu, lambda g, u: F.gelu(g, approximate="tanh") * u, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(device, dtype):
    batch, tokens, size = sized(device, (1, 5, 16), (2, 517, 128))
    q, k = (
        new(device, dtype, batch, heads, tokens, size) for heads in sized(device, (4, 2), (32, 8))
    )
    angle = torch.rand(1, tokens, size, device=device) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def plain(*inputs):
        half = size // 2
        return tuple(
            x * cos[:, None].to(x.dtype)
            + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None].to(x.dtype)
            for x in inputs
        )

    assert_no_worse_than_torch(lambda q, k: rope(q, k, cos, sin), plain, [q, k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 100}], ids=str)
def test_attention(device, dtype, size, mask):
    if device == "cpu" and (size, dtype) != (64, torch.float16):
        pytest.skip("the interpreter's file has these")
    queries, keys = sized(device, (9, 9), (517, 777))
    heads, kv_heads = 4, 2
    inputs = [
        new(device, dtype, 1, h, n, size)
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = position - torch.arange(keys, device=device)[None]
    hidden = (distance < 0) if mask.get("causal") else torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | (distance >= mask.get("window", 10**6))

    def plain(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.transpose(2, 3) / math.sqrt(size)).masked_fill(hidden, float("-inf"))
        return (
            torch.softmax(scores if scores.dtype is torch.float64 else scores.float(), -1).to(
                q.dtype
            )
            @ v
        )

    assert_no_worse_than_torch(lambda *x: flash_attention(*x, **mask), plain, inputs)
    first, second = (
        torch.autograd.grad(flash_attention(*inputs, **mask).float().square().sum(), inputs)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("trains_head", [False, True])
def test_loss(device, trains_head):
    rows, hidden, vocabulary = sized(device, (5, 8, 100), (700, 512, 50257))
    h = new(device, torch.bfloat16, rows, hidden)
    weight = new(
        device, torch.bfloat16, vocabulary, hidden, scale=1 / math.sqrt(hidden)
    ).requires_grad_(trains_head)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    targets[::7] = -100
    chunk_bytes = rows * vocabulary  # two chunks and a bit

    def plain(h, w):
        logits = h @ w.t()
        return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), targets)

    assert_no_worse_than_torch(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk_bytes=chunk_bytes),
        plain,
        [h, weight],
    )


def test_four_bit_weights_equal_bitsandbytes(device):
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(*sized(device, (64, 128), (4096, 4096)), device=device).bfloat16()
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(
        dequantize(QuantizedWeight.from_bitsandbytes(packed, state)),
        bnb.dequantize_4bit(packed, state),
    )
    same = (quantize(weight).packed == packed).float().mean().item()
    assert (
        same == 1.0 if device == "cpu" else same > 0.999
    )  # on a GPU bitsandbytes rounds its decision bounds to seven digits


def test_dropout_equals_its_reference(device):
    x = torch.randn(sized(device, 5000, 1_000_003), device=device)
    seed = torch.tensor([77], device=device)
    torch.testing.assert_close(
        drop(x, seed, 1, 0.1), torch.where(keep_mask(x.numel(), seed, 1, 0.1), x / 0.9, 0.0)
    )


def test_qlora(device):
    hidden, width, tokens = sized(device, (64, 128, 5), (1024, 2816, 600))
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    weights = [
        quantize((torch.randn(*shape, device=device) / math.sqrt(shape[1])).bfloat16())
        for shape in shapes
    ]
    dense = [dequantize(weight, dtype=torch.float32) for weight in weights]
    x = new(device, torch.bfloat16, tokens, hidden)
    flat = [
        new(device, torch.float32, *s, scale=0.05)
        for out, inner in shapes
        for s in ((8, inner), (out, 8))
    ]

    def linears(flat):
        return [
            FrozenLinear(w, None, LoraAdapter(flat[2 * i], flat[2 * i + 1], 2.0))
            for i, w in enumerate(weights)
        ]

    def one(x, i, flat):
        a, b = flat[2 * i].to(x.dtype), flat[2 * i + 1].to(x.dtype)
        return F.linear(x, dense[i].to(x.dtype)) + 2.0 * F.linear(F.linear(x, a), b)

    assert_no_worse_than_torch(
        lambda x, *f: qlora_linears(x, linears(f)[:2]),
        lambda x, *f: [one(x, 0, f), one(x, 1, f)],
        [x, *flat[:4], *(t.detach() for t in flat[4:])],
    )
    plain_mlp = lambda x, *f: one(F.silu(one(x, 0, f)) * one(x, 1, f), 2, f)  # noqa: E731
    assert_no_worse_than_torch(lambda x, *f: qlora_mlp(x, *linears(f)), plain_mlp, [x, *flat])


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("four_bit", [False, True])
def test_experts(device, four_bit, rank):
    hidden, width, counts = sized(
        device, (64, 96, (3, 0, 2)), (2048, 1536, (300, 0, 1, 900, 64, 2, 700, 33))
    )
    experts = len(counts)
    offsets = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    dense = (torch.randn(experts, width, hidden, device=device) / math.sqrt(hidden)).bfloat16()
    stack = quantize(dense) if four_bit else dense
    values = dequantize(stack, dtype=torch.float32) if four_bit else dense.float()
    x = new(device, torch.bfloat16, sum(counts), hidden)
    a = new(device, torch.float32, experts, rank, hidden, scale=0.05)
    b = new(device, torch.float32, width, rank, experts, scale=0.05)

    def plain(x, a, b):
        rows = x.split(list(counts))
        each = zip(
            rows, values.to(x.dtype), a.to(x.dtype), b.permute(2, 0, 1).to(x.dtype), strict=True
        )
        return torch.cat(
            [F.linear(r, w) + 2.0 * F.linear(F.linear(r, p), q) for r, w, p, q in each]
        )

    def ours(x, a, b):
        return expert_linear(x, stack, offsets, ExpertAdapter(a, b.permute(2, 0, 1), 2.0))

    assert_no_worse_than_torch(ours, plain, [x, a, b])


@pytest.mark.parametrize("trains_head", [False, True])
def test_log_probabilities(device, trains_head):
    rows, hidden, vocabulary = sized(device, (6, 64, 50), (700, 1024, 32_003))
    h = new(device, torch.bfloat16, rows, hidden)
    weight = new(device, torch.bfloat16, vocabulary, hidden, scale=hidden**-0.5)
    weight.requires_grad_(trains_head)
    targets = torch.randint(0, vocabulary, (rows,), device=device)

    def plain(h, w):
        logits = F.linear(h, w)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return wide.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    assert_no_worse_than_torch(
        lambda h, w: linear_log_probabilities(h, w, targets).log_probs, plain, [h, weight]
    )


@pytest.mark.parametrize("mask", [{"causal": True}, {}, {"causal": True, "window": 100}])
def test_packed_sequences(device, mask):
    lengths = sized(device, (3, 1, 9), (300, 1, 517, 64))
    size, total = 128, sum(lengths)
    if device == "cpu" and "window" in mask:
        mask = {**mask, "window": 3}
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    q, k, v = (new(device, torch.bfloat16, 1, heads, total, size) for heads in (4, 2, 2))
    packed, lse = flash_attention(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True, **mask
    )
    ends = bounds.tolist()
    apart = [
        flash_attention(*(x[:, :, a:b] for x in (q, k, v)), return_lse=True, **mask)
        for a, b in itertools.pairwise(ends)
    ]
    together = [torch.cat(parts, 2) for parts in zip(*apart, strict=True)]
    upstream = torch.randn_like(packed)
    gradients = [
        torch.autograd.grad(o, (q, k, v), upstream, retain_graph=True)
        for o in (packed, together[0])
    ]
    for ours, theirs in ((packed, together[0]), (lse, together[1]), *zip(*gradients, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


class Layer(torch.nn.Module):
    """Enough work for a copy to hide behind, with dropout, so that a recompute that draws anew
    would show."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(hidden, 4 * hidden),
            torch.nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


def test_offloading_gives_the_gradients_of_a_recompute(device):
    rows, hidden = sized(device, (8, 16), (8192, 1024))
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Layer(hidden) for _ in range(6)).to(device, torch.bfloat16)
    x = torch.randn(rows, hidden, device=device).bfloat16()
    found = []
    for how in (Recompute.FULL, Recompute.OFFLOAD):
        handle = checkpoint_layers(layers, [how] * len(layers))
        for _ in range(3):  # the second and third step use the first one's buffers again
            torch.manual_seed(1)
            hidden_states = x.clone().requires_grad_()
            out = hidden_states
            for layer in layers:
                out = layer(out * 1)
            gradients = torch.autograd.grad(
                out.float().square().mean(), [hidden_states, *layers.parameters()]
            )
        found.append(gradients)
        assert handle.store.num_parked == 0
        handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_reference_is_what_runs_when_it_is_forced(device):
    """Also in the backward, which a GPU's autograd runs in another thread: float64 there is not for
    the kernels."""
    x, weight = (
        torch.randn(*shape, dtype=torch.float64, device=device).requires_grad_()
        for shape in ((5, 64), (64,))
    )
    with use_backend(Backend.REFERENCE):
        ours = torch.autograd.grad(rms_norm(x, weight, 1e-6).square().sum(), (x, weight))
    plain = torch.autograd.grad(F.rms_norm(x, (64,), weight, 1e-6).square().sum(), (x, weight))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_captured_step_can_be_replayed(device):
    if device == "cpu":
        pytest.skip("graphs are a GPU's")
    weight = quantize((torch.randn(2048, 1024, device=device) / 32).bfloat16())
    a, b = (torch.randn(*shape, device=device).requires_grad_() for shape in ((8, 1024), (2048, 8)))
    x, dy = (
        torch.randn(64, 1024, device=device).bfloat16().requires_grad_(),
        torch.randn(64, 2048, device=device).bfloat16(),
    )

    def step():
        return torch.autograd.grad(
            qlora_linears(
                rms_norm(x, x.new_ones(1024)), [FrozenLinear(weight, None, LoraAdapter(a, b, 1.0))]
            ),
            x,
            dy,
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    torch.testing.assert_close(captured[0], step()[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("policy", [None, Recompute.FULL, Recompute.OFFLOAD])
def test_a_patched_model(device, policy):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    hidden, tokens, vocabulary = sized(device, (64, 5, 50), (512, 700, 1000))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    model = (
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        .to(device)
        .train()
    )
    ids = torch.randint(3, vocabulary, (2, tokens), device=device)
    found = []
    for patched in (False, True):
        if patched:
            patch(model, attention="napkinmath", checkpoint=policy)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(*found, strict=True):
        assert ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item() < 5e-2
