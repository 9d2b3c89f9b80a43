"""The additive mask that the efficient kernel reads, as torch pads it
(aten/src/ATen/native/transformers/attention.cpp preprocess_mask: 8 values, by strides)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from napkinmath_profiler.tracing.attention_choice import _aligned_mask  # noqa: E402

BATCH, HEADS = 2, 3


def padded_bytes(mask: torch.Tensor, queries: int, keys: int) -> int:
    """Bytes of the copy that is made of a mask; 0 where the kernel reads it as it is."""
    query = torch.empty(BATCH, HEADS, queries, 16, device="meta")
    key = torch.empty(BATCH, HEADS, keys, 16, device="meta")
    taken = _aligned_mask(mask, query, key)
    assert taken.shape == (BATCH, HEADS, queries, keys)
    assert taken.stride(-1) == 1
    storage = taken.untyped_storage()
    return 0 if storage._cdata == mask.untyped_storage()._cdata else storage.nbytes()


@pytest.mark.parametrize("length", range(960, 1025))
def test_rows_of_a_mask_start_on_eight_values(length: int) -> None:
    mask = torch.empty(BATCH, 1, length, length, dtype=torch.bfloat16, device="meta")
    row = -(-length // 8) * 8
    copied = BATCH * length * row * 2 if length % 8 else 0
    assert padded_bytes(mask, length, length) == copied


@pytest.mark.parametrize("length", [1000, 1001, 1004, 1016])
def test_an_expanded_row_has_no_stride_to_align(length: int) -> None:
    """ALiBi's and padding's masks of one row a sequence: expanded axes have stride 0."""
    mask = torch.empty(BATCH, 1, 1, length, dtype=torch.float16, device="meta")
    expanded = mask.expand(BATCH, 1, 64, length)
    row = -(-length // 8) * 8
    copied = BATCH * 64 * row * 2 if length % 8 else 0
    assert padded_bytes(expanded, 64, length) == copied


def test_an_aligned_length_with_rows_out_of_step_is_copied_wider() -> None:
    """A slice of a longer mask: the length is a multiple of 8, its rows do not start on one."""
    mask = torch.empty(BATCH, 1, 64, 100, dtype=torch.bfloat16, device="meta")[..., :96]
    assert padded_bytes(mask, 64, 96) == BATCH * 64 * 104 * 2


def test_a_mask_whose_values_are_apart_is_copied() -> None:
    mask = torch.empty(BATCH, 1, 64, 64, dtype=torch.bfloat16, device="meta").transpose(2, 3)
    assert padded_bytes(mask, 64, 64) == BATCH * 64 * 72 * 2
