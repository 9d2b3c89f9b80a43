"""What a model keeps of the sequences that it generates: keys and values, latent rows, states."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, DType
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.catalog.cache_formats import find_cache_format
from napkinmath.ir.cache import cached_stages
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.read import read_model

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
    encoder_tokens: int = 0,
    cache_format: str = "auto",
) -> int:
    """Bytes that all layers keep of `batch` sequences after `tokens` of each: keys and values, of a
    layer with a window no more than it sees; latent rows; the states of scans and convolutions.

    Beam search holds a cache for each beam. A model with an encoder also keeps keys and values of
    `encoder_tokens` (0: as many). Raises InputError for models that generate nothing. Source:
    transformers 5.23 cache_utils.py.
    """
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    if min(batch, tokens, num_beams) < 1 or encoder_tokens < 0:
        raise InputError(
            f"batch={batch}, tokens={tokens}, num_beams={num_beams},"
            f" encoder_tokens={encoder_tokens}: each must be at least 1"
        )
    top, row = Bindings(dict(spec.symbols)), find_cache_format(cache_format)
    total = 0
    for stage in cached_stages(spec):
        bind = top.extended(dict(stage.symbols))
        for item in stage.part.cached:
            rows = item.rows(tokens, encoder_tokens or tokens)
            total += stage.count * bind(row.nbytes(item, rows, dtype))
    return total * batch * num_beams
