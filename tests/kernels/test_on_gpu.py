"""Every kernel at sizes of real models on a GPU (NAPKINMATH_GPU_TESTS=1), against float64 and plain torch; small in the interpreter.

What the interpreter cannot show is here: synchronisation, real tiles, bf16 as the hardware rounds it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from kernel_numerics import assert_no_worse_than_torch
from napkinmath_kernels.ops.cross_entropy import linear_cross_entropy
from napkinmath_kernels.ops.dropout import drop, keep_mask
from napkinmath_kernels.ops.flash_attention import flash_attention
from napkinmath_kernels.ops.gated import geglu, swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.nf4 import QuantizedWeight, dequantize, quantize
from napkinmath_kernels.ops.qlora import FrozenLinear, LoraAdapter, qlora_linears
from napkinmath_kernels.ops.qlora_mlp import qlora_mlp
from napkinmath_kernels.ops.rms_norm import rms_norm
from napkinmath_kernels.ops.rope import rope

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
    x, weight, bias, residual = (new(device, dtype, *shape) for shape in ((rows, width), (width,), (width,), (rows, width)))

    def plain(x, w):
        if x.dtype is torch.float64:
            return F.rms_norm(x, (width,), w, 1e-6)
        return F.rms_norm(x.float(), (width,), None, 1e-6).to(x.dtype) * w

    assert_no_worse_than_torch(lambda x, w: rms_norm(x, w, 1e-6), plain, [x, weight])
    added = lambda x, w, r: (plain(x + r, w), x + r)  # noqa: E731
    assert_no_worse_than_torch(lambda x, w, r: rms_norm(x, w, 1e-6, residual=r), added, [x, weight, residual])
    assert_no_worse_than_torch(layer_norm, lambda x, w, b: F.layer_norm(x, (width,), w, b), [x, weight, bias])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(device, dtype):
    shape = sized(device, (3, 70), (513, 14336))
    inputs = [new(device, dtype, *shape) for _ in range(2)]
    assert_no_worse_than_torch(swiglu, lambda g, u: F.silu(g) * u, inputs)
    assert_no_worse_than_torch(geglu, lambda g, u: F.gelu(g, approximate="tanh") * u, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(device, dtype):
    batch, tokens, size = sized(device, (1, 5, 16), (2, 517, 128))
    q, k = (new(device, dtype, batch, heads, tokens, size) for heads in sized(device, (4, 2), (32, 8)))
    angle = torch.rand(1, tokens, size, device=device) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def plain(*inputs):
        half = size // 2
        return tuple(
            x * cos[:, None].to(x.dtype) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None].to(x.dtype) for x in inputs
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
    inputs = [new(device, dtype, 1, h, n, size) for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = position - torch.arange(keys, device=device)[None]
    hidden = (distance < 0) if mask.get("causal") else torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | (distance >= mask.get("window", 10**6))

    def plain(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.transpose(2, 3) / math.sqrt(size)).masked_fill(hidden, float("-inf"))
        return torch.softmax(scores if scores.dtype is torch.float64 else scores.float(), -1).to(q.dtype) @ v

    assert_no_worse_than_torch(lambda *x: flash_attention(*x, **mask), plain, inputs)
    first, second = (torch.autograd.grad(flash_attention(*inputs, **mask).float().square().sum(), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("trains_head", [False, True])
def test_loss(device, trains_head):
    rows, hidden, vocabulary = sized(device, (5, 8, 100), (700, 512, 50257))
    h = new(device, torch.bfloat16, rows, hidden)
    weight = new(device, torch.bfloat16, vocabulary, hidden, scale=1 / math.sqrt(hidden)).requires_grad_(trains_head)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    targets[::7] = -100
    chunk_bytes = rows * vocabulary  # two chunks and a bit

    def plain(h, w):
        logits = h @ w.t()
        return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), targets)

    assert_no_worse_than_torch(lambda h, w: linear_cross_entropy(h, w, targets, chunk_bytes=chunk_bytes), plain, [h, weight])


def test_four_bit_weights_equal_bitsandbytes(device):
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(*sized(device, (64, 128), (4096, 4096)), device=device).bfloat16()
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(dequantize(QuantizedWeight.from_bitsandbytes(packed, state)), bnb.dequantize_4bit(packed, state))
    same = (quantize(weight).packed == packed).float().mean().item()
    assert same == 1.0 if device == "cpu" else same > 0.999  # on a GPU bitsandbytes rounds its decision bounds to seven digits


def test_dropout_equals_its_reference(device):
    x = torch.randn(sized(device, 5000, 1_000_003), device=device)
    seed = torch.tensor([77], device=device)
    torch.testing.assert_close(drop(x, seed, 1, 0.1), torch.where(keep_mask(x.numel(), seed, 1, 0.1), x / 0.9, 0.0))


def test_qlora(device):
    hidden, width, tokens = sized(device, (64, 128, 5), (1024, 2816, 600))
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    weights = [quantize((torch.randn(*shape, device=device) / math.sqrt(shape[1])).bfloat16()) for shape in shapes]
    dense = [dequantize(weight, dtype=torch.float32) for weight in weights]
    x = new(device, torch.bfloat16, tokens, hidden)
    flat = [new(device, torch.float32, *s, scale=0.05) for out, inner in shapes for s in ((8, inner), (out, 8))]

    def linears(flat):
        return [FrozenLinear(w, None, LoraAdapter(flat[2 * i], flat[2 * i + 1], 2.0)) for i, w in enumerate(weights)]

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
