"""OLMo, OLMo 2, OLMo 3 and OLMo Hybrid."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec
from napkinmath.ir.symbols import lk, lv
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
from napkinmath.models.layers.separate_delta import SeparateDeltaNet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


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


def olmo_hybrid(c: Config) -> ModelSpec:
    """OlmoHybridForCausalLM: gated delta layers, and every fourth one as OLMo 2's, which turns no
    heads where rope_theta is null (transformers models/olmo_hybrid)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.RMS_CAST_LAST)
    layers, mlp = symbols["L"], GatedMlp(activation=c.activation("hidden_act", "silu"))
    table = c.nested("rope_parameters") if "rope_parameters" in c else c
    rotary = table.number_or_none("rope_theta", 10000.0) is not None
    attention = GroupedQueryAttention(
        rotary=rotary,
        rotation=Rotation.HALVES_FP32,
        wide_norm=norm,
        **attention_fields(c, symbols),
    )
    symbols |= {
        "lk": c.size("linear_num_key_heads", symbols["a"]),
        "lv": c.size("linear_num_value_heads", symbols["a"]),
    }
    c.divides("linear_num_value_heads", "linear_num_key_heads", symbols["lv"], symbols["lk"])
    key_size = c.size("linear_key_head_dim", 3 * symbols["h"] // (4 * symbols["lk"]))
    delta = SeparateDeltaNet(
        key_heads=lk,
        value_heads=lv,
        key_size=key_size,
        value_size=c.size("linear_value_head_dim", 2 * key_size),
        kernel=c.size("linear_conv_kernel_dim", 4),
        doubled=c.flag("linear_allow_neg_eigval", True),
    )
    kinds = {
        "linear_attention": DecoderLayer(attention=delta, mlp=mlp, norm=norm),
        "full_attention": DecoderLayer(attention=attention, mlp=mlp, norm=norm, **POST_NAMES),
    }
    return decoder(
        c,
        symbols,
        [kinds[kind] for kind in _layer_types(c, layers)],
        "olmo_hybrid",
        embedding=WIDE_TABLES.replace(rotary=rotary),
        head=CausalLmHead(norm=norm),
        padded=True,
    )


def _layer_types(c: Config, layers: int) -> Sequence[str]:
    """What each layer of a hybrid is: as listed, else every fourth attends, or the last alone."""
    listed = c.layer_names("layer_types", layers, ("full_attention", "linear_attention"))
    if listed:
        return listed
    attends = [i % 4 == 3 or (layers < 4 and i == layers - 1) for i in range(layers)]
    return ["full_attention" if full else "linear_attention" for full in attends]
