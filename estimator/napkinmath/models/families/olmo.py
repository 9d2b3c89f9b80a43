"""OLMo, OLMo 2 and OLMo 3."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.families.config import Config
from napkinmath.models.families.dense_variants import (
    POST_NAMES,
    SLIDING_TABLES,
    WIDE_TABLES,
    layer_tables,
)
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols, sliding_stack
from napkinmath.models.layers.attention import GroupedQueryAttention, Rotation
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.norm import Norm, NormKind


def olmo(c: Config) -> ModelSpec:
    """OlmoForCausalLM: LayerNorm without parameters in fp32, projections clipped where the config
    says so (transformers models/olmo)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.LAYER_PLAIN)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            rotation=Rotation.HALVES_FP32, clipped="clip_qkv" in c, **attention_fields(c, symbols)
        ),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
        norm=norm,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "olmo",
        embedding=WIDE_TABLES,
        head=CausalLmHead(norm=norm),
        padded=True,
    )


def olmo2(c: Config) -> ModelSpec:
    """Olmo2ForCausalLM: norms after each sublayer, and over all query and all key heads
    (transformers models/olmo2)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.RMS_CAST_LAST)
    attention = GroupedQueryAttention(
        rotation=Rotation.HALVES_FP32, wide_norm=norm, **attention_fields(c, symbols)
    )
    layer = DecoderLayer(
        attention=attention,
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
        norm=norm,
        **POST_NAMES,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "olmo2",
        embedding=WIDE_TABLES,
        head=CausalLmHead(norm=norm),
        padded=True,
    )


def olmo3(c: Config) -> ModelSpec:
    """Olmo3ForCausalLM: OLMo 2 with a window on three layers of four (transformers
    models/olmo3)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.RMS_CAST_LAST)
    sliding = c.sliding_layers(symbols["L"], [(index + 1) % 4 > 0 for index in range(symbols["L"])])
    fields, mlp = (
        attention_fields(c, symbols),
        GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    return sliding_stack(
        c,
        symbols,
        sliding,
        c.size("sliding_window", 4096),
        lambda w: DecoderLayer(
            attention=GroupedQueryAttention(
                rotation=Rotation.HALVES_FP32,
                window=w,
                tables=SLIDING_TABLES if w else "",
                wide_norm=norm,
                **fields,
            ),
            mlp=mlp,
            norm=norm,
            **POST_NAMES,
        ),
        "olmo3",
        embedding=layer_tables(sliding, wide_tables=True),
        head=CausalLmHead(norm=norm),
        padded=True,
    )
