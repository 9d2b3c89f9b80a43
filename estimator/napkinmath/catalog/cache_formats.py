"""Formats in which keys and values are cached, one row each. States of scans and convolutions keep
their own types in all of them."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.expr import Size, ceil_div, minimum, product
from napkinmath.base.record import Record
from napkinmath.ir.cache import Cached, Grows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType

_VLLM = "vllm 0.11 v1/kv_cache_interface.py AttentionSpec.page_size_bytes, KVQuantMode"
_QUANTO = "transformers 5.23 cache_utils.py QuantizedLayer, QuantoQuantizedLayer"


class CacheFormat(Record):
    """A format of keys and values; `bits` of 0 stores them in the type of what generates."""

    name: str
    meaning: str
    source: str
    bits: int = 0
    head_bytes: int = 0
    """Of the scale of one token's head."""
    group: int = 0
    """Numbers that share scales; 0 is none."""
    group_bits: int = 0
    """Of those scales."""
    recent: int = 0
    """Newest tokens that stay whole at most."""

    def nbytes(self, item: Cached, rows: Size, dtype: DType, *, paged: bool = False) -> Size:
        """Bytes of `rows` rows of one sequence's tensor; `dtype` is that of what generates."""
        elements = rows * item.row_elements(paged=paged)
        if item.grows is Grows.NOT or item.dtype is not None or not self.bits:
            return ceil_div(elements * (item.dtype or dtype).bits, 8)
        whole: Size = 0
        if self.recent:
            kept = minimum(rows, self.recent)
            whole = ceil_div(kept * item.row_elements(paged=paged) * dtype.bits, 8)
            elements = (rows - kept) * item.row_elements(paged=paged)
        axes = item.paged if paged and item.paged is not None else item.axes
        scales = rows * product(axes[:-1]) * self.head_bytes
        if self.group:
            scales = scales + ceil_div(ceil_div(elements, self.group) * self.group_bits, 8)
        return whole + ceil_div(elements * self.bits, 8) + scales


AUTO = CacheFormat(name="auto", meaning="the type of what generates", source=_VLLM)
FORMATS: dict[str, CacheFormat] = {
    row.name: row
    for row in (
        AUTO,
        CacheFormat(name="bf16", meaning="16 bits", source=_VLLM, bits=16),
        CacheFormat(name="fp16", meaning="16 bits", source=_VLLM, bits=16),
        CacheFormat(name="fp8", meaning="8 bits, one scale a tensor", source=_VLLM, bits=8),
        CacheFormat(
            name="fp8-token-head",
            meaning="8 bits, an fp32 scale for each token's head",
            source=_VLLM,
            bits=8,
            head_bytes=4,
        ),
        CacheFormat(
            name="int8-token-head",
            meaning="8 bits, an fp32 scale for each token's head",
            source=_VLLM,
            bits=8,
            head_bytes=4,
        ),
        CacheFormat(
            name="nvfp4",
            meaning="4 bits, an fp8 scale for 16 numbers",
            source=_VLLM,
            bits=4,
            group=16,
            group_bits=8,
        ),
        CacheFormat(
            name="quanto-int4",
            meaning="4 bits, scale and shift for 64 numbers, the newest 128 tokens whole",
            source=_QUANTO,
            bits=4,
            group=64,
            group_bits=32,
            recent=127,
        ),
        CacheFormat(
            name="quanto-int2",
            meaning="2 bits, scale and shift for 64 numbers, the newest 128 tokens whole",
            source=_QUANTO,
            bits=2,
            group=64,
            group_bits=32,
            recent=127,
        ),
    )
}


def find_cache_format(name: str) -> CacheFormat:
    """The row of a format; raises InputError for one that is not there."""
    row = FORMATS.get(name)
    if row is None:
        raise InputError(
            f"cache format {shown(name)} is unknown{suggest(name, list(FORMATS))}; use one of"
            f" {', '.join(FORMATS)}"
        )
    return row
