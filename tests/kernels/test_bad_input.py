"""What no test of an op thought of: every entry refuses it in one line, with what was given, what
is accepted and what to use instead."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from napkinmath_kernels import (
    LayerOption,
    QLoRALinear,
    dequantize,
    flash_attention,
    layer_norm,
    linear_cross_entropy,
    plan_layers,
    qlora_linear,
    qlora_mlp,
    quantize,
    rms_norm,
    rope,
    swiglu,
    use_backend,
)
from napkinmath_kernels.checkpoint import checkpoint_layers
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.linear_group import FrozenLinear

NAN, INF = math.nan, math.inf
R = torch.randn
Q, K = R(1, 4, 8, 64), R(1, 2, 8, 64)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
META = {"q": Q.bfloat16().to("meta"), "k": K.bfloat16().to("meta"), "v": K.bfloat16().to("meta")}
WEIGHT = quantize(R(64, 64))
A, B = R(4, 64), R(64, 4)
COS = torch.rand(1, 8, 64)


def attend(**options):
    return flash_attention(**{"q": Q, "k": K, "v": K, **options})


def pack(**options):
    return attend(cu_seqlens_q=CU, cu_seqlens_k=CU, **options)


def loss(**options):
    return linear_cross_entropy(
        **{"hidden": R(3, 8), "weight": R(10, 8), "targets": torch.tensor([1, 2, -100]), **options}
    )


def lora(**options):
    return qlora_linear(**{"x": R(3, 64), "weight": WEIGHT, "lora_a": A, "lora_b": B, **options})


def decode(**parts):
    return dequantize(dataclasses.replace(WEIGHT, **parts))


def rotate(**options):
    return rope(**{"q": Q.clone(), "k": K.clone(), "cos": COS, "sin": COS, **options})


CASES = {
    # attention
    "a window that is no number of keys": (lambda: attend(window=2.5), "window 2.5"),
    "a scale in a tensor": (lambda: attend(scale=torch.tensor(0.1)), "scale tensor"),
    "a scale that is no number": (lambda: attend(scale=NAN), "scale nan"),
    "an empty head": (lambda: attend(q=Q[..., :0], k=K[..., :0], v=K[..., :0]), "head size 0"),
    "an array": (lambda: attend(q=Q.numpy()), "q of type ndarray"),
    "a sparse tensor": (lambda: attend(k=K.to_sparse()), "k of layout torch.sparse_coo"),
    "bounds that stop short": (
        lambda: attend(cu_seqlens_q=CU - 1, cu_seqlens_k=CU),
        r"\[-1, 2, 7\].*rising from 0 to 8",
    ),
    "bounds that fall": (
        lambda: attend(cu_seqlens_q=torch.tensor([0, 9, 8], dtype=torch.int32), cu_seqlens_k=CU),
        "rising from 0 to 8",
    ),
    "bounds in a list": (
        lambda: attend(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8]),
        "cu_seqlens_q of type list",
    ),
    "a longest sequence that is not": (
        lambda: pack(max_seqlen_q=1, max_seqlen_k=8),
        "max_seqlen 1 of cu_seqlens_q; accepted: 5 or more",
    ),
    "a negative length": (lambda: pack(max_seqlen_k=-1), "max_seqlen of cu_seqlens_k -1"),
    "a length without bounds": (lambda: attend(max_seqlen_q=8), "max_seqlen without cu_seqlens"),
    "bounds without values": (
        lambda: attend(**META, cu_seqlens_q=CU.to("meta"), cu_seqlens_k=CU.to("meta")),
        "without values",
    ),
    # loss
    "an empty vocabulary": (lambda: loss(weight=R(0, 8)), r"weight \(0, 8\).*neither empty"),
    "empty hidden states": (lambda: loss(hidden=R(3, 0), weight=R(10, 0)), "neither empty"),
    "no items": (lambda: loss(num_items=0), "num_items 0"),
    "items that are no number": (lambda: loss(num_items=NAN), "num_items nan"),
    "two numbers of items": (
        lambda: loss(num_items=torch.tensor([1, 2])),
        r"num_items of shape \(2,\)",
    ),
    "trained items": (
        lambda: loss(num_items=torch.tensor(3.0, requires_grad=True)),
        "requires_grad=True",
    ),
    "an infinite cap": (lambda: loss(softcap=INF), "softcap inf"),
    "an infinite z-loss": (lambda: loss(z_loss=INF), "z_loss inf"),
    "half a byte": (lambda: loss(chunk_bytes=2.5), "chunk_bytes 2.5"),
    "half an index": (lambda: loss(ignore_index=1.5), "ignore_index 1.5"),
    # norms, gates, rotation
    "a negative epsilon": (lambda: rms_norm(R(3, 8), R(8), -1.0), "eps -1.0"),
    "a written epsilon": (lambda: layer_norm(R(3, 8), R(8), None, "1"), "eps '1'"),
    "an offset that is no number": (lambda: rms_norm(R(3, 8), R(8), offset=NAN), "offset nan"),
    "no weight": (lambda: layer_norm(R(3, 8), None), "weight of type NoneType"),
    "an integer weight": (
        lambda: layer_norm(R(3, 8), torch.ones(8, dtype=torch.int32)),
        "weight of dtype int32",
    ),
    "no columns": (lambda: swiglu(R(3, 0), R(3, 0)), r"gate of shape \(3, 0\)"),
    "no second tensor": (lambda: swiglu(R(3, 8), None), "up of type NoneType"),
    "integer tables": (lambda: rotate(cos=COS.int()), "cos of dtype int32"),
    "trained tables": (
        lambda: rotate(cos=COS.clone().requires_grad_()),
        "tables that require a gradient",
    ),
    "q and k in one place": (
        lambda: rope(Q, Q, COS, COS, inplace=True),
        "q and k in the same memory",
    ),
    "heads in one place": (
        lambda: rotate(q=Q[:, :1].expand(1, 4, 8, 64), inplace=True),
        "expanded strides",
    ),
    # 4-bit weights
    "a short table": (lambda: decode(code=WEIGHT.code[:3]), "code of 3 x"),
    "a short nested table": (
        lambda: decode(nested_code=WEIGHT.nested_code[:5]),
        "nested_code of 5 x",
    ),
    "a table in half precision": (
        lambda: decode(code=WEIGHT.code.half()),
        "float16; accepted: 16 x float32",
    ),
    "two offsets": (lambda: decode(offset=R(2)), "offset of 2 x"),
    "nested scales in half precision": (
        lambda: decode(nested_absmax=WEIGHT.nested_absmax.half()),
        "nested_absmax of torch.float16",
    ),
    "empty nested blocks": (lambda: decode(nested_blocksize=0), "nested_blocksize 0"),
    "a plain tensor to decode": (lambda: dequantize(R(3)), "a Tensor; accepted: a QuantizedWeight"),
    "a trained output": (
        lambda: dequantize(WEIGHT, out=torch.empty(64, 64, requires_grad=True)),
        "requires no gradient",
    ),
    "a list of weights": (lambda: quantize([1.0] * 64), "weight of type list"),
    # QLoRA
    "an integer weight to multiply": (
        lambda: lora(weight=torch.ones(64, 64, dtype=torch.int32)),
        "weight of dtype int32",
    ),
    "a written weight": (lambda: lora(weight="w"), "weight of type str"),
    "an integer bias": (
        lambda: lora(bias=torch.ones(64, dtype=torch.int32)),
        "bias of dtype int32",
    ),
    "an adapter elsewhere": (lambda: lora(lora_b=B.to("meta")), "lora_b on meta"),
    "an adapter of rank 0": (lambda: lora(lora_a=R(0, 64), lora_b=R(64, 0)), "r 1 or more"),
    "a scaling that is no number": (lambda: lora(scaling=NAN), "scaling nan"),
    "a seed of 32 bits": (
        lambda: lora(dropout=0.1, seed=torch.tensor([3], dtype=torch.int32)),
        "seed torch.int32",
    ),
    "two seeds": (lambda: lora(dropout=0.1, seed=torch.tensor([3, 4])), r"of shape \(2,\)"),
    "a seed elsewhere": (
        lambda: lora(dropout=0.1, seed=torch.tensor([3], device="meta")),
        "on meta",
    ),
    "a seed that is a number": (lambda: lora(dropout=0.1, seed=3), "seed of type int"),
    "an activation by name": (
        lambda: qlora_mlp(R(3, 64), *[FrozenLinear(WEIGHT)] * 3, activation="silu"),
        "activation 'silu'",
    ),
    "a module of rank 0": (lambda: QLoRALinear(WEIGHT, 0), "rank 0"),
    "a module that drops all": (lambda: QLoRALinear(WEIGHT, 4, dropout=1.0), "dropout 1.0"),
    "a module of integers": (
        lambda: QLoRALinear(WEIGHT, 4, adapter_dtype=torch.int32),
        "adapter_dtype torch.int32",
    ),
    "a module with a short bias": (
        lambda: QLoRALinear(WEIGHT, 4, bias=R(3)),
        r"bias of shape \(3,\)",
    ),
    # checkpointing, backends
    "negative bytes": (lambda: plan_layers([[LayerOption("a", -1, 0, 0.0)]], 10), "saved_bytes=-1"),
    "time that is no number": (
        lambda: plan_layers([[LayerOption("a", 1, 0, NAN)]], 10),
        "extra_seconds=nan",
    ),
    "a policy by name": (
        lambda: checkpoint_layers([torch.nn.Identity()], ["full"]),
        "policy 'full'",
    ),
    "a backend by name": (
        lambda: use_backend("triton").__enter__(),
        "'triton'; accepted: Backend.TRITON",
    ),
}


@pytest.mark.parametrize(("call", "says"), CASES.values(), ids=CASES)
def test_it_is_refused_in_one_line(call, says):
    with pytest.raises(KernelInputError, match=says) as caught:
        call()
    assert (
        "\n" not in str(caught.value)
        and "; accepted: " in str(caught.value)
        and "; instead: " in str(caught.value)
    )


def test_a_batch_without_a_valid_target_is_zero_whatever_the_number_of_items():
    hidden = R(3, 8).requires_grad_()
    value = linear_cross_entropy(
        hidden, R(10, 8), torch.full((3,), -100), num_items=torch.tensor([0])
    )
    value.backward()
    assert value.shape == () and value.item() == 0 and not hidden.grad.any()


OPS = {
    "attention": (lambda q, k: flash_attention(q, k, k), [Q, K]),
    "rms_norm": (rms_norm, [R(3, 8), R(8)]),
    "layer_norm": (layer_norm, [R(3, 8), R(8)]),
    "swiglu": (swiglu, [R(3, 8), R(3, 8)]),
    "loss": (
        lambda h, w: linear_cross_entropy(h, w, torch.zeros(3, dtype=torch.int64)),
        [R(3, 8), R(10, 8)],
    ),
    "linear": (lambda x, a, b: qlora_linear(x, WEIGHT, a, b), [R(3, 64), A, B]),
    "mlp": (lambda x: qlora_mlp(x, *[FrozenLinear(WEIGHT)] * 3), [R(3, 64)]),
}


@pytest.mark.parametrize(("function", "inputs"), OPS.values(), ids=OPS)
def test_second_derivatives_are_refused(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with pytest.raises(KernelInputError, match="create_graph=True"):
        torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own, of its decompositions
@pytest.mark.parametrize(("function", "inputs"), OPS.values(), ids=OPS)
def test_forward_mode_is_refused_and_not_zero(function, inputs):
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in inputs]
        with pytest.raises(KernelInputError, match="forward-mode tangent"):
            function(*dual)


def test_the_rotations_second_derivative_is_exact():
    q, k = Q[:, :, :3, :8].double().requires_grad_(), K[:, :, :3, :8].double().requires_grad_()
    tables = torch.rand(2, 1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda q, k: rope(q, k, tables[0], tables[1]), [q, k])
