"""RMS norm: accuracy, odd shapes, memory bounds, special values, registration, errors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from kernel_numerics import (
    FLOAT_DTYPES,
    assert_no_worse_than_torch,
    inside_poison,
    non_contiguous,
    poisoned_allocations,
)
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.rms_norm import (
    RMSNorm,
    _add_rms_norm_op,
    _rms_norm_backward_op,
    _rms_norm_op,
    rms_norm,
)
from torch.autograd import gradcheck
from torch.library import opcheck

EPS = 1e-6


def plain(x, weight, residual=None, offset=0.0):
    """LlamaRMSNorm's arithmetic: statistics in fp32, normalised value rounded, then the weight."""
    total = x if residual is None else x + residual
    wide = total if total.dtype is torch.float64 else total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    y = (
        normed.to(x.dtype) * (weight + offset)
        if offset == 0
        else (normed * (weight.to(normed.dtype) + offset)).to(x.dtype)
    )
    return y if residual is None else (y, total)


def make(shape, dtype, device="cpu"):
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    weight = (
        (1 + 0.2 * torch.randn(shape[-1:], dtype=torch.float32, device=device))
        .to(dtype)
        .requires_grad_()
    )
    return x, weight


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (7, 65), (2, 3, 127), (33, 256)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, shape, offset):
    x, weight = make(shape, dtype, device)
    assert_no_worse_than_torch(
        lambda x, w: rms_norm(x, w, EPS, offset=offset),
        lambda x, w: plain(x, w, offset=offset),
        [x, weight],
    )


@pytest.mark.parametrize("shape", [(1, 8), (7, 65), (2, 3, 127)])
def test_rows_one_a_program(triton_backend, monkeypatch, shape):
    """What wider rows than a tile's run, at a test's size."""
    from napkinmath_kernels.triton_kernels import rms_norm as kernels

    monkeypatch.setattr(kernels, "WIDEST_NARROW", 0)
    assert_no_worse_than_torch(
        lambda x, w: rms_norm(x, w, EPS, offset=1.0),
        lambda x, w: plain(x, w, offset=1.0),
        make(shape, torch.float32),
    )


@pytest.mark.parametrize("rows", [1, 63, 65, 600])
def test_tiles_of_narrow_rows(triton_backend, rows):
    """A tile has 64 rows of 64 and the interpreter 8 programs, so 600 rows are taken in turns, the
    last tile in part."""
    inputs = make((rows, 50), torch.float32)
    assert_no_worse_than_torch(lambda x, w: rms_norm(x, w, EPS), plain, inputs)
    with poisoned_allocations():
        x, weight = (inside_poison(tensor) for tensor in inputs)
        for gradient in torch.autograd.grad(
            rms_norm(x, weight), (x, weight), inside_poison(torch.randn(rows, 50))
        ):
            assert gradient.isfinite().all()


def test_wide_rows_sum_their_weight_gradient_apart(triton_backend, monkeypatch):
    from napkinmath_kernels.triton_kernels import rms_norm as kernels

    monkeypatch.setattr(kernels, "WIDEST_TOGETHER", 64)
    assert_no_worse_than_torch(
        lambda x, w: rms_norm(x, w, EPS), plain, make((9, 700), torch.float32)
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_residual_is_added_and_returned(backend, device, dtype):
    x, weight = make((5, 100), dtype, device)
    residual = torch.randn_like(x).requires_grad_()
    assert_no_worse_than_torch(
        lambda x, w, r: rms_norm(x, w, EPS, residual=r),
        lambda x, w, r: plain(x, w, r),
        [x, weight, residual],
    )


def test_strided_input_gives_what_packed_input_gives(backend, device):
    x, weight = make((2, 6, 40), torch.float32, device)
    strided = non_contiguous(x)
    assert torch.equal(rms_norm(strided, weight), rms_norm(x, weight))
    upstream = non_contiguous(torch.randn_like(x))
    packed = torch.autograd.grad(rms_norm(x, weight), (x, weight), upstream.contiguous())
    for got, want in zip(
        torch.autograd.grad(rms_norm(strided, weight), (strided, weight), upstream),
        packed,
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(3, 65), (1, 1), (5, 128)])
def test_nothing_outside_the_tensors_is_read_or_written(triton_backend, device, shape):
    x, weight = (inside_poison(t) for t in make(shape, torch.bfloat16, device))
    residual = inside_poison(torch.randn_like(x)).requires_grad_()
    upstream = inside_poison(torch.randn_like(x))
    with poisoned_allocations():
        y, total = rms_norm(x, weight, residual=residual)
        gradients = torch.autograd.grad((y, total), (x, weight, residual), (upstream, upstream))
        for value in (y, total, *gradients):
            assert value.isfinite().all()


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_reach_their_row_and_no_other(backend, device, special):
    x, weight = make((4, 33), torch.float32, device)
    with torch.no_grad():
        x[2, 5] = special
    y = rms_norm(x, weight)
    assert y[2].isnan().any()
    assert y[[0, 1, 3]].isfinite().all()


def test_extreme_values_do_not_overflow_fp16(backend, device):
    x = torch.full((2, 64), 60000.0, dtype=torch.float16, device=device)
    assert torch.allclose(
        rms_norm(x, torch.ones(64, dtype=torch.float16, device=device)).float(),
        torch.ones(2, 64, device=device),
    )


def test_results_may_be_modified_in_place(backend, device):
    x, weight = make((2, 3, 8), torch.float32, device)
    y, total = rms_norm(x, weight, residual=torch.randn_like(x))
    y.add_(1.0)
    (total * 2).add_(1.0)
    rms_norm(x, weight).add_(1.0).sum().backward()


def test_zero_tokens(backend, device):
    x, weight = make((0, 16), torch.float32, device)
    dx, dweight = torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight))
    assert dx.shape == (0, 16) and torch.equal(dweight, torch.zeros_like(weight))


def test_gradcheck():
    x, weight = make((3, 7), torch.float64)
    residual = torch.randn_like(x).requires_grad_()
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3, offset=1.0), (x, weight))
    assert gradcheck(lambda x, w, r: rms_norm(x, w, 1e-3, residual=r), (x, weight, residual))


def test_opcheck():
    x, weight = make((3, 8), torch.float32)
    rstd = torch.ones(3)
    opcheck(_rms_norm_op, (x, weight, EPS, 0.0))
    opcheck(_add_rms_norm_op, (x, torch.randn_like(x).requires_grad_(), weight, EPS, 1.0))
    opcheck(_rms_norm_backward_op, (x.detach(), None, x.detach(), weight.detach(), rstd, 0.0, True))


def test_a_frozen_weight_gets_no_gradient_and_costs_no_partial_sums(triton_backend, device):
    x, weight = make((4, 16), torch.float32, device)
    (dx,) = torch.autograd.grad(rms_norm(x, weight.detach()).sum(), (x,))
    (with_weight,) = torch.autograd.grad(rms_norm(x, weight).sum(), (x,))
    assert torch.equal(dx, with_weight)


def test_backward_repeats_bit_for_bit(backend, device):
    x, weight = make((37, 48), torch.float32, device)
    first, second = (
        torch.autograd.grad(rms_norm(x, weight).square().sum(), (x, weight)) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_module_equals_the_function():
    module = RMSNorm(8, offset=1.0)
    x = torch.randn(2, 8)
    assert torch.equal(module(x), rms_norm(x, module.weight, module.eps, offset=1.0))
    assert torch.equal(module.weight, torch.zeros(8))


@pytest.mark.parametrize(
    ("x", "weight", "residual", "says"),
    [
        (torch.ones(2, 4, dtype=torch.int64), torch.ones(4), None, "int64"),
        (torch.ones(2, 4), torch.ones(3), None, r"\(3,\)"),
        (torch.ones(2, 4), torch.ones(4), torch.ones(3, 4), "residual"),
        (
            torch.ones(2, 4),
            torch.ones(4),
            torch.ones(2, 4, dtype=torch.float16),
            "residual of dtype float16",
        ),
        (torch.ones(2, 40000), torch.ones(40000), None, "40000"),
        (torch.ones(()), torch.ones(1), None, r"\(\)"),
        (torch.ones(2, 4), torch.ones(4, device="meta"), None, "meta"),
    ],
)
def test_bad_input_is_refused_in_one_line(x, weight, residual, says):
    with pytest.raises(KernelInputError, match=says) as caught:
        rms_norm(x, weight, residual=residual)
    assert (
        "\n" not in str(caught.value)
        and "accepted" in str(caught.value)
        and "instead" in str(caught.value)
    )


@pytest.mark.parametrize("hidden", [40, 600])
def test_a_frozen_weights_gradient_of_x_takes_the_programs_that_have_room(hidden):
    """More rows than either choice has programs, and the same bits from both."""
    from napkinmath_kernels.triton_kernels import rms_norm as kernels

    x, dy = torch.randn(600, hidden), torch.randn(600, hidden)
    weight, rstd = torch.randn(hidden), torch.rand(600) + 0.5
    grids, launch = [], kernels.launch

    def counted(kernel, grid, *arguments, **options):
        grids.append(grid[0])
        launch(kernel, grid, *arguments, **options)

    with mock.patch.object(kernels, "launch", counted), use_backend(Backend.TRITON):
        found = [
            kernels.rms_norm_backward(dy, None, x, weight, rstd, 0.0, t)[0] for t in (True, False)
        ]
    assert grids[0] == 8 < grids[-1] < 600
    assert torch.equal(*found)
