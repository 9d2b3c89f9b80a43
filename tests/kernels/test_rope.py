"""Rotary embedding: accuracy, partial rotation, in place, strides, memory bounds, registration,
errors."""

from __future__ import annotations

import pytest
import torch
from kernel_numerics import (
    FLOAT_DTYPES,
    assert_no_worse_than_torch,
    inside_poison,
    poisoned_allocations,
)
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.rope import RotaryEmbedding, _rope_in_place_op, _rope_op, rope
from torch.autograd import gradcheck
from torch.library import opcheck


def plain(q, k, cos, sin):
    """transformers' apply_rotary_pos_emb, with a part that is not rotated."""
    rotary = cos.shape[-1]
    cos, sin = cos.to(q.dtype).unsqueeze(1), sin.to(q.dtype).unsqueeze(1)

    def rotate(x):
        turned, rest = x[..., :rotary], x[..., rotary:]
        swapped = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), -1)
        return torch.cat((turned * cos + swapped * sin, rest), -1)

    return rotate(q), rotate(k)


def make(batch, q_heads, k_heads, tokens, size, rotary=None, dtype=torch.float32):
    q, k = (
        torch.randn(batch, heads, tokens, size).to(dtype).requires_grad_()
        for heads in (q_heads, k_heads)
    )
    angle = torch.rand(batch, tokens, rotary or size) * 6
    return q, k, angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2), (2, 3, 1, 5, 6), (1, 4, 2, 3, 64), (2, 5, 5, 2, 96)]
)
def test_error_is_at_most_twice_that_of_plain_torch(backend, dtype, shape):
    q, k, cos, sin = make(*shape, dtype=dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    exact = lambda q, k: plain(q, k, cos.double(), sin.double())  # noqa: E731
    assert_no_worse_than_torch(
        lambda q, k: rope(q, k, cos, sin), lambda q, k: plain(q, k, cos, sin), [q, k], exact
    )


def test_a_part_of_the_head_is_rotated(backend):
    q, k, cos, sin = make(2, 4, 2, 3, 16, rotary=8)
    assert_no_worse_than_torch(
        lambda q, k: rope(q, k, cos, sin), lambda q, k: plain(q, k, cos, sin), [q, k]
    )


@pytest.mark.parametrize("shared", [True, False])
def test_in_place_equals_out_of_place_with_gradients(backend, shared):
    q, k, cos, sin = make(2, 4, 2, 3, 8)
    if shared:
        cos, sin = cos[:1], sin[:1]
    want = rope(q, k, cos, sin)
    upstream = [torch.randn_like(x) for x in want]
    copies = (
        q.transpose(1, 2).contiguous().transpose(1, 2) * 1,
        k * 1,
    )  # tokens outside heads, as a projection gives them
    got = rope(*copies, cos, sin, inplace=True)
    assert got[0].data_ptr() == copies[0].data_ptr()
    for left, right in zip(
        (*got, *torch.autograd.grad(got, (q, k), upstream)),
        (*want, *torch.autograd.grad(want, (q, k), upstream)),
        strict=True,
    ):
        assert torch.equal(left, right)


def test_in_place_on_views_of_a_projection(backend):
    """q and k as transposed views, as every attention has them."""
    weight = torch.randn(8, 24, requires_grad=True)
    x = torch.randn(2, 3, 8)
    cos, sin = make(2, 1, 1, 3, 6)[2:]
    results = []
    for inplace in (False, True):
        q, k = ((x @ part).view(2, 3, -1, 6).transpose(1, 2) for part in weight.split(12, 1))
        q, k = rope(q, k, cos, sin, inplace=inplace)
        results.append((q, k, torch.autograd.grad((q * k).sum(), (weight,))[0]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_overwriting_what_a_backward_needs_is_noticed(backend):
    q, k, cos, sin = make(1, 2, 1, 2, 4)
    activated = torch.tanh(q)  # saves its output
    rotated, _ = rope(activated, k * 1, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotated.sum().backward()


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    q, k, cos, sin = (
        inside_poison(x) for x in make(2, 3, 1, 5, 12, rotary=10, dtype=torch.bfloat16)
    )
    with poisoned_allocations():
        outputs = rope(q, k, cos, sin)
        gradients = torch.autograd.grad(
            outputs, (q, k), [inside_poison(torch.randn_like(x)) for x in outputs]
        )
        assert all(x.isfinite().all() for x in (*outputs, *gradients))


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_pair(backend, special):
    q, k, cos, sin = make(1, 2, 1, 3, 8)
    with torch.no_grad():
        q[0, 1, 2, 3] = special
    rotated, other = rope(q, k, cos, sin)
    assert (~rotated.isfinite()).nonzero()[:, :3].unique(dim=0).tolist() == [
        [0, 1, 2]
    ] and other.isfinite().all()


def test_zero_tokens(backend):
    q, k, cos, sin = make(1, 2, 1, 0, 8)
    assert rope(q, k, cos, sin)[0].shape == (1, 2, 0, 8)


def test_gradcheck():
    q, k, cos, sin = (x.double() for x in make(1, 2, 1, 2, 6, rotary=4))
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    assert gradcheck(lambda q, k: rope(q, k, cos, sin), (q, k))
    assert gradcheck(lambda q, k: rope(q * 1, k * 1, cos, sin, inplace=True), (q, k))


def test_opcheck():
    q, k, cos, sin = make(1, 2, 1, 2, 4)
    opcheck(_rope_op, (q, k, cos, sin, False))
    opcheck(_rope_in_place_op, (q.detach(), k.detach(), cos, sin))


def test_module_rotates_by_position():
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    rotated, _ = RotaryEmbedding(4)(q, k)
    assert torch.equal(rotated[:, :, 0], q[:, :, 0]) and not torch.equal(
        rotated[:, :, 1], q[:, :, 1]
    )
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


def test_bad_input_is_refused_in_one_line():
    q, k, cos, sin = make(2, 4, 2, 3, 8)
    bad = [
        (lambda: rope(q.long(), k, cos, sin), "int64"),
        (lambda: rope(q, k.half(), cos, sin), "float16"),
        (lambda: rope(q, k[:, :, :2], cos, sin), r"k \(2, 2, 2, 8\)"),
        (lambda: rope(q, k, cos[:, :2], sin[:, :2]), r"cos \(2, 2, 8\)"),
        (lambda: rope(q, k, cos[..., :3], sin[..., :3]), "an even number"),
        (lambda: rope(q, k, cos, sin.to("meta")), "meta"),
        (lambda: rope(q, k, cos, sin, inplace=True), "leaf"),
        (
            lambda: rope(
                (q * 1).transpose(2, 3).contiguous().transpose(2, 3), k * 1, cos, sin, inplace=True
            ),
            "strides",
        ),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
