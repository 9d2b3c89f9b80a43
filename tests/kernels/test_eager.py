"""The short way through `autograd.Function` against the custom op: equal to the last bit, saving the
same, and left whenever something watches ops by name."""

from __future__ import annotations

import math

import pytest
import torch
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops import qlora
from napkinmath_kernels.ops.eager import runs_eagerly
from napkinmath_kernels.ops.gated import _gated_op, swiglu
from napkinmath_kernels.ops.layer_norm import _layer_norm_op, layer_norm
from napkinmath_kernels.ops.linear_group import FrozenLinear, LinearGroup, LoraAdapter, flatten
from napkinmath_kernels.ops.nf4 import quantize
from napkinmath_kernels.ops.qlora import qlora_linears
from napkinmath_kernels.ops.rms_norm import _rms_norm_op, rms_norm
from napkinmath_kernels.ops.rope import _rope_op, rope
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    """The ops that the dispatcher saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def linears(dtype, *, trained=True):
    def adapter(out):
        return LoraAdapter(
            *(torch.randn(s, dtype=dtype, requires_grad=trained) for s in ((4, 64), (out, 4))), 0.5
        )

    return [
        FrozenLinear(quantize(torch.randn(32, 64)), torch.randn(32).to(dtype), adapter(32)),
        FrozenLinear(torch.randn(16, 64).to(dtype), None, adapter(16)),
        FrozenLinear(quantize(torch.randn(16, 64))),
    ]


def through_op(x, group, dropout, seed):
    return qlora._qlora_linears_op(x, *flatten(group, x), dropout, seed)[: len(group)]


def direct(x, group, dropout, seed):
    return qlora_linears(x, group, dropout=dropout, seed=seed)


def results(call, x, group, dropout, seed, used):
    """Outputs, gradients, and what was saved, by shape and dtype."""
    saved = []

    def pack(tensor):
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call(x, group, dropout, seed)
    leaves = [x] if x.requires_grad else []
    leaves += [
        t for one in group if one.adapter for t in (one.adapter.a, one.adapter.b) if t.requires_grad
    ]
    loss = sum((outputs[i].float() ** 2).sum() for i in used)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return outputs, gradients, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,)])
@pytest.mark.parametrize(("needs_x", "trained"), [(True, True), (True, False), (False, True)])
def test_the_short_way_equals_the_op(dtype, dropout, used, needs_x, trained):
    group = linears(dtype, trained=trained)
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=needs_x)
    seed = torch.tensor([3]) if dropout else None
    arguments = (x, group, dropout, seed, used)
    fast, slow = results(direct, *arguments), results(through_op, *arguments)
    assert fast[2] == slow[2]
    for ours, theirs in zip((*fast[0], *fast[1]), (*slow[0], *slow[1]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_dispatch_mode_sees_the_ops_by_name_and_eager_code_makes_none():
    group, x = linears(torch.float32), torch.randn(3, 64, requires_grad=True)
    with Names() as names:
        sum(y.sum() for y in qlora_linears(x, group)).backward()
    assert {"napkinmath.qlora_linears.default", "napkinmath.qlora_linears_backward.default"} <= set(
        names.seen
    )
    with torch.profiler.profile(acc_events=True) as profile:
        sum(y.sum() for y in qlora_linears(x, group)).backward()
    assert not [event for event in profile.events() if "napkinmath::qlora" in event.name]


def test_what_watches_ops_takes_the_dispatcher():
    x = torch.randn(2)
    assert runs_eagerly([x, torch.nn.Parameter(x)])
    assert not runs_eagerly([x, torch.empty(2, device="meta")])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert not runs_eagerly([x])
    assert not runs_eagerly([fake])
    answers = []
    torch.func.vmap(lambda row: (answers.append(runs_eagerly([row])), row)[1])(x)
    assert answers == [False]


def elementwise():
    new = torch.randn
    x, weight, cos = new(2, 3, 8), new(8), new(1, 5, 8)
    yield rms_norm, _rms_norm_op, (x, weight), (1e-6, 1.0), 1, {"offset": 1.0}
    yield layer_norm, _layer_norm_op, (x, weight, new(8)), (1e-5,), 1, {}
    yield swiglu, _gated_op, (x, new(2, 3, 8)), (0,), None, {}
    yield (
        lambda q, k, **_: rope(q, k, cos, cos),
        _rope_op,
        (new(1, 2, 5, 8), new(1, 1, 5, 8)),
        (cos, cos, False),
        2,
        {},
    )


@pytest.mark.parametrize("case", range(4))
def test_small_ops_go_short_with_the_same_values_and_gradients(case):
    call, op, tensors, rest, count, options = list(elementwise())[case]
    found = []
    for way in (call, op):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with torch.profiler.profile(acc_events=True) as profile:
            result = way(*leaves, **options) if way is call else way(*leaves, *rest)
            results = [result] if isinstance(result, torch.Tensor) else list(result[:count])
            gradients = torch.autograd.grad([y.square().sum() for y in results], leaves)
        found.append([*results, *gradients])
        ours = [event for event in profile.events() if event.name.startswith("napkinmath::")]
        assert bool(ours) is (way is op)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = call(*tensors, **options)
    again = [again] if isinstance(again, torch.Tensor) else again
    assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=False))


def test_what_was_checked_is_checked_again_when_it_changes():
    weight = torch.randn(8, 8)
    group = LinearGroup(
        [FrozenLinear(weight, None, LoraAdapter(torch.randn(2, 8), torch.randn(8, 2), 1.0))]
    )
    x = torch.randn(3, 8)
    for _ in range(3):
        qlora_linears(x, group)
    for wrong, match in ((torch.randn(3, 7), "weight"), (x.to(torch.int64), "dtype"), ([], "type")):
        with pytest.raises(KernelInputError, match=match):
            qlora_linears(wrong, group)
    weight.requires_grad_()
    with pytest.raises(KernelInputError, match="requires a gradient"):
        qlora_linears(x, group)
    rms_norm(x, torch.ones(8))
    for arguments in ((x, torch.ones(7)), (x, torch.ones(8), math.nan), (x, torch.ones(8), [])):
        with pytest.raises(KernelInputError):
            rms_norm(*arguments)
