"""The masks that a decoder makes once and every layer reads."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, INT64, DType
from napkinmath.base.expr import Size
from napkinmath.config.train_config import AdapterKind, Attention
from napkinmath.ir.ledger import Value
from napkinmath.ir.symbols import b, s
from napkinmath.ir.tape import Tape
from napkinmath.ops.index import constant


def mask_name(window: int) -> str:
    """Key of a shared mask: the causal one, or that of a sliding window."""
    return f"mask of window {window}" if window else "mask"


def needs_eager_masks(t: Tape) -> bool:
    """Whether attention adds whole masks to its scores, or (a package's flash) reads none at all:
    in neither case does SDPA ask for one where images are seen whole."""
    return t.policy.config.attention in (Attention.EAGER, Attention.FLASH2)


def causal_masks(
    t: Tape,
    shared: dict[str, Value],
    dtype: DType,
    *,
    full: bool = True,
    windows: tuple[int, ...] = (),
    eager_only: bool = False,
    chunked: bool = False,
) -> None:
    """Publishes the masks of full and sliding layers: additive ones for eager attention, a bool one
    where SDPA cannot do without. `chunked`: the windows are chunks, counted for each sequence from
    its own padding (chunked_overlay), so that SDPA's mask has as many rows as the batch.

    SDPA takes causality as a flag; a window needs a mask as soon as the sequence is as long as the
    window. The flash-attn package takes both as arguments. Source: transformers 5.23
    masking_utils.py eager_mask, sdpa_mask, _ignore_causal_mask_sdpa.
    """
    eager = eager_only or t.policy.config.attention is Attention.EAGER
    keys = s + t.policy.virtual_tokens(AdapterKind.PREFIX)
    for window in (*((0,) if full else ()), *windows):
        if eager:
            visible = visible_positions(t, window, keys)
            shared[mask_name(window)] = constant(t, "attention mask", (b, 1, s, keys), dtype)
            t.touch(visible.tensor)
        elif (
            keys is not s and not t.policy.config.attention.needs_no_mask
        ):  # causality as a flag is for square scores
            shared[mask_name(window)] = Value(
                visible_positions(t, window, keys).tensor, (b, 1, s, keys), BOOL
            )
        elif t.policy.masks_packed:
            ends = constant(t, "sequence of each token", (b, s), INT64)
            allowed = constant(t, "same sequence", (b, 1, s, s), BOOL)
            shared[mask_name(window)] = constant(t, "mask of packed sequences", (b, 1, s, s), BOOL)
            t.touch(ends.tensor, allowed.tensor)
        elif window and not t.policy.config.attention.needs_no_mask and t.at_least("s", window):
            shared[mask_name(window)] = _of_window(t, window, chunked=chunked)


def _of_window(t: Tape, window: int, *, chunked: bool) -> Value:
    whole = (b, 1, s, s)
    if not chunked:
        return Value(visible_positions(t, window).tensor, whole, BOOL)
    same, causal = (constant(t, name, whole, BOOL) for name in ("same chunk", "and before"))
    found = constant(t, "visible", whole, BOOL)
    t.touch(same.tensor, causal.tensor)
    return found


def visible_positions(t: Tape, window: int, keys: Size = s) -> Value:
    """Which key each query sees, as bools of s², with the comparisons that make it up."""
    with t.scope() as frame:
        if not window:
            return constant(t, "visible", (s, keys), BOOL)
        lower = constant(t, "query minus window", (s,), INT64)
        inside = constant(t, "inside the window", (s, keys), BOOL)
        t.touch(lower.tensor)
        causal = constant(t, "not after the query", (s, keys), BOOL)
        frame.local(inside, causal)
        return constant(t, "visible", (s, keys), BOOL)
