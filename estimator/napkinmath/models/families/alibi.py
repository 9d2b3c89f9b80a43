"""BLOOM, MPT and Falcon: decoders with ALiBi, or of its time."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config, pads, runs
from napkinmath.models.families.llama import dense_symbols, one_head_each
from napkinmath.models.layers.alibi import AlibiEmbedding
from napkinmath.models.layers.chained_attention import BloomAttention, MptAttention
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.falcon import (
    KIND,
    FalconAttention,
    FalconEmbedding,
    FalconHeads,
    FalconLayer,
)
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import PlainMlp
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.positions import PositionedEmbedding

LAYER_NORM = Norm(kind=NormKind.LAYER)


def four_times(c: Config) -> dict[str, int]:
    """Sizes of a decoder whose feed-forward is four times the hidden size, with a key/value head
    for each query head."""
    values = {key: value for key, value in c.values.items() if key != "num_key_value_heads"}
    return one_head_each(
        dense_symbols(
            Config({**values, "intermediate_size": 4 * c.size("hidden_size")}, c.name, c.source)
        )
    )


def _stages(
    c: Config,
    embedding: Part,
    layer: Part,
    count: int,
    head: CausalLmHead,
    *,
    name: str,
    layers: str,
) -> tuple[Stage, ...]:
    if c.flag("tie_word_embeddings", True):
        head = head.replace(tied_to=f"transformer.{name}.weight")
    stages = runs([Stage(part=layer, path=f"transformer.{layers}", checkpointed=True)] * count)
    return (Stage(part=embedding, path="transformer"), *stages, Stage(part=head))


def bloom(c: Config) -> ModelSpec:
    """BloomForCausalLM: a norm after the embedding, ALiBi, its own GELU; eager only (transformers
    models/bloom)."""
    c = c.renamed(
        {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    )
    symbols, dropout = four_times(c), c.probability("hidden_dropout")
    attention = BloomAttention(dropout=c.probability("attention_dropout"), output_dropout=dropout)
    mlp = PlainMlp(
        activation="bloom_gelu", names=("dense_h_to_4h", "dense_4h_to_h"), dropout=dropout
    )
    layer = DecoderLayer(
        attention=attention, mlp=mlp, norm=LAYER_NORM, names_outputs=True, names_attention=False
    )
    embedding = AlibiEmbedding(norm=LAYER_NORM, padded=pads(c))
    head = CausalLmHead(norm=LAYER_NORM, norm_name="transformer.ln_f")
    return c.spec(
        _stages(c, embedding, layer, symbols["L"], head, name="word_embeddings", layers="h"),
        symbols,
        family="bloom",
    )


def mpt(c: Config) -> ModelSpec:
    """MptForCausalLM: ALiBi in fp32, no biases; eager only (transformers models/mpt).

    The published modeling code (class MPTForCausalLM) also has biases and learned positions, where
    the config asks for them.
    """
    c = c.renamed(
        {
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
        }
    )
    symbols = four_times(c)
    published = "MPTForCausalLM" in c.names("architectures")
    options = c.nested("attn_config") if "attn_config" in c else c
    bias = published and not c.flag("no_bias", True)
    dropout = options.probability("attn_pdrop")
    alibi = options.flag("alibi", not published)
    attention = MptAttention(
        dropout=dropout, clipped="clip_qkv" in options, bias=bias, alibi=alibi or not published
    )
    mlp = PlainMlp(
        activation="gelu", bias=bias, names=("up_proj", "down_proj"), scope="ffn", dropout=dropout
    )
    norm = Norm(kind=NormKind.LAYER if bias else NormKind.LAYER_NO_BIAS)
    layer = DecoderLayer(
        attention=attention,
        mlp=mlp,
        norm=norm,
        names=("norm_1", "norm_2"),
        names_outputs=True,
        dropout=0.0,
    )
    rows = c.size("max_seq_len", 2048)
    embedding: Part = AlibiEmbedding(name="wte", padded=pads(c), bias_rows=rows, bool_mask=True)
    if published and c.flag("learned_pos_emb", True):
        embedding = PositionedEmbedding(rows=rows, padded=pads(c), masked=True)
    head = CausalLmHead(norm=norm, norm_name="transformer.norm_f")
    return c.spec(
        _stages(c, embedding, layer, symbols["L"], head, name="wte", layers="blocks"),
        symbols,
        family="mpt",
    )


def falcon(c: Config) -> ModelSpec:
    """FalconForCausalLM: the layer of 7B (one key/value head), of 40B and 180B (groups), or of the
    RefinedWeb models (transformers models/falcon)."""
    c = c.renamed({"n_embed": "hidden_size"})
    symbols = four_times(c)
    symbols["f"] = c.size("ffn_hidden_size", 4 * symbols["h"])
    grouped, parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn", True)
    heads = (
        FalconHeads.GROUPED
        if grouped
        else FalconHeads.SINGLE
        if c.flag("multi_query", True)
        else FalconHeads.FULL
    )
    if grouped:
        symbols["k"] = c.size("num_kv_heads", symbols["a"])
        c.divides("num_attention_heads", "num_kv_heads", symbols["a"], symbols["k"])
    elif heads is FalconHeads.SINGLE:
        symbols["k"] = 1
    bias, alibi = c.flag("bias"), c.flag("alibi")
    two_norms = grouped and parallel and c.size("num_ln_in_parallel_attn", 2) == 2
    mlp = PlainMlp(
        activation=c.activation("activation", "gelu"),
        bias=bias,
        names=("dense_h_to_4h", "dense_4h_to_h"),
        kind=KIND,
    )
    dropout = c.probability("attention_dropout")
    layer = FalconLayer(
        attention=FalconAttention(heads=heads, bias=bias, alibi=alibi, dropout=dropout),
        mlp=mlp,
        norm=LAYER_NORM,
        parallel=parallel,
        two_norms=two_norms,
        attention_dropout=dropout,
        dropout=c.probability("hidden_dropout"),
    )
    embedding: Part = FalconEmbedding(padded=pads(c), alibi=alibi)
    head = CausalLmHead(norm=LAYER_NORM, norm_name="transformer.ln_f")
    return c.spec(
        _stages(c, embedding, layer, symbols["L"], head, name="word_embeddings", layers="h"),
        symbols,
        family="falcon",
    )
