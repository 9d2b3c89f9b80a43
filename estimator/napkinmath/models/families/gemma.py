"""Gemma 1, 2 and 3 (text)."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.families.config import Config
from napkinmath.models.families.dense_variants import SLIDING_TABLES, layer_tables
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols, sliding_stack
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.norm import Norm, NormKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NORM = Norm(kind=NormKind.RMS_GEMMA)
SANDWICH: dict[str, Any] = {
    "norm": NORM,
    "names": ("input_layernorm", "pre_feedforward_layernorm"),
    "post_names": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def gemma(c: Config) -> ModelSpec:
    """GemmaForCausalLM: scaled embeddings, norms of (1 + weight) in fp32, one head size for all
    widths (transformers models/gemma)."""
    symbols = dense_symbols(c, kv_default=16, head_size_default=256)
    activation = c.activation("hidden_act", "gelu_pytorch_tanh")
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)),
        mlp=GatedMlp(activation=activation),
        norm=NORM,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "gemma",
        embedding=TokenEmbedding(scaled_inside=True),
        head=CausalLmHead(norm=NORM),
        tied=True,
        padded=True,
    )


def gemma2(c: Config) -> ModelSpec:
    """Gemma2ForCausalLM: a norm before and after each sublayer, capped scores and logits, every
    other layer with a window.

    transformers 5.23 has no SDPA form of it (models/gemma2 Gemma2PreTrainedModel._supports_sdpa):
    eager, whatever is asked.
    """
    symbols = dense_symbols(c, kv_default=4, head_size_default=256)
    layers = symbols["L"]
    sliding = c.sliding_layers(layers, [index % 2 == 0 for index in range(layers)])
    fields = attention_fields(c, symbols)
    capped = c.number_or_none("attn_logit_softcapping", 50.0) is not None
    mlp = GatedMlp(activation=c.activation("hidden_activation", "gelu_pytorch_tanh"))
    return sliding_stack(
        c,
        symbols,
        sliding,
        c.size("sliding_window", 4096),
        lambda w: DecoderLayer(
            attention=GroupedQueryAttention(window=w, capped=capped, eager_only=True, **fields),
            mlp=mlp,
            **SANDWICH,
        ),
        "gemma2",
        embedding=TokenEmbedding(scaled_inside=True, masked=True),
        head=CausalLmHead(
            norm=NORM, capped=c.number_or_none("final_logit_softcapping", 30.0) is not None
        ),
        tied=True,
        padded=True,
    )


def vaultgemma(c: Config) -> ModelSpec:
    """VaultGemmaForCausalLM: Gemma 2 without the norms after the sublayers (transformers
    models/vaultgemma)."""
    symbols = dense_symbols(c, kv_default=4, head_size_default=256)
    layers = symbols["L"]
    sliding = c.sliding_layers(layers, [index % 2 == 0 for index in range(layers)])
    fields = attention_fields(c, symbols)
    capped = c.number_or_none("attn_logit_softcapping", 50.0) is not None
    mlp = GatedMlp(activation=c.activation("hidden_activation", "gelu_pytorch_tanh"))
    names: dict[str, Any] = {"norm": NORM, "names": SANDWICH["names"]}
    return sliding_stack(
        c,
        symbols,
        sliding,
        c.size("sliding_window", 4096),
        lambda w: DecoderLayer(
            attention=GroupedQueryAttention(window=w, capped=capped, eager_only=True, **fields),
            mlp=mlp,
            **names,
        ),
        "vaultgemma",
        embedding=TokenEmbedding(scaled_inside=True, masked=True),
        head=CausalLmHead(
            norm=NORM, capped=c.number_or_none("final_logit_softcapping", 30.0) is not None
        ),
        tied=True,
        padded=True,
    )


def gemma3_text(c: Config) -> ModelSpec:
    """Gemma3ForCausalLM: five layers with a window to one without, a norm on each head, rotary
    tables for either kind of layer."""
    if c.flag("use_bidirectional_attention"):
        raise InputError(
            "config field use_bidirectional_attention=true has no rules; run `estimate trace`"
        )
    symbols = dense_symbols(c, kv_default=4, head_size_default=256)
    layers, pattern = symbols["L"], c.size("sliding_window_pattern", 6)
    sliding = c.sliding_layers(layers, [(index + 1) % pattern > 0 for index in range(layers)])
    fields = attention_fields(c, symbols)
    mlp = GatedMlp(activation=c.activation("hidden_activation", "gelu_pytorch_tanh"))

    def layer(window: int) -> DecoderLayer:
        attention = GroupedQueryAttention(
            window=window,
            tables=SLIDING_TABLES if window else "",
            head_norm=NORM,
            norm_transposed=True,
            **fields,
        )
        return DecoderLayer(attention=attention, mlp=mlp, **SANDWICH)

    head = CausalLmHead(norm=NORM, capped="final_logit_softcapping" in c)
    return sliding_stack(
        c,
        symbols,
        sliding,
        c.size("sliding_window", 4096),
        layer,
        "gemma3_text",
        embedding=layer_tables(sliding, scaled_inside=True),
        head=head,
        tied=True,
        padded=True,
    )
