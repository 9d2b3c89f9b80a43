"""Log-probabilities without logits: against float64 and plain torch, TRL's own function, chunks,
frozen and trained heads, ignored and extreme rows."""

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
from napkinmath_kernels.ops.log_probabilities import linear_log_probabilities
from torch.autograd import gradcheck

OPTIONS = [{}, {"softcap": 3.0, "temperature": 0.7, "logit_scale": 1.5}]


def make(rows, width, vocabulary, dtype=torch.float32, trained=True, ignored=0):
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) / math.sqrt(width)).to(dtype).requires_grad_(trained)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[:ignored] = -100
    return hidden, weight, targets[torch.randperm(rows)]


def distribution(hidden, weight, softcap=0.0, temperature=1.0, logit_scale=1.0):
    """Scores of the vocabulary, wide, as trainers compute them from logits."""
    logits = hidden @ weight.t()
    wide = (logits if logits.dtype is torch.float64 else logits.float()) * logit_scale
    return (softcap * torch.tanh(wide / softcap) if softcap else wide) / temperature


def plain(hidden, weight, targets, **options):
    every = torch.log_softmax(distribution(hidden, weight, **options), -1)
    chosen = every.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
    return torch.where(targets == -100, 0.0, chosen)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_error_is_at_most_twice_that_of_plain_torch(backend, dtype, trained, options):
    """Each row's upstream gradient is another, as a loss of preferences gives it."""
    hidden, weight, targets = make(7, 24, 130, dtype, trained, ignored=2)
    chunk_bytes = 3 * 192 * hidden.element_size()
    assert_no_worse_than_torch(
        lambda h, w: (
            linear_log_probabilities(h, w, targets, chunk_bytes=chunk_bytes, **options).log_probs
        ),
        lambda h, w: plain(h, w, targets, **options),
        [hidden, weight],
        roundings=1 + bool(options),  # the soft cap's derivative, and the product with the scales
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_statistics(backend, options):
    hidden, weight, targets = make(9, 16, 70)
    with torch.no_grad():
        weight[50] = weight[20]  # two words alike: the first is the likeliest
        hidden[0] = 40 * weight[20]
    targets[0] = 50
    found = linear_log_probabilities(hidden, weight, targets, statistics=True, **options)
    z = distribution(hidden, weight, **options).detach()
    assert torch.allclose(found.entropy, torch.distributions.Categorical(logits=z).entropy())
    assert torch.allclose(found.mean_logits, z.mean(-1), atol=1e-6)
    assert torch.equal(found.is_top1, z.argmax(-1) == targets) and not found.is_top1[0]
    assert found.log_probs.requires_grad and not any(x.requires_grad for x in found[1:])


def test_it_gives_what_trls_function_gives(backend):
    trl = pytest.importorskip("trl.kernels.chunked_logprob")
    hidden, weight, targets = make(6, 16, 70)
    theirs = trl.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 0.8, 32, 5.0, 1.2)
    options = {"temperature": 0.8, "softcap": 5.0, "logit_scale": 1.2, "ignore_index": None}
    ours = linear_log_probabilities(hidden, weight, targets, statistics=True, **options)
    for got, expected in zip(ours, (theirs[0], theirs[1], theirs[3], theirs[4]), strict=True):
        torch.testing.assert_close(got, expected, check_dtype=False)
    upstream = torch.randn(6)
    pairs = [torch.autograd.grad(x[0], (hidden, weight), upstream) for x in (ours, theirs)]
    for got, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected)


def test_vocabularies_wider_than_a_block_and_far_maxima(triton_backend):
    hidden, weight, targets = make(3, 4, 8300)
    targets[0], targets[1] = 8299, 8192
    hidden = (hidden.detach() * 1e3).requires_grad_()
    assert_no_worse_than_torch(
        lambda h, w: linear_log_probabilities(h, w, targets).log_probs,
        lambda h, w: plain(h, w, targets),
        [hidden, weight],
    )


def test_a_masked_word_is_no_nan(backend):
    weight = torch.ones(20, 4)
    weight[:3] = float("-inf")
    found = linear_log_probabilities(
        torch.ones(2, 4), weight, torch.tensor([5, 19]), statistics=True
    )
    assert torch.allclose(found.log_probs, torch.tensor(-math.log(17.0)))
    assert torch.allclose(found.entropy, torch.tensor(math.log(17.0)))


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    for trained in (False, True):
        hidden, weight, targets = (
            inside_poison(x) for x in make(5, 8, 37, torch.bfloat16, trained)
        )
        wanted = (hidden, weight)[: 1 + trained]
        with poisoned_allocations():
            found = linear_log_probabilities(hidden, weight, targets, chunk_bytes=256)
            gradients = torch.autograd.grad(found.log_probs.sum(), wanted)
            assert all(x.isfinite().all() for x in (found.log_probs, *gradients))


def saved_by(call):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, id):
        call()
    return saved


def test_what_is_kept(backend):
    """A frozen head keeps the rows' gradients and makes no logits again; a trained one keeps its
    inputs; a reference nothing."""
    hidden, weight, targets = make(4, 8, 20)
    assert saved_by(lambda: linear_log_probabilities(hidden, weight.detach(), targets)) == [(4, 8)]
    kept = saved_by(lambda: linear_log_probabilities(hidden, weight, targets))
    assert kept == [(4, 8), (20, 8), (4,)]
    with torch.no_grad():
        assert not linear_log_probabilities(hidden, weight, targets).log_probs.requires_grad
    every = linear_log_probabilities(hidden, weight, torch.full((4,), -100)).log_probs
    assert not every.any() and not any(x.any() for x in torch.autograd.grad(every.sum(), (hidden,)))


@pytest.mark.parametrize("trained", [False, True])
def test_gradcheck(trained):
    hidden, weight, targets = make(4, 3, 6, torch.float64, trained, ignored=1)
    options = {"chunk_bytes": 100, "softcap": 2.0, "temperature": 0.5}
    assert gradcheck(
        lambda h, w: linear_log_probabilities(h, w, targets, **options).log_probs, (hidden, weight)
    )


def test_bad_input_is_refused_in_one_line():
    hidden, weight, targets = make(4, 8, 20)
    bad = [
        (lambda: linear_log_probabilities(hidden, weight, targets, temperature=0.0), "temperature"),
        (lambda: linear_log_probabilities(hidden, weight, targets, softcap=-1.0), "softcap -1.0"),
        (lambda: linear_log_probabilities(hidden, weight, targets, ignore_index=0.5), "0.5"),
        (lambda: linear_log_probabilities(hidden, weight, targets, chunk_bytes=0), "chunk_bytes 0"),
        (lambda: linear_log_probabilities(hidden, weight[:, :4], targets), r"\(20, 4\)"),
        (lambda: linear_log_probabilities(hidden, weight, torch.full((4,), 20)), "target 20"),
    ]
    for call, named in bad:
        with pytest.raises(KernelInputError, match=named) as error:
            call()
        assert "\n" not in str(error.value)
