"""Attention over q, k and v as configured: which kernel runs, and what its gradients look like."""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Size
from napkinmath.config.train_config import Attention
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import dh
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.masks import mask_name
from napkinmath.ops.attention import pads_heads, sdpa, takes_groups
from napkinmath.ops.whole_scores import eager_attention


def repeats_keys(t: Tape, flash_before: tuple[int, int], eager_only: bool) -> bool:
    """Whether this version repeats keys and values per query head before a fused kernel.

    SDPA got `enable_gqa` with transformers 4.54; FlashAttention takes grouped heads as they are,
    but some families repeated them until 4.48 all the same (models/mistral/modeling_mistral.py
    MistralFlashAttention2 of 4.45).
    """
    if runs_eager(t, eager_only):
        return False
    if t.policy.stack.attention.repeats_keys:
        return True
    flash = t.policy.config.attention.needs_no_mask
    return t.policy.stack.model.transformers < (flash_before if flash else (4, 54))


def runs_eager(t: Tape, eager_only: bool) -> bool:
    """Whether transformers' own chain of operations runs instead of SDPA."""
    return eager_only or t.policy.config.attention is Attention.EAGER


def dense_gradients(
    t: Tape,
    dtype: DType,
    shared: dict[str, Value],
    *,
    grouped: bool,
    window: int = 0,
    eager_only: bool = False,
    size: Size = dh,
) -> bool:
    """Whether attention returns gradients with the heads outside the rows, as matmul does and the
    fused kernels do not. `size` is that of a head."""
    if runs_eager(t, eager_only):
        return True
    masked = shared.get(mask_name(window)) is not None
    kept = grouped and takes_groups(t, size, masked=masked)
    kernel = t.policy.sdpa_kernel(
        t.policy.attended_dtype(dtype), head_size=t.known(size), masked=masked, grouped=kept
    )
    return kernel == "math" or pads_heads(t, kernel, size) or (grouped and not kept)


def attend(
    t: Tape,
    q: Value,
    key: Value,
    value: Value,
    shared: dict[str, Value],
    *,
    groups: Size,
    window: int = 0,
    dropout_p: float = 0.0,
    capped: bool = False,
    eager_only: bool = False,
    contiguous: bool = False,
    wide_softmax: bool = True,
) -> Value:
    """Attention as configured, over q, k, v of axes (b, heads, s, dh); returns (b, s, heads,
    dh)."""
    mask = shared.get(mask_name(window)) or shared.get("mask")
    if runs_eager(t, eager_only):
        return eager_attention(
            t,
            q,
            key,
            value,
            groups=groups,
            mask=mask,
            dropout_p=dropout_p,
            capped=capped,
            contiguous=contiguous,
            fp32_softmax=wide_softmax,
        )
    return sdpa(
        t,
        q,
        key,
        value,
        groups=groups,
        mask=mask,
        window=window or None,
        dropout_p=dropout_p,
        contiguous=contiguous,
    )
