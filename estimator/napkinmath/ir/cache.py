"""What a layer keeps of each sequence while the model generates: one record a tensor.

Sources: transformers 5.23 cache_utils.py DynamicLayer, DynamicSlidingWindowLayer,
LinearAttentionLayer; vllm 0.11 v1/kv_cache_interface.py, model_executor/layers/mamba/mamba_utils.py.
"""

from __future__ import annotations

from enum import Enum

from napkinmath.base.errors import InputError, shown
from napkinmath.base.expr import Size, minimum, product
from napkinmath.base.record import Record
from napkinmath.ir.symbols import dh

_GENERATING = ("causal-lm", "seq2seq-lm")
"""Tasks whose models write text."""
TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.ir.model_spec import ModelSpec, Stage


class Grows(str, Enum):
    """With what a cached tensor grows."""

    TOKENS = "tokens"
    """A row for each token read or generated."""
    ENCODER = "encoder"
    """A row for each token that the encoder has read."""
    NOT = "not"
    """The same size whatever the length: a state."""


class Cached(Record):
    """One tensor that a layer keeps of each sequence; `axes` are those of a row, or of a whole
    state."""

    name: str
    axes: tuple[Size, ...]
    grows: Grows = Grows.TOKENS
    window: int = 0
    """Tokens it keeps at most; 0 keeps all."""
    dtype: DType | None = None
    """Its own type; None is that of what generates, or the one asked for."""
    paged: tuple[Size, ...] | None = None
    """Axes in an inference engine, where they are not those of transformers."""
    chosen: int = 0
    """Rows that a query sees at most, by an indexer's choice; 0: all."""
    choosing_heads: int = 0
    """Heads of an indexer that score every row, to choose; 0: none."""

    def rows(self, length: Size, encoder: Size) -> Size:
        """Rows after `length` tokens, the encoder having read `encoder`."""
        if self.grows is Grows.NOT:
            return 1
        if self.grows is Grows.ENCODER:
            return encoder
        return minimum(length, self.window) if self.window else length

    def row_elements(self, *, paged: bool = False) -> Size:
        """Numbers in a row, or in a whole state."""
        return product(self.paged if paged and self.paged is not None else self.axes)


def keys_and_values(
    heads: Size,
    *,
    size: Size = dh,
    value: Size = 0,
    window: int = 0,
    grows: Grows = Grows.TOKENS,
    paged: Size = 0,
) -> tuple[Cached, ...]:
    """Keys and values of `heads` heads; `value` is the size of a value's head where it differs,
    `paged` the heads that an inference engine keeps."""
    return tuple(
        Cached(
            name=name,
            axes=(heads, width),
            grows=grows,
            window=window,
            paged=(paged, width) if paged else None,
        )
        for name, width in (("key", size), ("value", value or size))
    )


def decoded(heads: Size) -> tuple[Cached, ...]:
    """What a layer of a decoder beside an encoder keeps: keys and values of its own tokens, and of
    the encoder's steps."""
    return (*keys_and_values(heads), *keys_and_values(heads, grows=Grows.ENCODER))


def convolution_state(channels: Size, kernel: int) -> Cached:
    """The last inputs of a causal convolution: `kernel` of them in transformers, one less in an
    engine."""
    return Cached(
        name="convolution state",
        axes=(channels, kernel),
        grows=Grows.NOT,
        paged=(channels, kernel - 1),
    )


def cached_stages(spec: ModelSpec, *, images: bool = False) -> list[Stage]:
    """The stages whose layers keep something of a sequence; those that attend to `images` only
    where there are some. Raises InputError for a model that generates nothing, or
    from sounds."""
    found = [
        stage
        for stage in spec.stages
        if stage.part.cached
        and (stage.modality in ("", "across") if images else not stage.modality)
    ]
    if spec.task not in _GENERATING:
        raise InputError(
            f"{shown(spec.name)} is for {spec.task} and generates nothing; use a language model"
        )
    if not found:
        raise InputError(
            f"{shown(spec.name)} keeps no cache of earlier tokens, so it generates nothing; use a"
            " decoder"
        )
    if any(stage.part.brings for stage in spec.stages):
        raise InputError(
            f"{shown(spec.name)} reads sounds, whose encoder's length is no prompt's: there are no"
            " rules for generating from them; its training is priced by `estimate`"
        )
    return found


def has_encoder(spec: ModelSpec) -> bool:
    """Whether an encoder reads the prompt and a decoder writes from its first token on."""
    return any(item.grows is Grows.ENCODER for stage in spec.stages for item in stage.part.cached)
