"""`flash_attention` as an attention implementation of transformers, registered under the names
"napkinmath", and "napkinmath-auto" which picks between it and torch's SDPA shape by shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..autocast import to_autocast_dtype
from ..backend import acts_as_gpu
from ..ops.flash_attention import HEAD_SIZES, flash_attention
from ..ops.flash_attention_reference import visible_keys

NAME = "napkinmath"
AUTO = "napkinmath-auto"


def _fits(query: torch.Tensor, mask: torch.Tensor | None, arguments: dict[str, Any]) -> bool:
    on_gpu = acts_as_gpu(query)
    takes = (
        query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] in HEAD_SIZES
        if on_gpu
        else query.dtype.is_floating_point
    )
    plain = mask is None and arguments.get("position_bias") is None
    return takes and plain and arguments.get("cache") is None


def _bool_mask(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, window: int
) -> torch.Tensor | None:
    """What transformers' flash mask (batch, keys; 1 where a token is real) means as SDPA's mask."""
    visible = visible_keys(query.shape[2], key.shape[2], causal, window, query.device)
    if mask is None or mask.dim() != 2:
        return visible if mask is None else mask
    real = mask[:, None, None, :].bool()
    return real if visible is None else real & visible


def _for_every_query_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """K or V (batch, K/V heads, keys, size) with `heads` heads: under a mask SDPA's kernels but the
    one that holds all scores take no groups."""
    batch, kv_heads, keys, size = x.shape
    if kv_heads == heads:
        return x
    return (
        x[:, :, None]
        .expand(batch, kv_heads, heads // kv_heads, keys, size)
        .reshape(batch, heads, keys, size)
    )


def _length(given: Any) -> int | None:
    """transformers gives a number, or a tensor of one."""
    return given if given is None else int(given)


def _scored_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with all scores in memory, as transformers' eager models have it: caps and sinks
    under a mask of padding, which no kernel here takes."""
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.dropout(weights[..., : key.shape[2]], dropout, True) @ value


def _by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """What the kernel does not take: SDPA with an explicit mask, or all scores where SDPA has no
    such option."""
    allowed = _bool_mask(query, key, mask, causal, window)
    key, value = (_for_every_query_head(x, query.shape[1]) for x in (key, value))
    if softcap is not None or sinks is not None:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return _scored_whole(query, key, value, allowed, dropout, scale, softcap, sinks)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout, scale=scaling
    )


def _packing(query: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    """The bounds of packed sequences as `flash_attention` takes them; nothing without any."""
    if arguments.get("cu_seq_lens_q") is None or query.shape[0] != 1:
        return {}
    return {
        "cu_seqlens_q": arguments["cu_seq_lens_q"].to(torch.int32),
        "cu_seqlens_k": arguments["cu_seq_lens_k"].to(torch.int32),
        "max_seqlen_q": _length(arguments.get("max_length_q")),
        "max_seqlen_k": _length(arguments.get("max_length_k")),
    }


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    *,
    pick: Picker | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (batch, tokens, heads, size) and no weights.

    Soft caps, sinks, dropout, windows and packed sequences are the kernel's; padding masks and
    head sizes that it does not take go to torch. `pick` decides between the two where both can.
    """
    query, key, value = (
        to_autocast_dtype(x) for x in (query, key, value)
    )  # a norm of queries with an fp32 weight makes them fp32
    causal = (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ) and query.shape[2] > 1
    window, sinks = sliding_window or 0, arguments.get("s_aux")
    packed = _packing(query, arguments)

    def by_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = flash_attention(
            q,
            k,
            v,
            causal=causal,
            scale=scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            **packed,
        )
        assert isinstance(o, torch.Tensor)
        return o

    def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _by_torch(q, k, v, attention_mask, dropout, scaling, softcap, sinks, causal, window)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    run = by_kernel if _fits(query, attention_mask, arguments) else by_torch
    if pick is not None and run is by_kernel:
        needs_kernel = bool(
            (window and window < key.shape[2])
            or packed
            or softcap
            or sinks is not None
            or dropout
            or (causal and query.shape[2] != key.shape[2])
        )
        run = pick(query, key, value, by_kernel, None if needs_kernel else plain)
    return run(query, key, value).transpose(1, 2), None


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Picker:
    """Picks the kernel or torch's SDPA for each shape, and remembers what it picked and why.

    SDPA has no kernel for windows, caps, sinks and packed sequences: with a mask it computes every
    score, so there the kernel is picked by cost. For plain causal attention both are timed once,
    forward and backward, on the first step that meets the shape; where nothing can be timed SDPA
    is picked, which on Hopper is cuDNN.
    """

    def __init__(self) -> None:
        self.picked: dict[str, str] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        by_kernel: Attention,
        plain: Attention | None,
    ) -> Attention:
        if torch.compiler.is_compiling():
            return by_kernel if plain is None else plain
        batch, heads, queries, size = query.shape
        shape = f"{batch}x{queries} {heads}/{key.shape[1]} heads of {size}, {key.shape[2]} keys"
        if plain is None:
            self.picked[shape] = "napkinmath: SDPA would compute every score"
            return by_kernel
        if not query.is_cuda:
            self.picked[shape] = "sdpa: no GPU to time on"
            return plain
        return self._timed(shape, (query, key, value), by_kernel, plain)

    def _timed(
        self,
        shape: str,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        by_kernel: Attention,
        plain: Attention,
    ) -> Attention:
        from ..triton_kernels.tile_choice import choose

        def run(name: str) -> None:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in inputs]
                o = (by_kernel if name == "napkinmath" else plain)(*leaves)
                torch.autograd.grad(o, leaves, torch.ones_like(o))

        key = f"attention {str(inputs[0].dtype).removeprefix('torch.')} {shape}"
        name = choose(key, ("sdpa", "napkinmath"), run, inputs[0].device)
        self.picked[shape] = f"{name}: timed"
        return by_kernel if name == "napkinmath" else plain


@dataclass(eq=False)
class AutoForward:
    """`attention_forward` with a picker of its own."""

    picker: Picker

    def __call__(self, *positional: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
        return attention_forward(*positional, pick=self.picker, **arguments)


#: Of the whole process, as transformers' registry is.
PICKER = Picker()


def register() -> None:
    """Makes "napkinmath" and "napkinmath-auto" attention implementations; repeated calls do nothing
    new."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    for name, forward in ((NAME, attention_forward), (AUTO, AutoForward(PICKER))):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, flash_attention_mask)


def refusal(config: Any) -> str:
    """Why this model's attention cannot be ours, or an empty string."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in HEAD_SIZES and torch.cuda.is_available():
        return f"head size {size} is not one of {', '.join(map(str, HEAD_SIZES))}"
    return ""
