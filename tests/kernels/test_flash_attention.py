"""FlashAttention: accuracy against float64 and plain torch, masks, grouped heads, packing,
extremes, memory bounds, registration."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernel_numerics import (
    FLOAT_DTYPES,
    assert_no_worse_than_torch,
    inside_poison,
    poisoned_allocations,
)
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.flash_attention import (
    FlashAttention,
    _flash_backward_op,
    _flash_op,
    flash_attention,
)
from napkinmath_kernels.ops.flash_attention_reference import (
    FlashCall,
    kept_weights,
    visible_keys,
)
from napkinmath_kernels.triton_kernels import flash_attention_launch
from torch.autograd import gradcheck
from torch.library import opcheck

MASKS = [{}, {"causal": True}, {"causal": True, "window": 9}, {"window": 5}]


def plain(q, k, v, *, causal=False, window=0, scale=None):
    """The textbook, in the inputs' dtype with a softmax in fp32, as eager models have it."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.shape[3]))
    visible = visible_keys(q.shape[2], k.shape[2], causal, window, q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    wide = scores if scores.dtype is torch.float64 else scores.float()
    weights = torch.softmax(wide, -1).nan_to_num(0.0)  # a query that sees nothing
    return weights.to(q.dtype) @ v


def make(batch, heads, kv_heads, queries, keys, size=64, dtype=torch.float32):
    q = torch.randn(batch, heads, queries, size).to(dtype).requires_grad_()
    k, v = (torch.randn(batch, kv_heads, keys, size).to(dtype).requires_grad_() for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 3), (1, 2, 1, 37, 37), (2, 4, 2, 19, 50)])
def test_error_is_at_most_twice_that_of_plain_torch(backend, dtype, mask, shape):
    assert_no_worse_than_torch(
        lambda *x: flash_attention(*x, **mask),
        lambda *x: plain(*x, **mask),
        make(*shape, dtype=dtype),
    )


@pytest.mark.parametrize("size", [96, 128, 256])
def test_other_head_sizes(triton_backend, size):
    inputs = make(1, 2, 1, 20, 20, size, torch.float16)
    assert_no_worse_than_torch(
        lambda *x: flash_attention(*x, causal=True), lambda *x: plain(*x, causal=True), inputs
    )


def test_more_queries_than_keys_leaves_rows_that_see_nothing(backend):
    q, k, v = make(1, 2, 1, 40, 7)
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert (
        not o[:, :, :33].any()
        and (lse[:, :, :33] == float("-inf")).all()
        and lse[:, :, 33:].isfinite().all()
    )
    halves = [x.detach().half().requires_grad_() for x in (q, k, v)]
    assert_no_worse_than_torch(
        lambda *x: flash_attention(*x, causal=True), lambda *x: plain(*x, causal=True), halves
    )


def test_one_token_returns_its_value(backend):
    """The gradients of q and k are differences of two equal sums: zero up to their rounding, 64
    products of order one."""
    q, k, v = make(1, 1, 1, 1, 1)
    o = flash_attention(q, k, v)
    torch.testing.assert_close(o, v.detach())
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert max(dq.abs().max(), dk.abs().max()) < 64 * torch.finfo(
        torch.float32
    ).eps and torch.equal(dv, torch.ones_like(v))


def test_the_log_sum_exp_and_its_gradient(backend):
    inputs = make(1, 2, 1, 9, 21)

    def exact(q, k, v):
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8
        return plain(q, k, v), torch.logsumexp(
            scores if scores.dtype is torch.float64 else scores.float(), -1
        )

    assert_no_worse_than_torch(lambda *x: flash_attention(*x, return_lse=True), exact, inputs)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences_equal_separate_ones(backend, mask):
    lengths_q, lengths_k = [5, 33, 0, 1], [5, 40, 3, 1]
    cu_q, cu_k = (
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)
    )
    q, k, v = make(1, 4, 2, sum(lengths_q), sum(lengths_k))
    packed = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **mask)
    parts = [
        flash_attention(
            *(x[:, :, c[i] : c[i + 1]] for x, c in ((q, cu_q), (k, cu_k), (v, cu_k))), **mask
        )
        for i in range(len(lengths_q))
    ]
    joined = torch.cat(parts, 2)
    torch.testing.assert_close(packed, joined)
    upstream = torch.randn_like(q)
    for got, want in zip(
        torch.autograd.grad(packed, (q, k, v), upstream),
        torch.autograd.grad(joined, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_transposed_and_expanded_views(backend):
    """(batch, tokens, heads, size) seen as (batch, heads, tokens, size), and an upstream gradient
    that is not packed."""
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in make(2, 4, 2, 20, 20)
    )
    packed = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    upstream = torch.randn(2, 20, 4, 64).transpose(1, 2)
    got = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), upstream)
    want = torch.autograd.grad(flash_attention(*packed), packed, upstream.contiguous())
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right)
    scalar = torch.autograd.grad(
        flash_attention(q, k, v).sum(), (v,)
    )  # an expanded upstream, all strides zero
    assert scalar[0].isfinite().all()


def test_results_need_no_copy_to_become_tokens(backend):
    o = flash_attention(*make(2, 4, 2, 5, 5))
    assert o.transpose(1, 2).is_contiguous()
    assert o.transpose(1, 2).flatten(2).data_ptr() == o.data_ptr()


@pytest.mark.parametrize("scale", [1e4, 0.0, -1.0])
def test_extreme_scores(backend, scale):
    inputs = make(1, 1, 1, 20, 20)
    results = torch.stack(
        [
            flash_attention(*inputs, scale=scale).detach(),
            plain(*[x.double() for x in inputs], scale=scale or 1e-300).float(),
        ]
    )
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_reach_their_query_and_no_other(backend, special):
    q, k, v = (x.detach() for x in make(1, 1, 1, 20, 20))
    q[0, 0, 7, 3] = special
    o = flash_attention(q, k, v)
    assert o[0, 0, 7].isnan().all() and o.isnan().any(-1).sum() == 1


def test_a_nan_key_spoils_the_rows_that_see_it(backend):
    q, k, v = (x.detach() for x in make(1, 1, 1, 20, 20))
    k[0, 0, 12] = float("nan")
    o = flash_attention(q, k, v, causal=True)
    assert o[0, 0, :12].isfinite().all() and o[0, 0, 12:].isnan().any(-1).all()


def test_zero_tokens_and_zero_keys(backend):
    assert flash_attention(*make(1, 2, 1, 0, 4)).shape == (1, 2, 0, 64)
    q, k, v = make(1, 2, 1, 3, 0)
    o = flash_attention(q, k, v)
    assert not o.any() and not torch.autograd.grad(o.sum(), (q,))[0].any()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nothing_outside_the_tensors_is_read_or_written(triton_backend, mask):
    q, k, v = (inside_poison(x) for x in make(1, 2, 1, 37, 45, dtype=torch.bfloat16))
    with poisoned_allocations():
        o, lse = flash_attention(q, k, v, return_lse=True, **mask)
        gradients = torch.autograd.grad(
            o, (q, k, v), inside_poison(torch.randn(1, 2, 37, 64, dtype=torch.bfloat16))
        )
        assert all(x.isfinite().all() for x in (o, lse, *gradients))


def test_head_size_96_reads_no_neighbour(triton_backend):
    """96 is padded to 128 inside: the last head's padding lies outside the tensor."""
    q, k, v = (inside_poison(x) for x in make(1, 1, 1, 18, 18, 96))
    with poisoned_allocations():
        o = flash_attention(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), inside_poison(torch.randn(1, 1, 18, 96)))
        assert all(x.isfinite().all() for x in (o, *gradients))


def test_results_repeat_bit_for_bit(backend):
    inputs = make(1, 4, 2, 40, 40)
    first, second = (
        torch.autograd.grad(flash_attention(*inputs, causal=True).square().sum(), inputs)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradcheck(mask):
    inputs = make(1, 2, 1, 4, 5, size=3, dtype=torch.float64)
    options = {**mask, "window": 3} if "window" in mask else mask
    assert gradcheck(lambda *x: flash_attention(*x, return_lse=True, **options), inputs)


def test_opcheck():
    q, k, v = make(1, 2, 1, 6, 6)
    options = (None, None, 6, 6, 0.125, True, 0)
    opcheck(_flash_op, (q, k, v, *options))
    detached = [x.detach() for x in (q, k, v)]
    o, lse = _flash_op(*detached, *options)
    opcheck(_flash_backward_op, (*detached, o, lse, torch.randn_like(o), None, *options))


def test_module_equals_the_function():
    q, k, v = make(1, 2, 1, 6, 6)
    assert torch.equal(
        FlashAttention(window=3)(q, k, v), flash_attention(q, k, v, causal=True, window=3)
    )


def test_bad_input_is_refused_in_one_line(triton_backend):
    q, k, v = (x.detach() for x in make(1, 4, 2, 6, 6))
    odd = torch.zeros(1, 2, 4, 80)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    bad = [
        (lambda: flash_attention(q.long(), k, v), "int64"),
        (lambda: flash_attention(q, k.half(), v), "k of dtype float16"),
        (lambda: flash_attention(odd, odd, odd), "head size 80"),
        (lambda: flash_attention(q, k, v[:, :1]), r"v \(1, 1, 6, 64\)"),
        (lambda: flash_attention(q[:, :3], k, v), "3 query heads and 2"),
        (lambda: flash_attention(q, k, v, window=0), "window 0"),
        (lambda: flash_attention(q, k, v, cu_seqlens_q=bounds), "one of cu_seqlens_q"),
        (
            lambda: flash_attention(q, k, v, cu_seqlens_q=bounds.long(), cu_seqlens_k=bounds),
            "int64",
        ),
        (
            lambda: flash_attention(q, k, v, cu_seqlens_q=bounds + 1, cu_seqlens_k=bounds),
            r"\[1, 7\]",
        ),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value) and 'attention="sdpa"' in str(caught.value)


def test_autocast_gives_its_type_as_for_torchs_attention(backend):
    """A norm of queries with an fp32 weight leaves them fp32 under autocast."""
    inputs = make(1, 2, 1, 6, 6)
    with torch.autocast("cpu", torch.float16):
        o = flash_attention(*inputs, causal=True)
    assert o.dtype is torch.float16
    assert all(gradient.dtype is torch.float32 for gradient in torch.autograd.grad(o.sum(), inputs))


def test_rows_further_apart_than_32_bits_reach(triton_backend, tmp_path):
    """Half a million tokens of 32 heads: token times stride passes 2^31. The file is sparse, so it
    takes no room."""
    stride, tokens = 2**26, 35
    far = torch.from_file(
        str(tmp_path / "far"), shared=True, size=(tokens - 1) * stride + 64, dtype=torch.float16
    )
    near = [x.detach() for x in make(1, 1, 1, tokens, tokens, dtype=torch.float16)]
    q = far.as_strided((1, 1, tokens, 64), (0, 64, stride, 1)).copy_(near[0]).requires_grad_()
    want = near[0].clone().requires_grad_()
    got = torch.autograd.grad(flash_attention(q, *near[1:], causal=True).sum(), q)[0]
    assert torch.equal(
        got, torch.autograd.grad(flash_attention(want, *near[1:], causal=True).sum(), want)[0]
    )


def test_padding_after_the_last_packed_sequence_is_zero(triton_backend):
    """On a GPU the bounds are not read, so they may end before the tokens do: what lies behind must
    not be what memory held."""
    q, k, v = (x.detach() for x in make(1, 2, 1, 20, 20))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    options = (bounds, bounds, 7, 7, 0.125, True, 0)
    with poisoned_allocations():
        o, lse = _flash_op(q, k, v, *options)
        assert (
            not o[:, :, 12:].any()
            and (lse[:, :, 12:] == float("-inf")).all()
            and o.isfinite().all()
        )
        backward = _flash_backward_op(q, k, v, o, lse, torch.randn_like(q), None, *options)
        for gradient in backward[:3]:
            assert gradient.isfinite().all() and not gradient[:, :, 12:].any()


def plain_with_extras(q, k, v, sinks=None, *, softcap=None, kept=None, **mask):
    """The textbook with a cap, sinks and the weights that dropout keeps."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(
        q.shape[2], k.shape[2], mask.get("causal", False), mask.get("window", 0), q.device
    )
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    wide = scores if scores.dtype is torch.float64 else scores.float()
    if sinks is not None:
        column = sinks.to(wide.dtype).view(1, -1, 1, 1).expand(*wide.shape[:3], 1)
        wide = torch.cat((wide, column), -1)
    weights = torch.softmax(wide, -1).nan_to_num(0.0)[..., : k.shape[2]]
    return (weights if kept is None else weights * kept.to(weights.dtype)).to(q.dtype) @ v


EXTRAS = {
    "cap": {"softcap": 2.0, "causal": True},
    "cap and window": {"softcap": 2.0, "causal": True, "window": 9},
    "sinks": {"causal": True},
    "sinks and window": {"causal": True, "window": 9},
    "dropout": {"dropout": 0.3, "causal": True},
    "all": {"softcap": 3.0, "dropout": 0.2},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_caps_sinks_and_dropout_are_as_accurate_as_plain_torch(backend, name):
    """In fp16, which is the coarsest type that the interpreter computes as a GPU does."""
    options = EXTRAS[name]
    inputs = make(2, 4, 2, 37, 50, dtype=torch.float16)
    if "sinks" in name or name == "all":
        inputs = (*inputs, torch.randn(4, requires_grad=True))
    seed = torch.tensor([2**61 + 12345])
    kept = None
    if "dropout" in options:
        call = FlashCall(None, None, 37, 50, 1.0, True, 0, dropout=options["dropout"], seed=seed)
        kept = kept_weights((2, 4, 37, 50), call, 0)
        assert 0.5 < (kept > 0).double().mean() < 0.9
    mask = {key: value for key, value in options.items() if key != "dropout"}
    assert_no_worse_than_torch(
        lambda q, k, v, *s: flash_attention(
            q, k, v, sinks=s[0] if s else None, seed=seed if kept is not None else None, **options
        ),
        lambda *x: plain_with_extras(*x, kept=kept, **mask),
        inputs,
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tensor_descriptors_change_no_bit(triton_backend, monkeypatch, mask):
    """The copy engine's form reads the same numbers, also where the last block is not full."""
    q, k, v = make(1, 2, 1, 37, 45, dtype=torch.float16)
    by_pointers = flash_attention(q, k, v, return_lse=True, **mask)
    tile = dataclasses.replace(flash_attention_launch.INTERPRETED[0], tma=True)
    monkeypatch.setattr(flash_attention_launch, "INTERPRETED", (tile,))
    for x, y in zip(by_pointers, flash_attention(q, k, v, return_lse=True, **mask), strict=True):
        assert torch.equal(x, y)
