"""What generation adds in the middle of training: the key/value cache, one for every sequence and
every beam."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, DType
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.read import read_model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.ir.model_spec import Stage


def kv_cache_bytes(
    model: str | Mapping[str, object] | ModelSpec,
    *,
    batch: int,
    tokens: int,
    num_beams: int = 1,
    dtype: DType = BF16,
) -> int:
    """Bytes of keys and values of `tokens` positions in every layer; a layer with a window keeps no
    more than it sees.

    Beam search holds a cache for each beam. Raises InputError for layers that cache something else
    (latents, a state). Source: transformers 5.23 cache_utils.py DynamicLayer,
    DynamicSlidingWindowLayer.
    """
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    if min(batch, tokens, num_beams) < 1:
        raise InputError(
            f"batch={batch}, tokens={tokens}, num_beams={num_beams}: each must be at least 1"
        )
    top = Bindings(dict(spec.symbols))
    values = sum(
        stage.count * _values_of(stage, top, tokens, spec.name)
        for stage in spec.stages
        if stage.checkpointed
    )
    return values * batch * num_beams * dtype.bits // 8


def _values_of(stage: Stage, top: Bindings, tokens: int, name: str) -> int:
    """Keys and values that one layer keeps of a sequence."""
    attention = getattr(stage.part, "attention", None)
    if not isinstance(attention, GroupedQueryAttention):
        raise InputError(
            f"the cache of {shown(name)} is not one of keys and values in each layer; only"
            " grouped-query attention is priced"
        )
    here = top.extended(dict(stage.symbols)).values
    heads = here["k"] if attention.grouped else here["a"]
    seen = min(tokens, attention.window) if attention.window else tokens
    return 2 * heads * here["dh"] * seen
