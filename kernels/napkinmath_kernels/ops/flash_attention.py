"""FlashAttention: o = softmax(scale q k^T) v without the scores, with its log-sum-exp, forward and
backward, deterministic.

Query i of S stands at position i + T - S among T keys. `causal` shows it the keys up to there;
`window` w those less than w positions away. Grouped heads are read where they lie: query head h
uses K/V head h // (query heads / K/V heads). `cu_seqlens` packs sequences of different lengths
along the token dimension, without padding. Saved for the backward: q, k, v, o and the log-sum-exp
(batch x heads x S, fp32). Temporaries of the backward: delta (as the log-sum-exp). FLOPs: forward 4
S T d a, backward 10 S T d a (recomputing the scores twice: 14), halved when causal. See `costs`.
Sources: Dao 2023 (arXiv 2307.08691).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import acts_as_gpu, runs_triton
from ..errors import KernelInputError
from ..layouts import empty_token_major, to_token_major

FALLBACK = 'torch.nn.functional.scaled_dot_product_attention (patch(..., attention="sdpa"))'
HEAD_SIZES = (64, 96, 128, 256)
GPU_DTYPES = (torch.bfloat16, torch.float16)


def _compute(x: torch.Tensor) -> torch.Tensor:
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


def _reference_scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, window: int
) -> torch.Tensor:
    """Scores (batch, K/V heads, group, queries, keys) in fp32, -inf where a key is not seen."""
    batch, heads, queries, size = q.shape
    grouped = _compute(q).reshape(batch, k.shape[1], heads // k.shape[1], queries, size)
    scores = torch.einsum("bkgqd,bktd->bkgqt", grouped, _compute(k)) * scale
    visible = visible_keys(queries, k.shape[2], causal, window, q.device)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, log-sum-exp) in plain torch; q (batch, heads, queries, size), k and v with their own
    heads and tokens."""
    scores = _reference_scores(q, k, scale, causal, window)
    lse = (
        torch.logsumexp(scores, -1)
        if k.shape[2]
        else scores.new_full(scores.shape[:-1], float("-inf"))
    )
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    o = torch.einsum("bkgqt,bktd->bkgqd", weights, _compute(v))
    return to_token_major(o, q), lse.reshape(q.shape[:3])


def reference_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) by the formulas of the kernels."""
    scores = _reference_scores(q, k, scale, causal, window)
    grouped, size = scores.shape[:4], q.shape[3]
    lse = lse.reshape(grouped)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    do_wide = _compute(do).reshape(*grouped, size)
    delta = (_compute(o).reshape(*grouped, size) * do_wide).sum(-1)
    if dlse is not None:
        delta = delta - dlse.reshape(grouped)
    dscores = (
        weights
        * (torch.einsum("bkgqd,bktd->bkgqt", do_wide, _compute(v)) - delta[..., None])
        * scale
    )
    dq = torch.einsum("bkgqt,bktd->bkgqd", dscores, _compute(k))
    dk = torch.einsum("bkgqt,bkgqd->bktd", dscores, _compute(q).reshape(*grouped, size))
    dv = torch.einsum("bkgqt,bkgqd->bktd", weights, do_wide)
    return to_token_major(dq, q), to_token_major(dk, k), to_token_major(dv, v)


def _sequences(cu: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cu.tolist()))


def _packed_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference over packed sequences: q (1, heads, total, size)."""
    o, lse = (
        empty_token_major(q).zero_(),
        q.new_full(q.shape[:3], float("-inf"), dtype=_compute(q[:0]).dtype),
    )
    for (q0, q1), (k0, k1) in zip(_sequences(cu_q), _sequences(cu_k), strict=True):
        o[:, :, q0:q1], lse[:, :, q0:q1] = reference_forward(
            q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], *options
        )
    return o, lse


def _packed_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rest: tuple[Any, ...],
    cu_q: Any,
    cu_k: Any,
    *options: Any,
) -> Any:
    o, lse, do, dlse = rest
    dq, dk, dv = (empty_token_major(x).zero_() for x in (q, k, v))
    for (q0, q1), (k0, k1) in zip(_sequences(cu_q), _sequences(cu_k), strict=True):
        rows, columns = (
            (slice(None), slice(None), slice(q0, q1)),
            (slice(None), slice(None), slice(k0, k1)),
        )
        part_dlse = None if dlse is None else dlse[rows]
        found = reference_backward(
            q[rows], k[columns], v[columns], o[rows], lse[rows], do[rows], part_dlse, *options
        )
        dq[rows], dk[columns], dv[columns] = found
    return dq, dk, dv


@torch.library.custom_op("napkinmath::flash_attention", mutates_args=())
def _flash_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if runs_triton("flash_attention", q):
        from ..triton_kernels.flash_attention_launch import flash_forward

        return flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window)
    if cu_q is None or cu_k is None:
        return reference_forward(q, k, v, scale, causal, window)
    return _packed_forward(q, k, v, cu_q, cu_k, scale, causal, window)


@_flash_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_token_major(q), q.new_empty(
        q.shape[:3], dtype=torch.float64 if q.dtype is torch.float64 else torch.float32
    )


@torch.library.custom_op("napkinmath::flash_attention_backward", mutates_args=())
def _flash_backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if runs_triton("flash_attention", q):
        from ..triton_kernels.flash_attention_launch import flash_backward

        return flash_backward(
            q, k, v, o, lse, do, dlse, cu_q, cu_k, max_q, max_k, scale, causal, window
        )
    if cu_q is None or cu_k is None:
        return reference_backward(q, k, v, o, lse, do, dlse, scale, causal, window)
    return _packed_backward(q, k, v, (o, lse, do, dlse), cu_q, cu_k, scale, causal, window)


@_flash_backward_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_token_major(q), empty_token_major(k), empty_token_major(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    ctx.is_packed = cu_q is not None
    ctx.save_for_backward(q, k, v, *output, *((cu_q, cu_k) if ctx.is_packed else ()))
    ctx.set_materialize_grads(False)


def _autograd(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if do is None and dlse is None:
        return (None,) * 10
    checks.refuse_second_derivative("flash_attention", FALLBACK)
    q, k, v, o, lse, *cu = ctx.saved_tensors
    cu_q, cu_k = cu if ctx.is_packed else (None, None)
    do = torch.zeros_like(o) if do is None else do
    return (*_flash_backward_op(q, k, v, o, lse, do, dlse, cu_q, cu_k, *ctx.options), *(None,) * 7)


_flash_op.register_autograd(_autograd, setup_context=_setup)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float | None
) -> None:
    op = "flash_attention"
    runs_on_gpu = runs_triton(op, q) and acts_as_gpu(q)
    dtypes = GPU_DTYPES if runs_on_gpu else checks.KERNEL_DTYPES
    checks.require_dtype(op, "q", q, FALLBACK, dtypes)
    for name, x in (("k", k), ("v", v)):
        checks.require_dtype(op, name, x, FALLBACK, (q.dtype,))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    fits = (
        q.dim() == 4
        and k.shape == v.shape
        and k.dim() == 4
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
    )
    checks.require(
        fits,
        op,
        shapes,
        "(batch, heads, tokens, size) with equal batch and size, k and v alike",
        FALLBACK,
    )
    grouped = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    checks.require(
        grouped,
        op,
        f"{q.shape[1]} query heads and {k.shape[1]} K/V heads",
        "a multiple of the K/V heads",
        FALLBACK,
    )
    sizes = ", ".join(map(str, HEAD_SIZES))
    takes_size = q.shape[3] in HEAD_SIZES if runs_triton(op, q) else q.shape[3] > 0
    checks.require(takes_size, op, f"head size {q.shape[3]}", sizes, FALLBACK)
    is_window = window is None or (checks.is_whole(window) and window > 0)
    checks.require(
        is_window, op, f"window {window!r}", "None or a positive number of keys", FALLBACK
    )
    is_scale = scale is None or checks.is_number(scale)
    checks.require(is_scale, op, f"scale {scale!r}", "None or a finite number", FALLBACK)
    checks.require_same_device(op, FALLBACK, q=q, k=k, v=v)


def _check_packing(
    q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> None:
    op = "flash_attention"
    checks.require_tensors(op, FALLBACK, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        fits = cu.dtype is torch.int32 and cu.dim() == 1 and cu.numel() > 1
        checks.require(
            fits,
            op,
            f"{name} {cu.dtype} of shape {tuple(cu.shape)}",
            "int32 of shape (sequences + 1,)",
            FALLBACK,
        )
    lengths = f"{cu_q.numel()} and {cu_k.numel()} bounds"
    checks.require(cu_q.numel() == cu_k.numel(), op, lengths, "equally many", FALLBACK)
    checks.require(
        q.shape[0] == 1, op, f"packed sequences in a batch of {q.shape[0]}", "batch 1", FALLBACK
    )
    checks.require_same_device(op, FALLBACK, q=q, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def _longest(name: str, cu: torch.Tensor, tokens: int, given: int | None) -> int:
    """Tokens of the longest sequence: `given`, which is believed where looking would wait for a
    GPU, or read off the checked bounds."""
    op = "flash_attention"
    is_length = given is None or (checks.is_whole(given) and given >= 0)
    checks.require(
        is_length, op, f"max_seqlen of {name} {given!r}", "None or a number of tokens", FALLBACK
    )
    if cu.is_meta and given is None:
        raise KernelInputError(
            op, f"{name} without values", "max_seqlen_q and max_seqlen_k beside them", FALLBACK
        )
    if given is not None and cu.device.type != "cpu":
        return given
    lengths = cu.diff()
    first, last, shortest, longest = torch.stack(
        (cu[0], cu[-1], lengths.min(), lengths.max())
    ).tolist()
    rises = first == 0 and last == tokens and shortest >= 0
    shown = cu[:8].tolist() if not rises else []
    checks.require(
        rises,
        op,
        f"{name} {shown}{' ...' if cu.numel() > 8 else ''} up to {last}",
        f"rising from 0 to {tokens}",
        FALLBACK,
    )
    checks.require(
        given is None or given >= longest,
        op,
        f"max_seqlen {given} of {name}",
        f"{longest} or more",
        "None: it is looked up",
    )
    return longest if given is None else given


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v, shaped and typed as q (autocast's type where it is on); with
    `return_lse` also the log-sum-exp (batch, heads, queries) in fp32.

    q (batch, heads, queries, size); k, v (batch, K/V heads, keys, size); bf16 or fp16 on a GPU,
    size 64, 96, 128 or 256; scale 1/sqrt(size) by default. A query that sees no key gives zeros and
    -inf. With `cu_seqlens_q` and `cu_seqlens_k`, (sequences + 1) int32, the batch is 1 and tokens
    are packed; `max_seqlen_*` spare a synchronisation with a GPU, and are believed there. Raises
    KernelInputError.
    """
    checks.require_tensors("flash_attention", FALLBACK, q=q, k=k, v=v)
    q, k, v = (to_autocast_dtype(x) for x in (q, k, v))
    _check(q, k, v, window, scale)
    max_q, max_k = q.shape[2], k.shape[2]
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise KernelInputError(
                "flash_attention",
                "one of cu_seqlens_q and cu_seqlens_k",
                "both or neither",
                FALLBACK,
            )
        _check_packing(q, k, cu_seqlens_q, cu_seqlens_k)
        max_q = _longest("cu_seqlens_q", cu_seqlens_q, q.shape[2], max_seqlen_q)
        max_k = _longest("cu_seqlens_k", cu_seqlens_k, k.shape[2], max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        raise KernelInputError(
            "flash_attention", "max_seqlen without cu_seqlens", "both or neither", FALLBACK
        )
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    o, lse = _flash_op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, causal, window or 0
    )
    return (o, lse) if return_lse else o


class FlashAttention(torch.nn.Module):
    """`flash_attention` with its options fixed."""

    def __init__(
        self, *, causal: bool = True, scale: float | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.causal, self.scale, self.window = causal, scale, window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `flash_attention`."""
        o = flash_attention(q, k, v, causal=self.causal, scale=self.scale, window=self.window)
        assert isinstance(o, torch.Tensor)
        return o
