"""The chunked loss: accuracy against float64 and plain torch, ignored and extreme rows, chunks,
frozen heads, memory bounds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from kernel_numerics import (
    FLOAT_DTYPES,
    assert_no_worse_than_torch,
    inside_poison,
    poisoned_allocations,
)
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.cross_entropy import (
    LinearCrossEntropy,
    _linear_cross_entropy_op,
    linear_cross_entropy,
    rows_per_chunk,
)
from napkinmath_kernels.ops.head_chunks import ProjectedAdapter
from napkinmath_kernels.ops.linear_group import LoraAdapter
from torch.autograd import gradcheck
from torch.library import opcheck

OPTIONS = [
    {},
    {"softcap": 3.0},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 5.0, "label_smoothing": 0.2, "z_loss": 1e-3},
]


def plain(
    hidden,
    weight,
    targets,
    *,
    softcap=0.0,
    label_smoothing=0.0,
    z_loss=0.0,
    ignore_index=-100,
    reduction="mean",
):
    """Logits in the model's dtype, upcast, then torch's loss: what transformers does."""
    logits = hidden @ weight.t()
    wide = logits if logits.dtype is torch.float64 else logits.float()
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    loss = F.cross_entropy(
        wide,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    if z_loss:
        valid = targets != ignore_index
        penalty = torch.logsumexp(wide, -1).square()[valid]
        loss = loss + z_loss * (penalty.mean() if reduction == "mean" else penalty.sum())
    return loss


def make(rows, hidden_size, vocabulary, dtype=torch.float32, ignored=0):
    hidden = torch.randn(rows, hidden_size).to(dtype).requires_grad_()
    weight = (
        (torch.randn(vocabulary, hidden_size) / math.sqrt(hidden_size)).to(dtype).requires_grad_()
    )
    targets = torch.randint(0, vocabulary, (rows,))
    targets[:ignored] = -100
    return hidden, weight, targets[torch.randperm(rows)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary", "ignored"), [(1, 7, 0), (5, 130, 2), (9, 1000, 0)])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_error_is_at_most_twice_that_of_plain_torch(
    backend, dtype, rows, vocabulary, ignored, options
):
    hidden, weight, targets = make(rows, 24, vocabulary, dtype, ignored)
    assert_no_worse_than_torch(
        lambda h, w: linear_cross_entropy(
            h, w, targets, chunk_bytes=4 * (vocabulary + 64) * hidden.element_size(), **options
        ),
        lambda h, w: plain(h, w, targets, **options).to(
            torch.float64 if h.dtype is torch.float64 else torch.float32
        ),
        [hidden, weight],
    )


@pytest.mark.parametrize("vocabulary", [8193, 16384])
def test_vocabularies_wider_than_a_block(triton_backend, vocabulary):
    hidden, weight, targets = make(2, 4, vocabulary)
    targets[0], targets[1] = vocabulary - 1, 8191
    assert_no_worse_than_torch(
        lambda h, w: linear_cross_entropy(h, w, targets),
        lambda h, w: plain(h, w, targets),
        [hidden, weight],
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_and_num_items(backend, reduction):
    hidden, weight, targets = make(6, 8, 20, ignored=2)
    total = plain(hidden, weight, targets, reduction="sum")
    ours = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    assert torch.allclose(ours, total if reduction == "sum" else total / 4)
    for items in (16, torch.tensor(16)):
        assert torch.allclose(
            linear_cross_entropy(hidden, weight, targets, num_items=items), total / 16
        )


def test_the_chunk_size_does_not_change_the_result(backend):
    hidden, weight, targets = make(10, 8, 33)
    results = []
    for chunk_bytes in (1, 3 * 64 * 4, 2**20):
        loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=chunk_bytes)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_logits(backend, scale):
    hidden, weight, targets = make(4, 8, 50)
    hidden = (hidden.detach() * scale).requires_grad_()
    assert_no_worse_than_torch(
        lambda h, w: linear_cross_entropy(h, w, targets),
        lambda h, w: plain(h, w, targets),
        [hidden, weight],
    )


def test_all_targets_ignored_gives_zero_and_zero_gradients(backend):
    hidden, weight, _ = make(3, 8, 20)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_zero_rows(backend):
    hidden, weight, _ = make(0, 8, 20)
    assert linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.int64)).item() == 0.0


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_loss(backend, special):
    hidden, weight, targets = make(3, 8, 20)
    with torch.no_grad():
        hidden[1, 2] = special
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.isnan()
    (gradient,) = torch.autograd.grad(loss, (hidden,))
    assert gradient[1].isnan().any() and gradient[[0, 2]].isfinite().all()


def test_a_masked_vocabulary_entry_is_no_nan(backend):
    """-inf for a whole first block, as padded vocabularies have it."""
    weight = torch.ones(20, 4)
    weight[:3] = float("-inf")
    loss = linear_cross_entropy(torch.ones(2, 4), weight, torch.tensor([5, 19]))
    assert torch.allclose(loss, torch.tensor(math.log(17.0)))


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    hidden, weight, targets = (inside_poison(x) for x in make(5, 8, 37, torch.bfloat16))
    with poisoned_allocations():
        loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=2 * 64 * 2)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)


def test_a_frozen_head_saves_only_the_hidden_gradient(backend):
    hidden, weight, targets = make(4, 8, 20)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((tuple(t.shape), t.dtype)) or t, lambda t: t
    ):
        linear_cross_entropy(hidden, weight.detach(), targets)
    assert saved == [((4, 8), torch.float32)]


def test_evaluation_computes_no_gradient(backend):
    hidden, weight, targets = make(4, 8, 20)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(evaluated, linear_cross_entropy(hidden, weight, targets).detach())
    assert not evaluated.requires_grad


def test_a_wider_head_is_cast_and_its_gradient_is_wide(backend):
    hidden, weight, targets = make(4, 8, 20)
    loss = linear_cross_entropy(hidden.detach().to(torch.bfloat16), weight, targets)
    (gradient,) = torch.autograd.grad(loss, (weight,))
    assert gradient.dtype is torch.float32


def test_autocast_decides_the_dtype():
    hidden, weight, targets = make(4, 8, 20)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(loss, linear_cross_entropy(hidden.to(torch.bfloat16), weight, targets))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_gradcheck(options):
    hidden, weight, targets = make(4, 3, 6, torch.float64, ignored=1)
    assert gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk_bytes=100, **options),
        (hidden, weight),
    )


def test_opcheck():
    hidden, weight, targets = make(4, 8, 20)
    rest = (None, True, -100, 0.0, 0.0, 0.0, 1000)
    low, low_weight = torch.randn(4, 2).requires_grad_(), torch.randn(20, 2).requires_grad_()
    nothing = hidden.new_empty(0, 0)
    for thin, has in (
        ((low, low_weight), [True] * 4),
        ((nothing, nothing), [True, True, False, False]),
    ):
        opcheck(_linear_cross_entropy_op, (hidden, weight, *thin, targets, *rest, has))


@pytest.mark.parametrize("trained", [False, True])
def test_an_adapter_on_the_head_is_as_its_product_added_to_the_weight(backend, trained):
    hidden, weight, targets = make(7, 16, 70, ignored=2)
    weight = weight.detach().requires_grad_(trained)
    a, b = torch.randn(3, 16), torch.randn(70, 3) / 3
    options = {"softcap": 5.0, "chunk_bytes": 2 * 128 * 4}
    assert_no_worse_than_torch(
        lambda h, w, a, b: linear_cross_entropy(
            h, w, targets, adapter=LoraAdapter(a, b, 0.5), **options
        ),
        lambda h, w, a, b: F.cross_entropy(
            5.0 * torch.tanh((h @ w.t() + 0.5 * (h @ a.t()) @ b.t()) / 5.0), targets
        ),
        [hidden, weight, a.requires_grad_(), b.requires_grad_()],
        roundings=3,  # two products in the place of one, and the cap's derivative
    )


def test_a_projected_adapter_is_the_adapter(backend):
    hidden, weight, targets = make(5, 16, 70, ignored=1)
    weight = weight.detach()
    a, b = torch.randn(3, 16).requires_grad_(), torch.randn(70, 3).requires_grad_()
    given = (LoraAdapter(a, b, 0.5), ProjectedAdapter(0.5 * F.linear(hidden, a), b))
    pairs = []
    for adapter in given:
        loss = linear_cross_entropy(hidden, weight, targets, adapter=adapter)
        pairs.append((loss, *torch.autograd.grad(loss, (hidden, a, b))))
    for ours, other in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, other)
    with pytest.raises(KernelInputError, match="lora_b of shape"):
        linear_cross_entropy(hidden, weight, targets, adapter=LoraAdapter(a, b[:9], 1.0))
    with pytest.raises(KernelInputError, match="lora_a of shape"):
        linear_cross_entropy(hidden, weight, targets, adapter=LoraAdapter(a[:, :9], b, 1.0))


def test_module_equals_the_function():
    hidden, weight, targets = make(4, 8, 20)
    module = LinearCrossEntropy(torch.nn.Parameter(weight.detach()), softcap=2.0)
    assert torch.equal(
        module(hidden, targets), linear_cross_entropy(hidden, weight, targets, softcap=2.0)
    )


@pytest.mark.parametrize(
    ("num_rows", "vocabulary", "itemsize", "chunk_bytes", "expected"),
    [
        (8192, 128256, 2, 256 * 2**20, 1024),
        (100, 128256, 2, 256 * 2**20, 100),
        (8192, 128256, 2, 1, 1),
        (64, 1000, 2, 100_000, 48),
    ],
)
def test_rows_per_chunk(num_rows, vocabulary, itemsize, chunk_bytes, expected):
    assert rows_per_chunk(num_rows, vocabulary, itemsize, chunk_bytes) == expected


def test_bad_input_is_refused_in_one_line():
    hidden, weight, targets = make(4, 8, 20)
    bad = [
        (lambda: linear_cross_entropy(hidden.to(torch.int32), weight, targets), "int32"),
        (lambda: linear_cross_entropy(hidden, weight[:, :4], targets), r"\(20, 4\)"),
        (lambda: linear_cross_entropy(hidden, weight, targets[:2]), r"\(2,\)"),
        (lambda: linear_cross_entropy(hidden, weight, targets.int()), "int32"),
        (lambda: linear_cross_entropy(hidden, weight, torch.full((4,), 20)), "target 20"),
        (lambda: linear_cross_entropy(hidden, weight, torch.full((4,), -1)), "target -1"),
        (lambda: linear_cross_entropy(hidden, weight, targets, reduction="none"), "'none'"),
        (lambda: linear_cross_entropy(hidden, weight, targets, softcap=-1), "softcap -1"),
        (
            lambda: linear_cross_entropy(hidden, weight, targets, label_smoothing=1.0),
            "label_smoothing 1.0",
        ),
        (lambda: linear_cross_entropy(hidden, weight, targets, chunk_bytes=0), "chunk_bytes 0"),
        (lambda: linear_cross_entropy(hidden, weight, targets, z_loss=-1.0), "z_loss -1.0"),
        (lambda: linear_cross_entropy(hidden, weight.to("meta"), targets), "weight on meta"),
    ]
    for call, says in bad:
        with pytest.raises(KernelInputError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_second_derivative_is_refused():
    """Gradients come from the forward: differentiated again they would pass for constants."""
    hidden, weight, targets = make(4, 3, 6, torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(KernelInputError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("num_items", [None, 3000])
def test_fp16_gradients_keep_their_digits_under_a_grad_scaler(backend, trains_head, num_items):
    """A mean over many targets makes gradients that fp16 has no digits for; a scaler lifts plain
    PyTorch's before they are rounded."""
    rows, lifted = 3000, 65536.0
    hidden, weight = torch.randn(rows, 16).half(), torch.randn(11, 16) / 4
    targets = torch.randint(0, 11, (rows,))
    results = []
    for dtype in (torch.float16, torch.float64):
        h, w = (
            hidden.to(dtype).requires_grad_(),
            weight.to(dtype if dtype is torch.float64 else torch.float32).requires_grad_(
                trains_head
            ),
        )
        if dtype is torch.float64:
            value = F.cross_entropy(
                h @ w.half().double().t() if not trains_head else h @ w.t(), targets
            )
        else:
            value = linear_cross_entropy(h, w, targets, num_items=num_items, chunk_bytes=256 * 1024)
        results.append(torch.autograd.grad(value * lifted, [h, w] if trains_head else [h]))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert ((ours.double() - exact).norm() / exact.norm()).item() < 1.5e-3


@pytest.mark.parametrize("upstream", [1 / 3, 0.7, 65536.0])
def test_the_upstream_gradient_is_not_rounded_to_half_precision(backend, upstream):
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(11, 16).bfloat16()
    targets = torch.randint(0, 11, (40,))
    scaled, plain = [], []
    for factor, found in ((upstream, scaled), (1.0, plain)):
        leaf = hidden.clone().requires_grad_()
        (linear_cross_entropy(leaf, weight, targets) * factor).backward()
        found.append(leaf.grad)
    assert torch.equal(scaled[0], (plain[0].float() * torch.tensor(upstream)).bfloat16())


@pytest.mark.parametrize("vocabulary", [11, 130])
@pytest.mark.parametrize("trains_head", [False, True])
def test_memory_left_as_it_was_reaches_no_gradient(backend, vocabulary, trains_head):
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(vocabulary, 16).bfloat16()
    targets = torch.randint(0, vocabulary, (40,))
    leaves = hidden.requires_grad_(), weight.requires_grad_(trains_head)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        linear_cross_entropy(*leaves, targets).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(leaf.grad.isfinite().all() for leaf in leaves if leaf.requires_grad)
