"""Llama and the families that share its layer."""

from __future__ import annotations

from napkinmath.catalog.families.config import Config
from napkinmath.catalog.layers.attention import GroupedQueryAttention
from napkinmath.catalog.layers.decoder import DecoderLayer
from napkinmath.catalog.layers.embedding import TokenEmbedding
from napkinmath.catalog.layers.head import CausalLmHead
from napkinmath.catalog.layers.mlp import GatedMlp
from napkinmath.model_spec import ModelSpec, Stage


def dense_symbols(c: Config, *, kv_default: int | None = None, head_size_default: int = 0) -> dict[str, int]:
    """h, a, k, dh, f, v, L of a dense decoder, with divisibility checked."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", kv_default or heads)
    c.divides("num_attention_heads", "num_key_value_heads", heads, kv_heads)
    if "head_dim" not in c and not head_size_default:
        c.divides("hidden_size", "num_attention_heads", hidden, heads)
    head_size = c.size("head_dim", head_size_default or hidden // heads)
    return {"h": hidden, "a": heads, "k": kv_heads, "dh": head_size, "f": c.size("intermediate_size"), "v": c.size("vocab_size"), "L": c.size("num_hidden_layers")}


def llama(c: Config) -> ModelSpec:
    """LlamaForCausalLM (transformers models/llama)."""
    symbols = dense_symbols(c)
    bias = c.flag("attention_bias")
    layer = DecoderLayer(
        attention=GroupedQueryAttention(grouped=symbols["k"] != symbols["a"], bias=bias, output_bias=bias, dropout=c.number("attention_dropout", 0.0)),
        mlp=GatedMlp(activation=c.text("hidden_act", "silu"), bias=c.flag("mlp_bias")),
    )
    return c.spec(
        (
            Stage(part=TokenEmbedding(), path="model"),
            Stage(part=layer, count=symbols["L"], path="model.layers", checkpointed=True),
            Stage(part=CausalLmHead(tied_to="model.embed_tokens.weight" if c.flag("tie_word_embeddings") else "")),
        ),
        symbols,
        family="llama",
    )
