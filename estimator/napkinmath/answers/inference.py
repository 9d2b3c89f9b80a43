"""What generation adds in the middle of training: the key/value cache, one for every sequence and
every beam."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, DType
from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Bindings
from napkinmath.catalog.models import read_model
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.layers.attention import GroupedQueryAttention

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


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
    bind, values = Bindings(dict(spec.symbols)), 0
    for stage in spec.stages:
        if not stage.checkpointed:
            continue
        attention = getattr(stage.part, "attention", None)
        if not isinstance(attention, GroupedQueryAttention):
            raise InputError(
                f"the cache of {shown(spec.name)} is not one of keys and values in each layer; only"
                " grouped-query attention is priced"
            )
        here = bind.extended(dict(stage.symbols))
        heads = here.values["k"] if attention.grouped else here.values["a"]
        seen = min(tokens, attention.window) if attention.window else tokens
        values += stage.count * 2 * heads * here.values["dh"] * seen
    return values * batch * num_beams * dtype.bits // 8
