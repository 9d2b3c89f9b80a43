"""Experts' linears with adapters against plain torch in float64, one expert after another: dense
and 4-bit stacks, both orders, experts without rows, rows of no expert."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import napkinmath_kernels.ops.expert_linear as expert_ops
import pytest
import torch
from kernel_numerics import relative_error
from napkinmath_kernels import costs, patch, unpatch
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.expert_linear import (
    ExpertAdapter,
    _expert_linear_op,
    expert_linear,
)
from napkinmath_kernels.ops.nf4 import decode_into, dequantize, quantize
from napkinmath_kernels.patching import experts
from torch.library import opcheck

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and PEFT warn of each other

EXPERTS, IN, OUT = 5, 48, 72
COUNTS = (3, 0, 70, 1, 2)
OFFSETS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
ROWS = sum(COUNTS)


def peft_adapter(rank, dtype, *, trained=True):
    """Factors as PEFT stores them: (experts * r, in), and (out, r * experts)."""
    a = torch.randn(EXPERTS * rank, IN, dtype=dtype, requires_grad=trained)
    b = torch.randn(OUT, rank * EXPERTS, dtype=dtype, requires_grad=trained)
    return a, b


def adapter_of(a, b, scaling=0.5):
    stacked = b.reshape(OUT, -1, EXPERTS).permute(2, 0, 1)
    return ExpertAdapter(a.reshape(EXPERTS, -1, IN), stacked, scaling)


def expected(x, weight, adapter, transposed):
    """The same in float64, with W + scaling B A made in full."""
    delta = torch.einsum("eor,eri->eoi", adapter.b.double(), adapter.a.double()) * adapter.scaling
    whole = weight.double() + (delta.transpose(1, 2) if transposed else delta)
    ends = OFFSETS.tolist()
    parts = [
        x[start:end].double() @ (whole[e] if transposed else whole[e].t())
        for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "tolerance"),
    [(torch.float32, torch.float32, 2e-6), (torch.bfloat16, torch.float32, 1e-2)],
)
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize(("rank", "transposed"), [(3, False), (20, True)])
def test_values_and_gradients(backend, dtype, adapter_dtype, tolerance, four_bit, rank, transposed):
    shape = (EXPERTS, IN, OUT) if transposed else (EXPERTS, OUT, IN)
    dense = torch.randn(shape).to(dtype)
    weight = quantize(dense) if four_bit else dense
    values = dequantize(weight) if four_bit else dense
    a, b = peft_adapter(rank, adapter_dtype)
    x = torch.randn(ROWS + 4, IN).to(dtype).requires_grad_()
    dy = torch.randn(ROWS, OUT).to(dtype)
    y = expert_linear(x, weight, OFFSETS, adapter_of(a, b), transposed=transposed)
    assert y.shape == (ROWS + 4, OUT)
    assert y.dtype is dtype
    with torch.no_grad():
        rounded = [t.to(dtype).double() for t in (x, a, b)]
    leaves = [t.requires_grad_() for t in rounded]
    true = expected(leaves[0], values, adapter_of(*leaves[1:]), transposed)
    assert relative_error(y[:ROWS], true) < tolerance
    found = torch.autograd.grad(y[:ROWS], (x, a, b), dy)
    for ours, theirs in zip(found, torch.autograd.grad(true, leaves, dy.double()), strict=True):
        rows = slice(ROWS) if ours.shape == x.shape else slice(None)
        assert relative_error(ours[rows], theirs[rows]) < tolerance
    assert [g.dtype for g in found] == [dtype, adapter_dtype, adapter_dtype]


def test_the_op_is_what_torch_expects_and_eager_code_goes_short():
    a, b = peft_adapter(4, torch.float32)
    adapter = adapter_of(a, b)
    x = torch.randn(ROWS, IN, requires_grad=True)
    weight = torch.randn(EXPERTS, OUT, IN)
    factors = [t.detach().requires_grad_() for t in (adapter.a, adapter.b)]
    layout = [EXPERTS, OUT, IN, 0, 0]
    opcheck(_expert_linear_op, (x, [weight], layout, False, OFFSETS, *factors, 0.5))
    opcheck(_expert_linear_op, (x, [weight], layout, False, OFFSETS, None, None, 1.0))
    fast = torch.autograd.grad(expert_linear(x, weight, OFFSETS, adapter).sum(), (x, a, b))
    y = _expert_linear_op(x, [weight], layout, False, OFFSETS, adapter.a, adapter.b, 0.5)[0]
    assert all(map(torch.equal, fast, torch.autograd.grad(y.sum(), (x, a, b))))


def test_what_it_does_not_take_is_said():
    x, weight = torch.randn(ROWS, IN), torch.randn(EXPERTS, OUT, IN)
    a, b = peft_adapter(4, torch.float32)
    good = adapter_of(a, b)
    for arguments, match in (
        ((x[:, :-1], weight, OFFSETS), "stack"),
        ((x, weight, OFFSETS.long()), "offsets"),
        ((x, weight, OFFSETS[:-1]), "offsets"),
        ((x, weight.clone().requires_grad_(), OFFSETS), "requires a gradient"),
        ((x, weight, OFFSETS, ExpertAdapter(good.b, good.a, 1.0)), "adapter a"),
        ((x, weight, OFFSETS, ExpertAdapter(good.a, good.b.detach(), 1.0)), "without the other"),
        ((x, weight, OFFSETS, ExpertAdapter(good.a, good.b, float("nan"))), "scaling"),
    ):
        with pytest.raises(KernelInputError, match=match):
            expert_linear(*arguments)


def mixture(*, targets, kind="mixtral"):
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "num_local_experts": 4,
        "experts_implementation": "grouped_mm",
    }
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "gpt_oss":
        torch.nn.init.normal_(model.model.layers[0].mlp.experts.gate_up_proj_bias)
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": targets}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("kind", "targets"), [("mixtral", BOTH), ("mixtral", BOTH[1:]), ("gpt_oss", BOTH)]
)
def test_a_patched_mixture_trains_as_peft_does_and_comes_back(kind, targets):
    model, ids = mixture(targets=targets, kind=kind), torch.randint(0, 64, (2, 9))
    loss, gradients = loss_and_gradients(model, ids)
    report = patch(model)
    assert len(report.replaced["experts qlora"]) == 2
    calls = []
    with mock.patch.object(
        experts, "expert_linear", lambda *a, **k: (calls.append(1), expert_linear(*a, **k))[1]
    ):
        patched_loss, patched = loss_and_gradients(model, ids)
    assert len(calls) == 4
    torch.testing.assert_close(patched_loss, loss, rtol=1e-5, atol=1e-6)
    assert set(patched) == set(gradients)
    for name in gradients:
        assert relative_error(patched[name], gradients[name].double()) < 1e-4, name
    with model.disable_adapter():
        without = model(input_ids=ids).logits
    unpatch(model)
    with model.disable_adapter():
        assert torch.allclose(model(input_ids=ids).logits, without, atol=1e-5)
    assert torch.equal(loss_and_gradients(model, ids)[0], loss)


def test_stacks_in_four_bits_are_decoded_once_a_product():
    """PEFT 0.21 alone asks a stack of bytes for a gradient, so its own run has the values dense. They
    are ours: bitsandbytes 0.50 decodes rows shorter than a block wrongly on a CPU."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    dense, packed = mixture(targets=BOTH), mixture(targets=BOTH)
    ids = torch.randint(0, 64, (2, 9))
    for name, _ in packed.named_modules():
        if name.endswith("mlp.experts"):
            held, same = (
                experts.experts_of(model.get_submodule(name)) for model in (packed, dense)
            )
            for stack in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(held, stack, compress_statistics=True)
                getattr(same, stack).data.copy_(dequantize(experts._four_bit(held, stack)))
    loss, gradients = loss_and_gradients(dense, ids)
    patch(packed)
    decoded = []
    with mock.patch.object(
        expert_ops, "decode_into", lambda *a: (decoded.append(1), decode_into(*a))
    ):
        patched_loss, patched = loss_and_gradients(packed, ids)
    assert len(decoded) == 8  # two stacks of two layers, forward and backward
    torch.testing.assert_close(patched_loss, loss, rtol=1e-5, atol=1e-6)
    for name in gradients:
        assert relative_error(patched[name], gradients[name].double()) < 1e-4, name


@pytest.mark.parametrize("four_bit", [False, True])
def test_what_is_saved_is_what_the_cost_table_says(four_bit):
    a, b = peft_adapter(4, torch.float32)
    dense = torch.randn(EXPERTS, OUT, IN)
    weight = quantize(dense) if four_bit else dense
    stored = costs.four_bit_storage(EXPERTS * OUT, IN) if four_bit else ()
    cost = costs.expert_linear(ROWS, EXPERTS, costs.LinearSize(OUT, IN, 4, stored), "fp32")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.append((tuple(t.shape), t.dtype)), t)[1], lambda t: t
    ):
        expert_linear(torch.randn(ROWS, IN, requires_grad=True), weight, OFFSETS, adapter_of(a, b))
    views = {(tuple(t.shape), t.dtype) for t in (a, b)}
    types = {"fp32": torch.float32, "int32": torch.int32, "uint8": torch.uint8}
    assert Counter(s for s in saved if s not in views) == Counter(
        (s.shape, types[s.dtype]) for s in cost.saved
    )
