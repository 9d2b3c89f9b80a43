"""Divergences of a student from a teacher without their logits: against float64 and plain torch,
TRL's own functions, chunks, masks, adapters and extreme rows."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_numerics import (
    FLOAT_DTYPES,
    assert_no_worse_than_torch,
    inside_poison,
    poisoned_allocations,
)
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.ops.divergence import linear_divergence
from napkinmath_kernels.ops.linear_group import LoraAdapter
from torch.autograd import gradcheck

BETAS = (0.0, 0.3, 1.0)
OPTIONS = [{}, {"softcap": 3.0, "teacher_softcap": 5.0, "temperature": 0.7, "logit_scale": 1.5}]


def make(rows, width, vocabulary, dtype=torch.float32, trained=True, taught_width=None):
    """(student's hidden states and head, teacher's) and a mask that leaves two rows out."""
    taught_width = taught_width or width + 4
    shapes = ((rows, width), (vocabulary, width), (rows, taught_width), (vocabulary, taught_width))
    hidden, weight, taught, taught_weight = (
        (torch.randn(shape) / (math.sqrt(shape[1]) if shape[0] == vocabulary else 1)).to(dtype)
        for shape in shapes
    )
    mask = torch.ones(rows, dtype=torch.long)
    mask[torch.randperm(rows)[:2]] = 0
    hidden.requires_grad_(), weight.requires_grad_(trained)
    return hidden, weight, taught, taught_weight, mask


def scores(hidden, weight, softcap=0.0, temperature=1.0, logit_scale=1.0):
    logits = hidden @ weight.t()
    wide = (logits if logits.dtype is torch.float64 else logits.float()) * logit_scale
    return (softcap * torch.tanh(wide / softcap) if softcap else wide) / temperature


def plain(hidden, weight, taught, taught_weight, mask, beta, **options):
    """As trainers compute it from logits (arXiv 2306.13649 equation 1)."""
    caps = options.pop("softcap", 0.0), options.pop("teacher_softcap", 0.0)
    temperature = options.pop("temperature", 1.0)
    own = torch.log_softmax(scores(hidden, weight, caps[0], temperature, **options), -1)
    other = torch.log_softmax(scores(taught, taught_weight, caps[1], temperature), -1)
    if beta in (0.0, 1.0):
        p, q = (other, own) if beta == 0 else (own, other)
        found = (p.exp() * (p - q)).sum(-1)
    else:
        m = torch.logaddexp(own + math.log(1 - beta), other + math.log(beta))
        found = (beta * other.exp() * (other - m) + (1 - beta) * own.exp() * (own - m)).sum(-1)
    return (found * mask).sum() / mask.sum()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_error_is_at_most_twice_that_of_plain_torch(backend, dtype, trained, beta, options):
    hidden, weight, taught, head, mask = make(7, 24, 130, dtype, trained)
    given = {"mask": mask, "beta": beta, "chunk_bytes": 2 * 3 * 192 * hidden.element_size()}
    assert_no_worse_than_torch(
        lambda h, w, t, v: linear_divergence(h, w, t, v, **given, **options).loss,
        lambda h, w, t, v: plain(h, w, t, v, mask, beta, **options),
        [hidden, weight, taught, head],
        roundings=1 + bool(options),  # the soft cap's derivative, and the product with the scales
    )


@pytest.mark.parametrize("beta", BETAS)
def test_it_gives_what_trls_functions_give(backend, beta):
    """GKD's loss of logits, and the chunked one of TRL's distillation trainer with its entropy."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL is not installed")
    trl = pytest.importorskip("trl.kernels.chunked_divergence")
    hidden, weight, taught, head, mask = make(6, 16, 70)
    labels = torch.where(mask != 0, 5, -100)
    loss = gkd.GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.t())[None], (taught @ head.t())[None], labels[None], beta, 0.8
    )
    ours = linear_divergence(
        hidden, weight, taught, head, mask=mask, beta=beta, temperature=0.8, entropy=True
    )
    torch.testing.assert_close(ours.loss, loss)
    pairs = [torch.autograd.grad(x, (hidden, weight)) for x in (ours.loss, loss)]
    for got, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected)
    found = trl.ChunkedDivergenceFunction.apply(hidden, weight, None, taught, head, None, beta, 0.8)
    counted = mask != 0
    torch.testing.assert_close(ours.loss, found[0][counted].mean())
    torch.testing.assert_close(ours.entropy, found[1][counted].sum())
    assert not ours.entropy.requires_grad


@pytest.mark.parametrize("beta", BETAS)
def test_an_adapter_on_the_head_is_as_its_product_added_to_the_weight(backend, beta):
    hidden, weight, taught, head, mask = make(6, 16, 70, trained=False)
    a, b = torch.randn(3, 16).requires_grad_(), (torch.randn(70, 3) / 3).requires_grad_()
    given = {"mask": mask, "beta": beta, "chunk_bytes": 2 * 2 * 128 * 4}
    assert_no_worse_than_torch(
        lambda h, a, b: (
            linear_divergence(h, weight, taught, head, adapter=LoraAdapter(a, b, 0.5), **given).loss
        ),
        lambda h, a, b: plain(
            h,
            weight.to(h.dtype) + 0.5 * b @ a,
            taught.to(h.dtype),
            head.to(h.dtype),
            mask,
            beta,
        ),
        [hidden, a, b],
        roundings=2,  # two products in the place of one
    )


@pytest.mark.parametrize("beta", BETAS)
def test_vocabularies_wider_than_a_block_and_far_maxima(triton_backend, beta):
    hidden, weight, taught, head, mask = make(3, 4, 4200)
    hidden, taught = (8 * hidden.detach()).requires_grad_(), 8 * taught
    assert_no_worse_than_torch(
        lambda h, w: linear_divergence(h, w, taught, head, mask=mask, beta=beta).loss,
        lambda h, w: plain(h, w, taught.to(h.dtype), head.to(h.dtype), mask, beta),
        [hidden, weight],
        roundings=8,  # of logits of some tens, which exponentials hand on whole
    )


@pytest.mark.parametrize("beta", BETAS)
def test_words_that_both_models_mask_are_no_nan(backend, beta):
    weight, head = torch.randn(20, 4), torch.randn(20, 4)
    weight[:3, 0] = head[:3, 0] = float("-inf")
    hidden = torch.rand(2, 4) + 0.1
    found = linear_divergence(
        hidden.requires_grad_(), weight, hidden.detach(), head, beta=beta, entropy=True
    )
    few = linear_divergence(hidden, weight[3:], hidden.detach(), head[3:], beta=beta, entropy=True)
    torch.testing.assert_close(found.loss, few.loss)
    torch.testing.assert_close(found.entropy, few.entropy)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_models_have_none(backend, beta):
    hidden, weight, _, _, mask = make(6, 16, 70)
    found = linear_divergence(hidden, weight, hidden, weight.detach(), mask=mask, beta=beta)
    (gradient,) = torch.autograd.grad(found.loss, (hidden,))
    assert abs(found.loss.item()) < 1e-6 and gradient.abs().max() < 1e-6  # fp32's own roundings


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    for trained, beta in ((False, 0.0), (True, 0.5)):
        *tensors, mask = (inside_poison(x) for x in make(5, 8, 37, torch.bfloat16, trained))
        wanted = tensors[: 1 + trained]
        with poisoned_allocations():
            found = linear_divergence(*tensors, mask=mask, beta=beta, chunk_bytes=512, entropy=True)
            gradients = torch.autograd.grad(found.loss, wanted)
            assert all(x.isfinite().all() for x in (*found, *gradients))


def test_what_is_kept(backend):
    """The gradients alone, of a trained head too; without any, nothing; and no row, no loss."""
    hidden, weight, taught, head, mask = make(4, 8, 20)
    for trained, expected in ((False, [(4, 8)]), (True, [(4, 8), (20, 8)])):
        saved = []
        one = weight if trained else weight.detach()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, id):  # noqa: B023
            linear_divergence(hidden, one, taught, head, mask=mask)
        assert saved == expected
    with torch.no_grad():
        assert not linear_divergence(hidden, weight, taught, head).loss.requires_grad
    none = linear_divergence(hidden, weight, taught, head, mask=mask * 0).loss
    assert none == 0 and not any(x.any() for x in torch.autograd.grad(none, (hidden, weight)))


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta):
    hidden, weight, taught, head, mask = make(4, 3, 6, torch.float64)
    options = {"chunk_bytes": 200, "softcap": 2.0, "temperature": 0.5, "beta": beta}
    assert gradcheck(
        lambda h, w: linear_divergence(h, w, taught, head, mask=mask, **options).loss,
        (hidden, weight),
    )


def test_reductions(backend):
    given = make(5, 8, 20)
    mask = given[4]
    mean, total = (
        linear_divergence(*given[:4], mask=mask, reduction=how).loss for how in ("mean", "sum")
    )
    torch.testing.assert_close(total, 3 * mean)
    for items in (7, torch.tensor(7)):
        found = linear_divergence(*given[:4], mask=mask, num_items=items).loss
        torch.testing.assert_close(found, total / 7)


def test_bad_input_is_refused_in_one_line():
    hidden, weight, taught, head, mask = make(4, 8, 20)
    call = linear_divergence
    bad = [
        (lambda: call(hidden, weight, taught, head, beta=1.5), "beta 1.5"),
        (lambda: call(hidden, weight, taught, head, temperature=0.0), "temperature 0.0"),
        (lambda: call(hidden, weight, taught, head, teacher_softcap=-1.0), "softcap -1.0"),
        (lambda: call(hidden, weight, taught, head, reduction="none"), "reduction 'none'"),
        (lambda: call(hidden, weight, taught, head[:19]), "19 words"),
        (lambda: call(hidden, weight, taught[:3], head), "teacher_hidden's rows"),
        (lambda: call(hidden, weight, taught, head, mask=mask[:3]), "mask"),
        (lambda: call(hidden, weight[:, :4], taught, head), r"\(20, 4\)"),
        (lambda: call(hidden, weight, taught, head, chunk_bytes=0), "chunk_bytes 0"),
    ]
    for run, named in bad:
        with pytest.raises(KernelInputError, match=named) as error:
            run()
        assert "\n" not in str(error.value)
