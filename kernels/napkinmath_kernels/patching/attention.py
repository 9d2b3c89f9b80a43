"""`flash_attention` as an attention implementation of transformers, registered under the name
"napkinmath" when a model asks for it."""

from __future__ import annotations

from typing import Any

import torch

from ..autocast import to_autocast_dtype
from ..backend import acts_as_gpu
from ..ops.flash_attention import FALLBACK, HEAD_SIZES, flash_attention, visible_keys

NAME = "napkinmath"


def _fits(
    query: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    softcap: float | None,
    arguments: dict[str, Any],
) -> bool:
    on_gpu = acts_as_gpu(query)
    takes = (
        query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] in HEAD_SIZES
        if on_gpu
        else query.dtype.is_floating_point
    )
    plain = (
        mask is None
        and dropout == 0.0
        and softcap is None
        and arguments.get("position_bias") is None
        and arguments.get("s_aux") is None
    )
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
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (batch, tokens, heads, size) and no weights.

    Padding masks, dropout and head sizes that the kernel does not take go to SDPA with an explicit
    mask; soft-capping, which SDPA cannot do, is refused.
    """
    query, key, value = (
        to_autocast_dtype(x) for x in (query, key, value)
    )  # a norm of queries with an fp32 weight makes them fp32
    causal = (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ) and query.shape[2] > 1
    window = sliding_window or 0
    if softcap is not None:
        raise ValueError(
            f"attention soft-capping (softcap={softcap}) is not computed here; use"
            " attn_implementation='eager'"
        )
    if _fits(query, attention_mask, dropout, softcap, arguments):
        packed: dict[str, Any] = {}
        if arguments.get("cu_seq_lens_q") is not None and query.shape[0] == 1:
            packed = {
                "cu_seqlens_q": arguments["cu_seq_lens_q"].to(torch.int32),
                "cu_seqlens_k": arguments["cu_seq_lens_k"].to(torch.int32),
                "max_seqlen_q": _length(arguments.get("max_length_q")),
                "max_seqlen_k": _length(arguments.get("max_length_k")),
            }
        o = flash_attention(
            query, key, value, causal=causal, scale=scaling, window=sliding_window, **packed
        )
        assert isinstance(o, torch.Tensor)
    else:
        mask = _bool_mask(query, key, attention_mask, causal, window)
        key, value = (_for_every_query_head(x, query.shape[1]) for x in (key, value))
        o = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
    return o.transpose(1, 2), None


def register() -> None:
    """Makes "napkinmath" an attention implementation; repeated calls do nothing new."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def refusal(config: Any) -> str:
    """Why this model's attention cannot be ours, or an empty string."""
    if getattr(config, "attn_logit_softcapping", None):
        return (
            f"attn_logit_softcapping={config.attn_logit_softcapping} is not computed; {FALLBACK}"
            " does not either: stays eager"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in HEAD_SIZES and torch.cuda.is_available():
        return f"head size {size} is not one of {', '.join(map(str, HEAD_SIZES))}"
    return ""
