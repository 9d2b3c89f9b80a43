"""Cohere's Command models."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols, sliding_stack
from napkinmath.models.layers.attention import GroupedQueryAttention, Rotation
from napkinmath.models.layers.decoder import ParallelLayer
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.norm import Norm, NormKind


def cohere(c: Config) -> ModelSpec:
    """CohereForCausalLM: attention and feed-forward side by side, a norm with a mean, rotation in
    pairs and fp32 (transformers models/cohere)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.LAYER_EAGER)
    attention = GroupedQueryAttention(
        rotation=Rotation.PAIRS_FP32,
        head_norm=norm if c.flag("use_qk_norm") else None,
        norm_per_head=True,
        **attention_fields(c, symbols),
    )
    layer = ParallelLayer(
        attention=attention, mlp=GatedMlp(activation=c.activation("hidden_act", "silu")), norm=norm
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "cohere",
        head=CausalLmHead(norm=norm, scaled=True),
        tied=True,
        padded=True,
    )


def cohere2(c: Config) -> ModelSpec:
    """Cohere2ForCausalLM: Cohere with a window and rotation on three layers of four, neither on the
    fourth (transformers models/cohere2)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.LAYER_EAGER)
    layers, pattern = symbols["L"], c.size("sliding_window_pattern", 4)
    sliding = c.sliding_layers(layers, [(index + 1) % pattern > 0 for index in range(layers)])
    fields, mlp = (
        attention_fields(c, symbols),
        GatedMlp(activation=c.activation("hidden_act", "silu")),
    )

    def layer(window: int) -> Part:
        return ParallelLayer(
            attention=GroupedQueryAttention(
                rotation=Rotation.PAIRS_FP32, rotary=window > 0, window=window, **fields
            ),
            mlp=mlp,
            norm=norm,
        )

    return sliding_stack(
        c,
        symbols,
        sliding,
        c.size("sliding_window", 4096),
        layer,
        "cohere2",
        head=CausalLmHead(norm=norm, scaled=True),
        tied=True,
        padded=True,
    )
