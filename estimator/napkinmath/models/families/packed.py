"""Decoders with one linear for queries, keys and values that attend as Llama's kin do: Phi 3,
Persimmon, GPT-NeoX, GPT-2, GPTBigCode."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.llama import (
    attention_fields,
    decoder,
    dense_symbols,
    one_head_each,
    pads,
)
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer, ParallelLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import FusedGatedMlp, PlainMlp
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.packed_attention import PackedAttention, Packing
from napkinmath.models.layers.positions import PositionedEmbedding

LAYER_NORM = Norm(kind=NormKind.LAYER)
GPT_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}


def phi3(c: Config) -> ModelSpec:
    """Phi3ForCausalLM: packed and sliced projections, gate and up in one linear, a window on every
    layer (transformers models/phi3)."""
    symbols = dense_symbols(c)
    rotated, dropout = c.rotated(symbols["dh"]), c.probability("resid_pdrop")
    window = c.size("sliding_window", 0, low=0)
    core = GroupedQueryAttention(
        rotary_size=rotated,
        window=window,
        names=("qkv_proj", "", "", "o_proj"),
        **attention_fields(c, symbols, bias=False),
    )
    layer = DecoderLayer(
        attention=PackedAttention(core=core, packing=Packing.SLICES),
        mlp=FusedGatedMlp(activation=c.activation("hidden_act", "silu")),
        dropout=dropout,
    )
    embedding = TokenEmbedding(
        rotary_size=rotated, full_mask=not window, windows=(window,) if window else (), dropout=0.0
    )
    return decoder(c, symbols, [layer] * symbols["L"], "phi3", embedding=embedding, padded=True)


def persimmon(c: Config) -> ModelSpec:
    """PersimmonForCausalLM: a LayerNorm on each head, half of each head rotated, relu²
    (transformers models/persimmon)."""
    symbols = one_head_each(dense_symbols(c))
    rotated = c.rotated(symbols["dh"], 0.5)
    core = GroupedQueryAttention(
        rotary_size=rotated,
        holds_pieces=True,
        head_norm=LAYER_NORM if c.flag("qk_layernorm", True) else None,
        norm_names=("q_layernorm", "k_layernorm"),
        names=("query_key_value", "", "", "dense"),
        **attention_fields(c, symbols, bias=True),
    )
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "relu2"),
        names=("dense_h_to_4h", "dense_4h_to_h"),
        dropout=c.probability("hidden_dropout"),
    )
    layer = DecoderLayer(
        attention=PackedAttention(core=core, packing=Packing.SELECTS), mlp=mlp, norm=LAYER_NORM
    )
    head = CausalLmHead(norm=LAYER_NORM, norm_name="model.final_layernorm")
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "persimmon",
        embedding=TokenEmbedding(rotary_size=rotated),
        head=head,
    )


def gpt_neox(c: Config) -> ModelSpec:
    """GPTNeoXForCausalLM: side by side under two LayerNorms, projections split within each head
    (transformers models/gpt_neox)."""
    symbols = one_head_each(dense_symbols(c))
    rotated = c.rotated(symbols["dh"], c.number("rotary_pct", 0.25))
    dropout = c.probability("hidden_dropout")
    core = GroupedQueryAttention(
        rotary_size=rotated,
        names=("query_key_value", "", "", "dense"),
        scope="attention",
        **attention_fields(c, symbols, bias=c.flag("attention_bias", True)),
    )
    attention = PackedAttention(core=core, packing=Packing.HEADS)
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "gelu"), names=("dense_h_to_4h", "dense_4h_to_h")
    )
    names = ("input_layernorm", "post_attention_layernorm")
    layer: Part = ParallelLayer(
        attention=attention,
        mlp=mlp,
        norm=LAYER_NORM,
        names=names,
        residual_last=True,
        mlp_first=True,
        dropout=dropout,
    )
    if not c.flag("use_parallel_residual", True):
        layer = DecoderLayer(
            attention=attention, mlp=mlp, norm=LAYER_NORM, names=names, dropout=dropout
        )
    embedding = TokenEmbedding(rotary_size=rotated, name="embed_in", dropout=dropout)
    head = CausalLmHead(norm=LAYER_NORM, norm_name="gpt_neox.final_layer_norm")
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "gpt_neox",
        embedding=embedding,
        head=head,
        path="gpt_neox",
    )


def gpt_stages(
    c: Config,
    symbols: dict[str, int],
    layers: list[Part],
    embedding: Part,
    *,
    path: str,
    tied: bool,
    bias: bool = False,
    shared_loss_since: tuple[int, int] = (4, 46),
) -> tuple[Stage, ...]:
    """Embedding, blocks `h` and a head after `ln_f`, as GPT-2's kin are laid out."""
    head = CausalLmHead(
        norm=LAYER_NORM,
        norm_name=f"{path}.ln_f",
        bias=bias,
        shared_loss_since=shared_loss_since,
        own_loss_upcasts=False,
        tied_to=f"{path}.wte.weight" if c.flag("tie_word_embeddings", tied) else "",
    )
    return (
        Stage(part=embedding, path=path),
        *runs([Stage(part=part, path=f"{path}.h", checkpointed=True) for part in layers]),
        Stage(part=head),
    )


def gpt_symbols(c: Config) -> dict[str, int]:
    """Sizes of a GPT-2-like config; the feed-forward is four times the hidden size by default."""
    hidden = c.size("hidden_size")
    values = {**c.values, "intermediate_size": c.values.get("intermediate_size") or 4 * hidden}
    return one_head_each(dense_symbols(Config(values, c.name, c.source)))


def gpt2(c: Config) -> ModelSpec:
    """GPT2LMHeadModel: learned positions, dropout everywhere, weights stored transposed
    (transformers models/gpt2)."""
    c = c.renamed(GPT_NAMES)
    symbols = gpt_symbols(c)
    dropout = c.probability("resid_pdrop", 0.1)
    core = GroupedQueryAttention(
        rotary=False,
        wide_softmax=False,
        bias=True,
        output_bias=True,
        dropout=c.probability("attn_pdrop", 0.1),
        output_dropout=dropout,
        names=("c_attn", "", "", "c_proj"),
        scope="attn",
    )
    mlp = PlainMlp(
        activation=c.activation("activation_function", "gelu_new"),
        names=("c_fc", "c_proj"),
        dropout=dropout,
    )
    layer = DecoderLayer(
        attention=PackedAttention(core=core),
        mlp=mlp,
        norm=LAYER_NORM,
        names=("ln_1", "ln_2"),
        names_outputs=True,
    )
    embedding = PositionedEmbedding(
        rows=c.size("max_position_embeddings", 1024),
        dropout=c.probability("embd_pdrop", 0.1),
        padded=pads(c),
    )
    return c.spec(
        gpt_stages(c, symbols, [layer] * symbols["L"], embedding, path="transformer", tied=True),
        symbols,
        family="gpt2",
    )


def gpt_bigcode(c: Config) -> ModelSpec:
    """GPTBigCodeForCausalLM: GPT-2 with one key/value head for all queries (transformers
    models/gpt_bigcode)."""
    c = c.renamed(GPT_NAMES)
    symbols = gpt_symbols(c)
    shared_head = c.flag("multi_query", True)
    if shared_head:
        symbols["k"] = 1
    dropout = c.probability("resid_pdrop", 0.1)
    core = GroupedQueryAttention(
        grouped=shared_head and symbols["a"] > 1,
        rotary=False,
        bias=True,
        output_bias=True,
        dropout=c.probability("attn_pdrop", 0.1),
        output_dropout=dropout,
        names=("c_attn", "", "", "c_proj"),
        scope="attn",
    )
    mlp = PlainMlp(
        activation=c.activation("activation_function", "gelu_pytorch_tanh"),
        names=("c_fc", "c_proj"),
        dropout=dropout,
    )
    attention = PackedAttention(
        core=core, packing=Packing.SPLIT if shared_head else Packing.HEADS, cached_before=(4, 50)
    )
    layer = DecoderLayer(
        attention=attention, mlp=mlp, norm=LAYER_NORM, names=("ln_1", "ln_2"), names_outputs=True
    )
    rows = c.size("max_position_embeddings", 1024)
    embedding = PositionedEmbedding(
        rows=rows, dropout=c.probability("embd_pdrop", 0.1), padded=pads(c), triangle=True
    )
    return c.spec(
        gpt_stages(
            c,
            symbols,
            [layer] * symbols["L"],
            embedding,
            path="transformer",
            tied=True,
            shared_loss_since=(4, 50),
        ),
        symbols,
        family="gpt_bigcode",
    )
