"""Layer norm: accuracy, odd shapes, memory bounds, special values, registration, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_numerics import (
    FLOAT_DTYPES,
    assert_no_worse_than_torch,
    inside_poison,
    non_contiguous,
    poisoned_allocations,
)
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.layer_norm import (
    LayerNorm,
    _layer_norm_backward_op,
    _layer_norm_op,
    layer_norm,
)
from torch.autograd import gradcheck
from torch.library import opcheck


def make(shape, dtype=torch.float32):
    x = (2 * torch.randn(shape) + 1).to(dtype).requires_grad_()
    weight, bias = (
        (base + 0.2 * torch.randn(shape[-1])).to(dtype).requires_grad_() for base in (1.0, 0.0)
    )
    return x, weight, bias


def plain(x, weight, bias=None):
    return F.layer_norm(x, weight.shape, weight, bias)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(3, 2), (7, 65), (2, 3, 127), (9, 256)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_error_is_at_most_twice_that_of_plain_torch(backend, dtype, shape, has_bias):
    inputs = make(shape, dtype)
    assert_no_worse_than_torch(layer_norm, plain, inputs if has_bias else inputs[:2])


def test_wide_rows_sum_their_parameter_gradients_apart(triton_backend, monkeypatch):
    from napkinmath_kernels.triton_kernels import layer_norm as kernels

    monkeypatch.setattr(kernels, "WIDEST_TOGETHER", 64)
    assert_no_worse_than_torch(layer_norm, plain, make((9, 700)))


def test_a_large_mean_does_not_cancel(backend):
    x, weight, bias = make((4, 64))
    assert_no_worse_than_torch(
        layer_norm, plain, [(x.detach() + 1000).requires_grad_(), weight, bias]
    )


def test_strided_input_gives_what_packed_input_gives(backend):
    x, weight, bias = make((2, 6, 40))
    assert torch.equal(layer_norm(non_contiguous(x), weight, bias), layer_norm(x, weight, bias))


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    x, weight, bias = (inside_poison(t) for t in make((5, 67), torch.bfloat16))
    with poisoned_allocations():
        y = layer_norm(x, weight, bias)
        gradients = torch.autograd.grad(y, (x, weight, bias), inside_poison(torch.randn_like(y)))
        assert y.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_reach_their_row_and_no_other(backend, special):
    x, weight, bias = make((4, 33))
    with torch.no_grad():
        x[2, 5] = special
    y = layer_norm(x, weight, bias)
    assert y[2].isnan().any() and y[[0, 1, 3]].isfinite().all()


def test_zero_tokens(backend):
    x, weight, bias = make((0, 16))
    dx, dweight, dbias = torch.autograd.grad(layer_norm(x, weight, bias).sum(), (x, weight, bias))
    assert dx.shape == (0, 16) and not dweight.any() and not dbias.any()


def test_results_may_be_modified_in_place(backend):
    x, weight, bias = make((2, 3, 8))
    layer_norm(x, weight, bias).add_(1.0).sum().backward()


def test_gradcheck():
    assert gradcheck(lambda *inputs: layer_norm(*inputs, 1e-3), make((3, 7), torch.float64))


def test_opcheck():
    x, weight, bias = make((3, 8))
    opcheck(_layer_norm_op, (x, weight, bias, 1e-5))
    detached = (torch.randn(3, 8), x.detach(), weight.detach(), torch.zeros(3), torch.ones(3))
    opcheck(_layer_norm_backward_op, (*detached, True))


def test_a_frozen_weight_gets_no_gradient(triton_backend):
    x, weight, bias = make((4, 16))
    (alone,) = torch.autograd.grad(
        layer_norm(x, weight.detach(), bias.detach()).square().sum(), (x,)
    )
    (together,) = torch.autograd.grad(layer_norm(x, weight, bias).square().sum(), (x,))
    assert torch.equal(alone, together)


def test_module_equals_torch():
    x = torch.randn(2, 8)
    torch.testing.assert_close(LayerNorm(8)(x), torch.nn.LayerNorm(8)(x))
    assert LayerNorm(8, bias=False).bias is None


def test_bad_input_is_refused_in_one_line():
    x, weight, bias = (t.detach() for t in make((2, 4)))
    bad = [
        (lambda: layer_norm(x.long(), weight, bias), "int64"),
        (lambda: layer_norm(x, weight[:3], bias), r"weight of shape \(3,\)"),
        (lambda: layer_norm(x, weight, bias[:3]), r"bias of shape \(3,\)"),
        (lambda: layer_norm(x, weight, bias.half()), "bias of dtype float16"),
        (lambda: layer_norm(torch.ones(2, 40000), torch.ones(40000)), "40000"),
        (lambda: layer_norm(x, weight.to("meta"), bias), "weight on meta"),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
