"""SwiGLU and GeGLU: accuracy, odd shapes, halves of one tensor, memory bounds, special values,
registration, errors."""

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
from napkinmath_kernels.ops.gated import (
    Activation,
    GatedActivation,
    _gated_backward_op,
    _gated_op,
    gated,
    gated_gradients,
    geglu,
    swiglu,
)
from torch.autograd import gradcheck
from torch.library import opcheck

PLAIN = {
    Activation.SILU: lambda gate, up: F.silu(gate) * up,
    Activation.GELU_TANH: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    Activation.GELU: lambda gate, up: F.gelu(gate) * up,
}


def make(shape, dtype=torch.float32, device="cpu"):
    return [(3 * torch.randn(shape, device=device)).to(dtype).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 65), (2, 3, 128), (2, 2049)])
@pytest.mark.parametrize("kind", list(Activation))
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, shape, kind):
    assert_no_worse_than_torch(
        lambda gate, up: gated(gate, up, kind), PLAIN[kind], make(shape, dtype, device)
    )


def test_halves_of_one_projection(backend, device):
    """Phi-3 projects gate and up together: both are strided views of one tensor."""
    joint = torch.randn(2, 5, 96, device=device)
    gate, up = joint.chunk(2, dim=-1)
    torch.testing.assert_close(
        swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous())
    )  # torch's strided exp rounds otherwise
    gate, up = (x.requires_grad_() for x in make((4, 6), device=device))
    strided = [non_contiguous(gate), non_contiguous(up)]
    upstream = torch.randn(4, 6, device=device)
    packed = torch.autograd.grad(geglu(gate, up), (gate, up), upstream)
    for got, want in zip(
        torch.autograd.grad(geglu(*strided), strided, non_contiguous(upstream)), packed, strict=True
    ):
        torch.testing.assert_close(got, want)


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend, device):
    gate, up = (inside_poison(x) for x in make((3, 67), torch.bfloat16, device))
    with poisoned_allocations():
        y = swiglu(gate, up)
        gradients = torch.autograd.grad(y, (gate, up), inside_poison(torch.randn_like(y)))
        assert y.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("kind", list(Activation))
def test_the_gate_gradient_may_overwrite_the_upstream_one(backend, device, kind):
    gate, up = (x.detach() for x in make((3, 70), device=device))
    dy = torch.randn_like(gate)
    want_gate, want_up = _gated_backward_op(dy, gate, up, kind)
    dup, y = torch.empty_like(up), torch.empty_like(up)
    gated_gradients(dy, gate, up, kind, dgate=dy, dup=dup, y=y)
    assert (
        torch.equal(dy, want_gate)
        and torch.equal(dup, want_up)
        and torch.equal(y, gated(gate, up, kind))
    )


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_propagate_to_their_element(backend, device, special):
    gate, up = (x.detach() for x in make((2, 8), device=device))
    up[1, 3] = special
    y = swiglu(gate, up)
    assert not y[1, 3].isfinite() and y.isfinite().sum() == 15


def test_large_gates_saturate_as_torch_does(backend, device):
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    for kind, plain in PLAIN.items():
        assert torch.allclose(
            gated(gate, torch.ones_like(gate), kind), plain(gate, torch.ones_like(gate))
        )


def test_zero_tokens(backend, device):
    gate, up = make((0, 8), device=device)
    assert torch.autograd.grad(swiglu(gate, up).sum(), (gate,))[0].shape == (0, 8)


@pytest.mark.parametrize("kind", list(Activation))
def test_gradcheck(kind):
    assert gradcheck(lambda gate, up: gated(gate, up, kind), make((3, 5), torch.float64))


def test_opcheck():
    gate, up = make((3, 8))
    opcheck(_gated_op, (gate, up, 0))
    opcheck(_gated_backward_op, (torch.randn(3, 8), gate.detach(), up.detach(), 1))


def test_module_equals_the_function():
    gate, up = make((2, 8))
    assert torch.equal(GatedActivation("silu")(gate, up), swiglu(gate, up))
    assert torch.equal(GatedActivation("gelu_pytorch_tanh")(gate, up), geglu(gate, up))
    assert torch.equal(GatedActivation("gelu")(gate, up), geglu(gate, up, approximate="none"))


def test_bad_input_is_refused_in_one_line():
    x = torch.ones(2, 4)
    bad = [
        (lambda: swiglu(x.long(), x.long()), "int64"),
        (lambda: swiglu(x, x[:1]), r"\(1, 4\)"),
        (lambda: swiglu(x, x.half()), "float16"),
        (lambda: swiglu(x, x.to("meta")), "meta"),
        (lambda: geglu(x, x, approximate="fast"), "fast"),
        (lambda: GatedActivation("relu"), "relu"),
        (lambda: swiglu(torch.ones(()), torch.ones(())), r"gate of shape \(\)"),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
