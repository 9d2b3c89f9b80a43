"""Every op as torch sees it: opcheck over strides, packing, dropout, biases and options, on the
kernels and on the reference path.

The fake implementations promise shapes and strides to torch.compile; a real result that lies
otherwise breaks what was compiled.
"""

from __future__ import annotations

import importlib
import pkgutil

import napkinmath_kernels.ops as ops
import pytest
import torch
from napkinmath_kernels.ops.cross_entropy import _linear_cross_entropy_op, scale_gradient_op
from napkinmath_kernels.ops.divergence import _divergence_op
from napkinmath_kernels.ops.eight_bit import _look_up_op, quantize_8bit
from napkinmath_kernels.ops.expert_linear import _expert_linear_backward_op, _expert_linear_op
from napkinmath_kernels.ops.flash_attention import _flash_backward_op, _flash_op
from napkinmath_kernels.ops.gated import _gated_backward_op, _gated_op
from napkinmath_kernels.ops.layer_norm import _layer_norm_backward_op, _layer_norm_op
from napkinmath_kernels.ops.linear_group import FrozenLinear, LoraAdapter, flatten
from napkinmath_kernels.ops.log_probabilities import (
    _backward_op as _likelihoods_backward_op,
)
from napkinmath_kernels.ops.log_probabilities import (
    _log_probabilities_op,
    _scale_rows_op,
)
from napkinmath_kernels.ops.nf4 import _dequantize_into_op, _dequantize_op, _quantize_op, quantize
from napkinmath_kernels.ops.qlora import _qlora_linears_backward_op, _qlora_linears_op
from napkinmath_kernels.ops.qlora_mlp import _qlora_mlp_backward_op, _qlora_mlp_op
from napkinmath_kernels.ops.rms_norm import _add_rms_norm_op, _rms_norm_backward_op, _rms_norm_op
from napkinmath_kernels.ops.rope import _rope_in_place_op, _rope_op
from torch.library import opcheck

SEED = torch.tensor([3])


def packed(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def transposed(*shape, dtype=torch.float32):
    """As heads come out of a projection: the second and third last dimensions lie in the other
    order."""
    if len(shape) < 3:
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]].to(dtype)
    order = [*shape[:-3], shape[-2], shape[-3], shape[-1]]
    return torch.randn(*order).to(dtype).transpose(-3, -2)


def expanded(*shape, dtype=torch.float32):
    return torch.randn(*shape[:-1], 1).to(dtype).expand(*shape)


LAYOUTS = {"packed": packed, "transposed": transposed, "expanded": expanded}


def train(*tensors):
    return [x.requires_grad_() if x.is_floating_point() else x for x in tensors]


def norms(new):
    x, weight = new(2, 3, 4, 8), torch.randn(8)
    rows = torch.ones(2, 3, 4)
    yield _rms_norm_op, (*train(x, weight), 1e-6, 1.0)
    yield _add_rms_norm_op, (*train(new(2, 3, 4, 8), packed(2, 3, 4, 8), torch.randn(8)), 1e-6, 0.0)
    for dsum in (None, new(2, 3, 4, 8)):
        for trains in (False, True):
            yield (
                _rms_norm_backward_op,
                (new(2, 3, 4, 8), dsum, packed(2, 3, 4, 8), weight.detach(), rows, 0.0, trains),
            )
    yield _layer_norm_op, (*train(new(2, 3, 4, 8), torch.randn(8), torch.randn(8)), 1e-5)
    yield _layer_norm_op, (*train(new(2, 3, 4, 8), torch.randn(8)), None, 1e-5)
    for trains in (False, True):
        yield (
            _layer_norm_backward_op,
            (new(2, 3, 4, 8), packed(2, 3, 4, 8), weight.detach(), rows, rows, trains),
        )


def gates(new):
    for kind in range(3):
        yield _gated_op, (*train(new(2, 3, 4, 8), packed(2, 3, 4, 8)), kind)
        yield _gated_backward_op, (new(2, 3, 4, 8), new(2, 3, 4, 8), packed(2, 3, 4, 8), kind)


def ropes(new):
    cos, sin = torch.rand(1, 3, 8), torch.rand(1, 3, 8)
    yield _rope_op, (*train(new(2, 4, 3, 8), new(2, 2, 3, 8)), cos, sin, False)
    yield _rope_op, (*train(new(2, 4, 3, 8), new(2, 2, 3, 8)), cos[..., :4], sin[..., :4], True)
    if new is not expanded:  # nothing is written in place where values share their memory
        yield _rope_in_place_op, (new(2, 4, 3, 8), new(2, 2, 3, 8), cos, sin)


def attention(new):
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    for bounds, batch, options in (
        ((None, None), 2, (6, 6, 0.1, True, 0)),
        ((cu, cu), 1, (4, 4, 0.1, True, 3)),
    ):
        q, k, v = new(batch, 4, 6, 64), new(batch, 2, 6, 64), new(batch, 2, 6, 64)
        yield _flash_op, (*train(q.clone(), k.clone(), v.clone()), *bounds, *options)
        yield _flash_op, (q, k, v, *bounds, *options)
        o, lse = _flash_op(q, k, v, *bounds, *options)
        for dlse in (None, torch.randn_like(lse)):
            yield (
                _flash_backward_op,
                (q, k, v, o, lse, new(batch, 4, 6, 64), dlse, *bounds, *options),
            )


def loss(new):
    targets = torch.tensor([1, -100, 4])
    options = (True, -100, 0.0, 0.0, 0.0, 2**20)
    weight = new(10, 8)
    for d_hidden, d_weight in ((True, True), (True, False), (False, True), (False, False)):
        hidden, head = new(3, 8).requires_grad_(d_hidden), weight.detach().requires_grad_(d_weight)
        has = [d_hidden, d_weight, False, False]
        nothing = torch.empty(0, 0)
        yield (
            _linear_cross_entropy_op,
            (hidden, head, nothing, nothing, targets, None, *options, has),
        )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield scale_gradient_op, (new(3, 8, dtype=dtype), torch.tensor(0.3))
    hidden = new(3, 8).requires_grad_()
    yield (
        _linear_cross_entropy_op,
        (
            hidden,
            weight.detach(),
            new(3, 2).requires_grad_(),
            new(10, 2).requires_grad_(),
            targets,
            torch.tensor(2),
            False,
            -100,
            5.0,
            0.1,
            1e-3,
            1,
            [True, False, True, True],
        ),
    )


def divergence(new):
    hidden, weight, low, low_weight = new(3, 8), new(10, 8), new(3, 2), new(10, 2)
    taught, taught_weight, mask = new(3, 6), new(10, 6), torch.tensor([1, 0, 1]) > 0
    nothing = torch.empty(0, 0)
    for has, adapter, beta in (
        ([True, True, True, True], True, 0.5),
        ([True, False, False, False], False, 0.0),
        ([False, False, False, False], False, 1.0),
    ):
        own = [
            x.detach().clone().requires_grad_(h)
            for x, h in zip((hidden, weight), has, strict=False)
        ]
        thin = [x.detach().clone().requires_grad_(has[2]) for x in (low, low_weight)]
        thin = thin if adapter else [nothing, nothing]
        options = (True, beta, [1.0, 2.0], [0.0, 3.0], 1.5, 200, adapter)
        yield (
            _divergence_op,
            (*own, *thin, taught, taught_weight, mask if adapter else None, None, *options, has),
        )


def quantization(new):
    for nested in (True, False):
        weight = quantize(torch.randn(4, 64), nested=nested)
        yield _dequantize_op, (weight.tensors(), [4, 64], torch.bfloat16, 64, 256)
        yield _dequantize_into_op, (weight.tensors(), 64, 256, torch.empty(4, 64))
    yield _quantize_op, (new(4, 64), "nf4", 64)
    table = quantize_8bit(torch.randn(6, 64), "int8")
    yield _look_up_op, (*table.tensors(), *table.block, torch.tensor([[1, 5]]), torch.bfloat16)


def linears_of(shapes, trains):
    found = []
    for i, (rows, columns) in enumerate(shapes):
        a, b = (torch.randn(*shape).requires_grad_(trains) for shape in ((4, columns), (rows, 4)))
        found.append(
            FrozenLinear(
                quantize(torch.randn(rows, columns)),
                torch.randn(rows) if i else None,
                LoraAdapter(a, b, 0.5),
            )
        )
    return found


def qlora(new):
    x = new(2, 3, 64)
    for trains in (True, False):
        linears = linears_of([(64, 64), (32, 64)], trains)
        linears.append(FrozenLinear(torch.randn(32, 64)))
        arguments = flatten(linears, x)
        detached = [
            [t.detach() for t in part] if isinstance(part[0], torch.Tensor) else part
            for part in arguments
        ]
        for probability, seed in ((0.0, None), (0.3, SEED)):
            yield _qlora_linears_op, (new(2, 3, 64).requires_grad_(), *arguments, probability, seed)
            projections = _qlora_linears_op(x, *detached, probability, seed)[3:]
            upstream = [new(2, 3, rows) for rows in (64, 32, 32)]
            flags = (True, [trains, trains, False])
            yield (
                _qlora_linears_backward_op,
                (upstream, projections, x, *detached, probability, seed, *flags),
            )


def mlp(new):
    x = new(2, 3, 64)
    arguments = flatten(linears_of([(128, 64), (128, 64), (64, 128)], True), x)
    detached = [
        [t.detach() for t in part] if isinstance(part[0], torch.Tensor) else part
        for part in arguments
    ]
    for probability, seed in ((0.0, None), (0.3, SEED)):
        for recompute in (False, True):
            options = (probability, seed, 0)
            yield _qlora_mlp_op, (new(2, 3, 64).requires_grad_(), *arguments, *options, recompute)
            _, e, g, *projections = _qlora_mlp_op(x, *detached, *options, recompute)
            kept = [] if recompute else [e, g]
            yield (
                _qlora_mlp_backward_op,
                (
                    new(2, 3, 64),
                    kept,
                    projections,
                    x,
                    *detached,
                    *options,
                    True,
                    [True, False, True],
                ),
            )


def likelihoods(new):
    hidden, weight = new(1, 6, 8)[0], torch.randn(20, 8)
    targets = torch.tensor([1, 5, -100, 19, 0, 2])
    options = (-100, 1.5, 3.0, 0.5, 500)
    for trains in (False, True):
        inputs = (*train(hidden.detach()), weight.clone().requires_grad_(trains), targets)
        yield _log_probabilities_op, (*inputs, *options, trains, True, trains)
    yield _likelihoods_backward_op, (torch.randn(6), hidden, weight, targets, *options, True)
    yield _scale_rows_op, (new(1, 6, 8)[0], torch.randn(6))


def experts(new):
    x, weight, offsets = new(1, 7, 8)[0], torch.randn(3, 16, 8), torch.tensor([2, 2, 7]).int()
    a, b = torch.randn(3, 4, 8), torch.randn(16, 4, 3).permute(2, 0, 1)
    packed_weight = quantize(weight)
    stacks = (
        ([weight], [3, 16, 8, 0, 0], False),
        ([torch.randn(3, 8, 16)], [3, 8, 16, 0, 0], True),
        (packed_weight.tensors(), [3, 16, 8, 64, 256], False),
    )
    for stack in stacks:
        for adapter in ((a, b), (None, None)):
            leaves = train(x.clone()) + [t if t is None else t.clone() for t in adapter]
            yield _expert_linear_op, (leaves[0], *stack, offsets, *leaves[1:], 0.5)
            kept = torch.randn(7, 4) if adapter[0] is not None else torch.empty(0)
            arguments = (x.detach(), *stack, offsets, *adapter, 0.5)
            for needs in ((True, True), (False, True), (True, False)):
                yield _expert_linear_backward_op, (new(1, 7, 16)[0], kept, *arguments, *needs)


SAMPLES = (
    experts,
    norms,
    gates,
    ropes,
    attention,
    loss,
    divergence,
    likelihoods,
    quantization,
    qlora,
    mlp,
)


@pytest.mark.parametrize("new", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("samples", SAMPLES, ids=lambda f: f.__name__)
def test_opcheck(samples, new):
    for op, arguments in samples(new):
        opcheck(op, arguments)


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda f: f.__name__)
def test_the_kernels_results_lie_as_promised(triton_backend, samples):
    for op, arguments in samples(transposed):
        opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_no_op_is_left_out():
    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    registered = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("napkinmath::")
    }
    checked = {op._qualname for samples in SAMPLES for op, _ in samples(packed)}
    assert registered == checked
