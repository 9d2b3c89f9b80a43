"""`flash_attention` in plain torch: the oracle of its kernels, and what runs without a GPU."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ..layouts import empty_token_major, to_token_major
from .dropout import philox, threshold_of


class FlashCall(NamedTuple):
    """What a call has beside q, k and v. Of `window`, `softcap` and `dropout` zero is none;
    `sinks` is one score a query head, `seed` is there where `dropout` is."""

    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    max_q: int
    max_k: int
    scale: float
    causal: bool
    window: int
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: torch.Tensor | None = None
    seed: torch.Tensor | None = None

    @property
    def burden(self) -> int:
        """How much the kernels hold beside lengths, which asks for smaller tiles: 1 with windows or
        packing, 2 with caps or dropout."""
        if self.softcap or self.dropout:
            return 2
        return int(self.window > 0 or self.cu_q is not None)


class Scores(NamedTuple):
    """Scores (batch, K/V heads, group, queries, keys), -inf where a key is not seen; by how much
    the cap lets a gradient through, and by what dropout multiplies each weight, or None."""

    values: torch.Tensor
    slope: torch.Tensor | None
    kept: torch.Tensor | None


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in the type that sums are made in: fp32, or fp64 if it is that."""
    return x if x.dtype is torch.float64 else x.float()


def visible_keys(
    queries: int, keys: int, causal: bool, window: int, device: torch.device
) -> torch.Tensor | None:
    """Which keys each query sees, (queries, keys) bool, or None if all."""
    if not causal and not window:
        return None
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = position - torch.arange(keys, device=device)[None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window:
        visible &= distance.abs() < window if not causal else distance < window
    return visible


def kept_weights(shape: tuple[int, int, int, int], call: FlashCall, sequence: int) -> torch.Tensor:
    """1 / (1 - dropout) where a weight stays and 0 elsewhere, (batch, heads, queries, keys): Philox
    at (key, query), keyed by the seed and, in its upper half, the number of the head."""
    assert call.seed is not None
    batch, heads, queries, keys = shape
    device = call.seed.device
    number = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    seeds = call.seed + ((number + sequence * heads) << 32)
    row = torch.arange(queries, device=device).view(1, 1, queries, 1)
    key = torch.arange(keys, device=device).view(1, 1, 1, keys)
    random = philox(seeds, *torch.broadcast_tensors(key, row, seeds)[:2])[0]
    return ((random >> 8) >= threshold_of(call.dropout)) / (1.0 - call.dropout)


def _scores(q: torch.Tensor, k: torch.Tensor, call: FlashCall, sequence: int) -> Scores:
    batch, heads, queries, size = q.shape
    grouped = widened(q).reshape(batch, k.shape[1], heads // k.shape[1], queries, size)
    values = torch.einsum("bkgqd,bktd->bkgqt", grouped, widened(k)) * call.scale
    slope = kept = None
    if call.softcap:
        tanh = torch.tanh(values / call.softcap)
        values, slope = call.softcap * tanh, 1 - tanh * tanh
    if call.dropout:
        shape = (batch, heads, queries, k.shape[2])
        kept = kept_weights(shape, call, sequence).to(values.dtype).view(values.shape)
    visible = visible_keys(queries, k.shape[2], call.causal, call.window, q.device)
    if visible is not None:
        values = values.masked_fill(~visible, float("-inf"))
    return Scores(values, slope, kept)


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: FlashCall, sequence: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, log-sum-exp) in plain torch; q (batch, heads, queries, size), k and v with their own
    heads and tokens. `sequence` is the number of a packed sequence."""
    scores, _, kept = _scores(q, k, call, sequence)
    lse = (
        torch.logsumexp(scores, -1)
        if k.shape[2]
        else scores.new_full(scores.shape[:-1], float("-inf"))
    )
    if call.sinks is not None:
        sink = call.sinks.to(lse.dtype).view(1, lse.shape[1], lse.shape[2], 1)
        lse = torch.logaddexp(lse, sink)
    weights = _weights(scores, lse)
    if kept is not None:
        weights = weights * kept
    o = torch.einsum("bkgqt,bktd->bkgqd", weights, widened(v))
    return to_token_major(o, q), lse.reshape(q.shape[:3])


def reference_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    call: FlashCall,
    sequence: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, delta) by the formulas of the kernels."""
    scores, slope, kept = _scores(q, k, call, sequence)
    grouped, size = scores.shape[:4], q.shape[3]
    weights = _weights(scores, lse.reshape(grouped))
    do_wide = widened(do).reshape(*grouped, size)
    delta = (widened(o).reshape(*grouped, size) * do_wide).sum(-1)
    if dlse is not None:
        delta = delta - dlse.reshape(grouped)
    dweights = torch.einsum("bkgqd,bktd->bkgqt", do_wide, widened(v))
    if kept is not None:
        dweights = dweights * kept
    dscores = weights * (dweights - delta[..., None]) * call.scale
    if slope is not None:
        dscores = dscores * slope
    dropped = weights if kept is None else weights * kept
    dq = torch.einsum("bkgqt,bktd->bkgqd", dscores, widened(k))
    dk = torch.einsum("bkgqt,bkgqd->bktd", dscores, widened(q).reshape(*grouped, size))
    dv = torch.einsum("bkgqt,bkgqd->bktd", dropped, do_wide)
    return (
        to_token_major(dq, q),
        to_token_major(dk, k),
        to_token_major(dv, v),
        delta.view(lse.shape),
    )


def _sequences(call: FlashCall) -> list[tuple[slice, slice]]:
    """Queries and keys of each packed sequence."""
    assert call.cu_q is not None and call.cu_k is not None
    bounds = (itertools.pairwise(cu.tolist()) for cu in (call.cu_q, call.cu_k))
    return [(slice(*queries), slice(*keys)) for queries, keys in zip(*bounds, strict=True)]


def packed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: FlashCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference over packed sequences: q (1, heads, total, size)."""
    o = empty_token_major(q).zero_()
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=widened(q[:0]).dtype)
    for number, (rows, columns) in enumerate(_sequences(call)):
        o[:, :, rows], lse[:, :, rows] = reference_forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], call, number
        )
    return o, lse


def packed_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    call: FlashCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference's backward over packed sequences."""
    dq, dk, dv = (empty_token_major(x).zero_() for x in (q, k, v))
    delta = torch.zeros_like(lse)
    for number, (rows, columns) in enumerate(_sequences(call)):
        at_rows = [None if x is None else x[:, :, rows] for x in (q, o, lse, do, dlse)]
        part_q, part_o, part_lse, part_do, part_dlse = at_rows
        assert part_q is not None and part_o is not None
        assert part_lse is not None and part_do is not None
        dq[:, :, rows], dk[:, :, columns], dv[:, :, columns], delta[:, :, rows] = reference_backward(
            part_q, k[:, :, columns], v[:, :, columns], part_o, part_lse, part_do, part_dlse, call, number
        )  # fmt: skip
    return dq, dk, dv, delta
