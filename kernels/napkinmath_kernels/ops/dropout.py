"""Dropout without a stored mask: the random numbers are a function of a seed and of a value's
place, made again in the backward.

Value n belongs to strip (n // 1024) % 4 of group n // 4096; Philox 4x32-10 keyed by seed + stream,
at counter (n // 4096) * 1024 + n % 1024, gives a number to each of the four strips. A value is kept
when the number's top 24 bits reach p 2^24, and then divided by 1 - p. Saved: the seed (8 bytes).
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

from ..backend import runs_triton

STRIP = 1024
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def new_seed(device: torch.device) -> torch.Tensor:
    """A seed from the device's generator, (1,) int64: torch.utils.checkpoint restores that
    generator, so a recompute sees it again."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def _multiply(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32 bits of constant * x, for x below 2^32 held in int64: the product itself would
    overflow."""
    upper, lower = constant * (x >> 16), constant * (x & 0xFFFF)
    partial = lower + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (partial >> 32), partial & _LOW


def philox(
    seed: int | torch.Tensor, position: torch.Tensor, second: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Four 32-bit random numbers, in int64, for each position (int64, below 2^32), or each pair of
    positions; what Triton's `philox` gives. `seed` may be one for each."""
    nothing = torch.zeros_like(position)
    c0, c1, c2, c3 = position, nothing if second is None else second, nothing, nothing
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high_b, low_b = _multiply(_ROUND_B, c2)
        high_a, low_a = _multiply(_ROUND_A, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def keep_mask(numel: int, seed: torch.Tensor, stream: int, probability: float) -> torch.Tensor:
    """Which of `numel` values stay, bool, on the seed's device."""
    groups = -(-numel // (4 * STRIP))
    position = torch.arange(groups * STRIP, device=seed.device)
    numbers = (
        torch.stack(philox(int(seed.item()) + stream, position))
        .view(4, groups, STRIP)
        .transpose(0, 1)
        .reshape(-1)[:numel]
    )
    return (numbers >> 8) >= threshold_of(probability)


def threshold_of(probability: float) -> int:
    """What a number of 24 bits must reach to stay."""
    return round(probability * 2**24)


def drop(x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float) -> torch.Tensor:
    """dropout(x), in a new contiguous tensor; below the dispatcher."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _write(x, out, seed, stream, probability, add=False)
    return out


def add_dropped(
    out: torch.Tensor, x: torch.Tensor, seed: torch.Tensor, stream: int, probability: float
) -> None:
    """out += dropout(x): the backward of a dropout that fed a branch; below the dispatcher."""
    _write(x.contiguous(), out, seed, stream, probability, add=True)


def _write(
    x: torch.Tensor,
    out: torch.Tensor,
    seed: torch.Tensor,
    stream: int,
    probability: float,
    *,
    add: bool,
) -> None:
    scale = 1.0 / (1.0 - probability)
    if runs_triton("dropout", x):
        from ..triton_kernels.dropout import dropout

        return dropout(x, out, seed, stream, threshold_of(probability), scale, add)
    keep = keep_mask(x.numel(), seed, stream, probability).view(x.shape)
    wide = x if x.dtype is torch.float64 else x.float()
    value = torch.where(keep, wide * scale, torch.zeros((), dtype=wide.dtype, device=x.device))
    out.copy_(value + out if add else value)
    return None
