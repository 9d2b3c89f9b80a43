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

import math
from typing import Any

import torch

from .. import checks
from ..autocast import to_autocast_dtype
from ..backend import acts_as_gpu, runs_triton
from ..errors import KernelInputError
from ..layouts import empty_token_major
from .eager import runs_eagerly
from .flash_attention_reference import (
    FlashCall,
    packed_backward,
    packed_forward,
    reference_backward,
    reference_forward,
)
from .qlora import checked_seed

FALLBACK = 'torch.nn.functional.scaled_dot_product_attention (patch(..., attention="sdpa"))'
HEAD_SIZES = (64, 96, 128, 256)
GPU_DTYPES = (torch.bfloat16, torch.float16)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: FlashCall
) -> tuple[torch.Tensor, torch.Tensor]:
    if runs_triton("flash_attention", q):
        from ..triton_kernels.flash_attention_launch import flash_forward

        return flash_forward(q, k, v, call)
    return (reference_forward if call.cu_q is None else packed_forward)(q, k, v, call)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    call: FlashCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsinks); the last is empty without sinks."""
    if runs_triton("flash_attention", q):
        from ..triton_kernels.flash_attention_launch import flash_backward as run
    else:
        run = reference_backward if call.cu_q is None else packed_backward
    dq, dk, dv, delta = run(q, k, v, o, lse, do, dlse, call)
    return dq, dk, dv, _sinks_gradient(call.sinks, lse, delta)


def _sinks_gradient(
    sinks: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """A sink's share of the weights times what the softmax's gradient subtracts, (heads,); padding
    behind packed sequences has no share."""
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    share = share.mul_(delta).masked_fill_(lse == float("-inf"), 0.0)
    return share.sum((0, 2)).neg_().to(sinks.dtype)


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
    softcap: float = 0.0,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(
        q,
        k,
        v,
        FlashCall(cu_q, cu_k, max_q, max_k, scale, causal, window, softcap, dropout, sinks, seed),
    )


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
    softcap: float = 0.0,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = FlashCall(cu_q, cu_k, max_q, max_k, scale, causal, window, softcap, dropout, sinks, seed)
    return _backward(q, k, v, o, lse, do, dlse, call)


@_flash_backward_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    *call: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sinks = FlashCall(*call).sinks
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return empty_token_major(q), empty_token_major(k), empty_token_major(v), dsinks


def _save(ctx: Any, x: tuple[torch.Tensor, ...], call: FlashCall) -> None:
    """Keeps q, k, v, o, the log-sum-exp, and the tensors among the options."""
    options = call._asdict()
    ctx.tensors = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
    ctx.call = call._replace(**dict.fromkeys(ctx.tensors))
    ctx.save_for_backward(*x, *(options[name] for name in ctx.tensors))
    ctx.set_materialize_grads(False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *call = inputs
    _save(ctx, (q, k, v, *output), FlashCall(*call))


def _gradients(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv, dsinks)."""
    if do is None and dlse is None:
        return (None,) * 4
    checks.refuse_second_derivative("flash_attention", FALLBACK)
    q, k, v, o, lse, *others = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(ctx.tensors, others, strict=True)))
    do = torch.zeros_like(o) if do is None else do
    run = _backward if runs_eagerly((q, do)) else _flash_backward_op
    arguments = (call,) if run is _backward else call
    dq, dk, dv, dsinks = run(q, k, v, o, lse, do, dlse, *arguments)
    return dq, dk, dv, None if call.sinks is None else dsinks


def _autograd(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv, dsinks = _gradients(ctx, do, dlse)
    return dq, dk, dv, *(None,) * 9, dsinks, None


_flash_op.register_autograd(_autograd, setup_context=_setup)


class _Flash(torch.autograd.Function):
    """The op without the dispatcher: the same values, gradients and saved tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        call: FlashCall,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = _forward(q, k, v, call)
        _save(ctx, (q, k, v, o, lse), call)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, *gradients), None


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: FlashCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op, through the dispatcher only where something looks at it."""
    if runs_eagerly((q, k, v)):
        return _Flash.apply(q, k, v, call.sinks, call)
    return _flash_op(q, k, v, *call)


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


def _check_extras(
    q: torch.Tensor, softcap: float | None, dropout: float, sinks: torch.Tensor | None
) -> None:
    op = "flash_attention"
    is_cap = softcap is None or (checks.is_number(softcap) and softcap > 0)
    checks.require(is_cap, op, f"softcap {softcap!r}", "None or a positive number", FALLBACK)
    checks.require(
        checks.is_number(dropout) and 0.0 <= dropout < 1.0,
        op,
        f"dropout {dropout!r}",
        "0 up to, not including, 1",
        FALLBACK,
    )
    if sinks is not None:
        checks.require_tensors(op, FALLBACK, sinks=sinks)
        checks.require_shape(op, "sinks", sinks, (q.shape[1],), FALLBACK)
        checks.require_same_device(op, FALLBACK, q=q, sinks=sinks)


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
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v, shaped and typed as q (autocast's type where it is on); with
    `return_lse` also the log-sum-exp (batch, heads, queries) in fp32.

    q (batch, heads, queries, size); k, v (batch, K/V heads, keys, size); bf16 or fp16 on a GPU,
    size 64, 96, 128 or 256; scale 1/sqrt(size) by default. A query that sees no key gives zeros and
    -inf. With `cu_seqlens_q` and `cu_seqlens_k`, (sequences + 1) int32, the batch is 1 and tokens
    are packed; `max_seqlen_*` spare a synchronisation with a GPU, and are believed there.
    `softcap` c makes c tanh(score / c) of each score; `sinks` (heads,) are scores that take a share
    of the weights and give nothing; `dropout` drops weights by `seed`, (1,) int64, which is drawn
    unless given. Raises KernelInputError.
    """
    checks.require_tensors("flash_attention", FALLBACK, q=q, k=k, v=v)
    q, k, v = (to_autocast_dtype(x) for x in (q, k, v))
    _check(q, k, v, window, scale)
    _check_extras(q, softcap, dropout, sinks)
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
    call = FlashCall(
        cu_seqlens_q,
        cu_seqlens_k,
        max_q,
        max_k,
        scale,
        causal,
        window or 0,
        float(softcap or 0.0),
        float(dropout),
        sinks,
        checked_seed("flash_attention", q, dropout, seed),
    )
    o, lse = _call(q, k, v, call)
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
