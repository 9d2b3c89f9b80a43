"""QLoRA linears, QKV and MLP: accuracy, dropout, adapters' dtypes, frozen parts, what is saved,
registration, errors."""

from __future__ import annotations

import math

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
from napkinmath_kernels.ops.dropout import keep_mask
from napkinmath_kernels.ops.gated import Activation
from napkinmath_kernels.ops.linear_group import FrozenLinear, LoraAdapter, flatten
from napkinmath_kernels.ops.nf4 import dequantize, quantize
from napkinmath_kernels.ops.qlora import (
    QLoRALinear,
    QLoRAQKV,
    _qlora_linears_backward_op,
    _qlora_linears_op,
    qlora_linear,
    qlora_linears,
)
from napkinmath_kernels.ops.qlora_mlp import (
    QLoRAMLP,
    _qlora_mlp_backward_op,
    _qlora_mlp_op,
    qlora_mlp,
)
from torch.autograd import gradcheck
from torch.library import opcheck

RANK, SCALING = 4, 0.5
SEED = torch.tensor([42], dtype=torch.int64)


def make_weight(out_features, in_features):
    return quantize(torch.randn(out_features, in_features) / math.sqrt(in_features))


def make_adapter(out_features, in_features, dtype=torch.float32):
    a = (torch.randn(RANK, in_features) / math.sqrt(in_features)).to(dtype).requires_grad_()
    return a, torch.randn(out_features, RANK).to(dtype).requires_grad_()


def plain_linear(x, weight, a, b, bias=None, keep=None, probability=0.0):
    """PEFT's arithmetic, everything in x's dtype."""
    base = F.linear(
        x,
        dequantize(weight, dtype=torch.float32).to(x.dtype),
        None if bias is None else bias.to(x.dtype),
    )
    dropped = x if keep is None else x * keep.view(x.shape).to(x.dtype) / (1 - probability)
    return base + F.linear(F.linear(dropped, a.to(x.dtype)), b.to(x.dtype)) * SCALING


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lead", "has_bias"), [((1,), False), ((7,), True), ((2, 3), True)])
def test_linear_error_is_at_most_twice_that_of_plain_torch(
    backend, dtype, adapter_dtype, lead, has_bias
):
    weight, bias = make_weight(96, 64), torch.randn(96) if has_bias else None
    x = torch.randn(*lead, 64).to(dtype).requires_grad_()
    assert_no_worse_than_torch(
        lambda x, a, b: qlora_linear(x, weight, a, b, SCALING, bias=bias),
        lambda x, a, b: plain_linear(x, weight, a, b, bias),
        [x, *make_adapter(96, 64, adapter_dtype)],
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_grouped_heads_share_one_x(backend, dtype):
    weights = [make_weight(rows, 64) for rows in (64, 32, 32)]
    adapters = [make_adapter(rows, 64) for rows in (64, 32, 32)]
    x = torch.randn(2, 5, 64).to(dtype).requires_grad_()

    def ours(x, *flat):
        linears = [
            FrozenLinear(weight, None, LoraAdapter(flat[2 * i], flat[2 * i + 1], SCALING))
            for i, weight in enumerate(weights)
        ]
        return qlora_linears(x, linears)

    def plain(x, *flat):
        return [
            plain_linear(x, weight, flat[2 * i], flat[2 * i + 1])
            for i, weight in enumerate(weights)
        ]

    assert_no_worse_than_torch(
        ours, plain, [x, *(matrix for adapter in adapters for matrix in adapter)]
    )


def mlp_linears(weights, flat):
    return [
        FrozenLinear(weight, None, LoraAdapter(flat[2 * i], flat[2 * i + 1], SCALING))
        for i, weight in enumerate(weights)
    ]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [Activation.SILU, Activation.GELU_TANH])
def test_mlp_error_is_at_most_twice_that_of_plain_torch(backend, dtype, recompute, kind):
    shapes = [(128, 64), (128, 64), (64, 128)]
    weights, adapters = (
        [make_weight(*shape) for shape in shapes],
        [make_adapter(*shape) for shape in shapes],
    )
    act = F.silu if kind is Activation.SILU else lambda x: F.gelu(x, approximate="tanh")

    def plain(x, *flat):
        gate, up, down = (
            lambda y, i=i: plain_linear(y, weights[i], flat[2 * i], flat[2 * i + 1])
            for i in range(3)
        )
        return down(act(gate(x)) * up(x))

    assert_no_worse_than_torch(
        lambda x, *flat: qlora_mlp(
            x, *mlp_linears(weights, flat), activation=kind, recompute=recompute
        ),
        plain,
        [
            torch.randn(2, 3, 64).to(dtype).requires_grad_(),
            *(matrix for adapter in adapters for matrix in adapter),
        ],
    )


def test_dropout_acts_on_the_adapter_alone_and_its_mask_is_not_stored(backend):
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    x = torch.randn(9, 64, requires_grad=True)
    keep = keep_mask(x.numel(), SEED, 0, 0.3)
    assert_no_worse_than_torch(
        lambda x, a, b: qlora_linear(x, weight, a, b, SCALING, dropout=0.3, seed=SEED),
        lambda x, a, b: plain_linear(x, weight, a, b, keep=keep, probability=0.3),
        [x, a, b],
    )


def test_each_linear_of_a_group_drops_by_a_mask_of_its_own():
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    linear = FrozenLinear(weight, None, LoraAdapter(a, b, SCALING))
    first, second = qlora_linears(torch.randn(9, 64), [linear, linear], dropout=0.5, seed=SEED)
    assert not torch.equal(first, second)


def test_checkpointing_sees_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    module = QLoRALinear(make_weight(64, 64), RANK, dropout=0.5)
    torch.nn.init.normal_(module.lora_b)
    x = torch.randn(5, 64, requires_grad=True)
    torch.manual_seed(1)
    want = torch.autograd.grad(module(x).square().sum(), (x, module.lora_a, module.lora_b))
    torch.manual_seed(1)
    got = torch.autograd.grad(
        checkpoint(module, x, use_reentrant=False).square().sum(), (x, module.lora_a, module.lora_b)
    )
    assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))


def test_evaluation_drops_nothing():
    module = QLoRALinear(make_weight(64, 64), RANK, dropout=0.9).eval()
    torch.nn.init.normal_(module.lora_b)
    x = torch.randn(5, 64)
    assert torch.equal(
        module(x), qlora_linear(x, module.weight, module.lora_a, module.lora_b, module.scaling)
    )


def test_a_linear_without_an_adapter_and_a_dense_one(backend):
    weight = make_weight(64, 64)
    x = torch.randn(3, 64, requires_grad=True)
    dense = dequantize(weight)
    for given in (weight, dense):
        y = qlora_linear(x, given)
        torch.testing.assert_close(y, x @ dense.t())
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), (x,))[0], dense.sum(0).expand(3, 64)
        )


def test_strided_input_and_upstream(backend):
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    x, upstream = torch.randn(2, 4, 64, requires_grad=True), torch.randn(2, 4, 64)
    strided = non_contiguous(x)
    y = qlora_linear(strided, weight, a, b)
    torch.testing.assert_close(y, qlora_linear(x, weight, a, b))
    want = torch.autograd.grad(qlora_linear(x, weight, a, b), (x, a, b), upstream)
    for got, expected in zip(
        torch.autograd.grad(y, (strided, a, b), non_contiguous(upstream)), want, strict=True
    ):
        torch.testing.assert_close(got, expected)


def saved_by(function):
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        function()
    return found


def activation_bytes(saved, *parameters):
    """Bytes of distinct storages that are not parameters' or weights'."""
    known = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    storages = {t.untyped_storage().data_ptr(): t for t in saved}
    return sum(
        t.numel() * t.element_size() for pointer, t in storages.items() if pointer not in known
    )


def test_x_is_saved_once_for_all_three_projections():
    module = QLoRAQKV(*(QLoRALinear(make_weight(rows, 64), RANK) for rows in (64, 32, 32)))
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    linears = [module.q, module.k, module.v]
    stored = [tensor for linear in linears for tensor in linear.weight.tensors()]
    saved = saved_by(lambda: module(x))
    assert activation_bytes(saved, *module.parameters(), *stored) == 2 * (10 * 64 + 3 * 10 * RANK)


@pytest.mark.parametrize(("recompute", "wide"), [(False, 2), (True, 0)])
def test_the_mlp_saves_x_gate_and_up_only(recompute, wide):
    linears = [
        QLoRALinear(make_weight(*shape), RANK) for shape in ((128, 64), (128, 64), (64, 128))
    ]
    module = QLoRAMLP(*linears, recompute=recompute)
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    stored = [tensor for linear in linears for tensor in linear.weight.tensors()]
    saved = saved_by(lambda: module(x))
    assert activation_bytes(saved, *module.parameters(), *stored) == 2 * (
        10 * 64 + wide * 10 * 128 + 3 * 10 * RANK
    )


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    module = QLoRALinear(make_weight(64, 128), RANK, dropout=0.2)
    x = inside_poison(torch.randn(5, 128, dtype=torch.bfloat16)).requires_grad_()
    with poisoned_allocations():
        y = module(x)
        gradients = torch.autograd.grad(
            y, (x, module.lora_a, module.lora_b), inside_poison(torch.randn_like(y))
        )
        assert y.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_reach_their_row_and_no_other(backend, special):
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    x = torch.randn(4, 64)
    x[2, 3] = special
    y = qlora_linear(x, weight, a, b)
    assert not y[2].isfinite().any() and y[[0, 1, 3]].isfinite().all()


def test_zero_tokens(backend):
    module = QLoRALinear(make_weight(64, 64), RANK)
    x = torch.empty(0, 64, requires_grad=True)
    dx, da = torch.autograd.grad(module(x).sum(), (x, module.lora_a))
    assert dx.shape == (0, 64) and not da.any()


def test_results_may_be_modified_in_place():
    module = QLoRALinear(make_weight(64, 64), RANK)
    module(torch.randn(2, 3, 64, requires_grad=True)).add_(1.0).sum().backward()


def test_autocast_decides_the_dtype():
    module = QLoRALinear(make_weight(64, 64), RANK)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype is torch.bfloat16 and torch.equal(y, module(x.to(torch.bfloat16)))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck_of_linears(dropout):
    dense = torch.randn(4, 6, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64)
    a, b = (
        torch.randn(2, 6, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 2, dtype=torch.float64, requires_grad=True),
    )
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda x, a, b: qlora_linear(x, dense, a, b, 0.7, bias=bias, dropout=dropout, seed=SEED),
        (x, a, b),
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck_of_the_mlp(recompute, dropout):
    shapes = [(5, 4), (5, 4), (4, 5)]
    weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    flat = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for out_features, in_features in shapes
        for shape in ((2, in_features), (out_features, 2))
    ]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(x, *flat):
        return qlora_mlp(
            x, *mlp_linears(weights, flat), dropout=dropout, seed=SEED, recompute=recompute
        )

    assert gradcheck(run, (x, *flat))


def test_opcheck():
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    x = torch.randn(3, 64, requires_grad=True)
    linear = FrozenLinear(weight, None, LoraAdapter(a, b, SCALING))
    arguments = flatten([linear], x)
    opcheck(_qlora_linears_op, (x, *arguments, 0.0, None))
    detached = [
        [t.detach() for t in argument] if isinstance(argument[0], torch.Tensor) else argument
        for argument in arguments
    ]
    projections = [torch.randn(3, RANK)]
    opcheck(
        _qlora_linears_backward_op,
        ([torch.randn(3, 64)], projections, x.detach(), *detached, 0.0, None, True, [True]),
    )
    arguments = flatten([linear] * 3, x)
    opcheck(_qlora_mlp_op, (x, *arguments, 0.0, None, 0, False))
    detached = [
        [t.detach() for t in argument] if isinstance(argument[0], torch.Tensor) else argument
        for argument in arguments
    ]
    kept = [torch.randn(3, 64), torch.randn(3, 64)]
    opcheck(
        _qlora_mlp_backward_op,
        (
            torch.randn(3, 64),
            kept,
            projections * 3,
            x.detach(),
            *detached,
            0.0,
            None,
            0,
            True,
            [True] * 3,
        ),
    )


def test_a_frozen_adapter_gets_no_gradient():
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    x = torch.randn(3, 64, requires_grad=True)
    qlora_linear(x, weight, a.detach(), b.detach()).sum().backward()
    assert x.grad is not None and a.grad is None


def test_unused_outputs_are_zero_gradients():
    module = QLoRAQKV(*(QLoRALinear(make_weight(64, 64), RANK) for _ in range(3)))
    x = torch.randn(3, 64, requires_grad=True)
    module(x)[1].sum().backward()
    assert not module.q.lora_b.grad.any() and module.k.lora_b.grad.any()


def test_modules_start_as_the_quantized_linear():
    linear = torch.nn.Linear(64, 32)
    module = QLoRALinear.from_linear(linear, RANK, 8)
    x = torch.randn(2, 64)
    torch.testing.assert_close(module(x), F.linear(x, dequantize(module.weight), linear.bias))
    assert module.scaling == 2.0 and {name for name, _ in module.named_parameters()} == {
        "lora_a",
        "lora_b",
    }


def test_bad_input_is_refused_in_one_line():
    weight, (a, b) = make_weight(64, 64), make_adapter(64, 64)
    x = torch.randn(3, 64)
    bad = [
        (lambda: qlora_linear(x.long(), weight), "int64"),
        (lambda: qlora_linear(torch.randn(3, 32), weight), r"\(64, 64\) for x \(3, 32\)"),
        (lambda: qlora_linear(x, weight, a), "one of lora_a"),
        (lambda: qlora_linear(x, weight, a, b.half()), "float16"),
        (lambda: qlora_linear(x, weight, a[:2], b), "adapter a"),
        (lambda: qlora_linear(x, weight, a, b, dropout=1.0), "dropout 1.0"),
        (lambda: qlora_linear(x, weight, bias=torch.ones(3)), r"bias of shape \(3,\)"),
        (lambda: qlora_linear(x, torch.nn.Parameter(torch.randn(64, 64))), "requires a gradient"),
        (lambda: qlora_linear(x.to("meta"), weight), "meta"),
        (lambda: qlora_linear(x, weight, a, b.detach()), "without the other"),
        (
            lambda: qlora_mlp(
                x, FrozenLinear(weight), FrozenLinear(make_weight(128, 64)), FrozenLinear(weight)
            ),
            r"up \(128, 64\)",
        ),
        (lambda: QLoRAMLP(*[QLoRALinear(weight, 4)] * 3, activation="relu"), "relu"),
        (lambda: qlora_linears(x, []), "0 linears"),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)
