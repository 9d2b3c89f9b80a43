"""Dropout by seed: kernel and reference agree bit for bit, Philox is the published one, rates are
right, memory is respected."""

from __future__ import annotations

import pytest
import torch
from kernel_numerics import inside_poison, poisoned_allocations
from napkinmath_kernels.backend import Backend, use_backend
from napkinmath_kernels.ops.dropout import STRIP, add_dropped, drop, keep_mask, new_seed, philox

SEED = torch.tensor([123456789012345], dtype=torch.int64)


def test_philox_gives_the_published_numbers():
    """Known-answer test of Random123 (kat_vectors): counter and key zero."""
    zero = philox(0, torch.zeros(1, dtype=torch.int64))
    assert [int(x) for x in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("numel", [1, 1023, 4 * STRIP, 4 * STRIP + 1, 10_000])
@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_kernel_and_reference_drop_the_same_values(numel, probability):
    x = torch.randn(numel)
    with use_backend(Backend.TRITON):
        kernel = drop(x, SEED, 2, probability)
    with use_backend(Backend.REFERENCE):
        reference = drop(x, SEED, 2, probability)
    torch.testing.assert_close(kernel, reference)
    assert torch.equal(kernel != 0, keep_mask(numel, SEED, 2, probability) & (x != 0))


def test_streams_and_seeds_differ_and_the_rate_is_right():
    first, second = (keep_mask(40_000, SEED, stream, 0.1) for stream in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, keep_mask(40_000, SEED + 1000, 0, 0.1))
    deviation = 5 * (0.1 * 0.9 / 40_000) ** 0.5  # five standard deviations of a binomial share
    assert abs(first.float().mean().item() - 0.9) < deviation
    both = (first & second).float().mean().item()
    assert abs(both - 0.81) < 5 * (0.81 * 0.19 / 40_000) ** 0.5


def test_adding_is_the_backward_of_dropping(backend):
    upstream, base = torch.randn(5000), torch.randn(5000)
    out = base.clone()
    add_dropped(out, upstream, SEED, 0, 0.25)
    torch.testing.assert_close(out, base + keep_mask(5000, SEED, 0, 0.25) * upstream / 0.75)


def test_nothing_outside_the_tensors_is_read_or_written(triton_backend):
    x = inside_poison(torch.randn(5, 211, dtype=torch.bfloat16))
    with poisoned_allocations():
        assert drop(x, inside_poison(SEED), 0, 0.3).isfinite().all()


def test_the_seed_follows_the_generator():
    torch.manual_seed(3)
    first = new_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(first, new_seed(torch.device("cpu")))
