"""Decoders that shipped their own modelling code with the weights: Qwen 1, Baichuan, InternLM,
ChatGLM, MiniCPM, Orion.

transformers has no class for these (any more); the rules follow the code in each model's
repository.
"""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols, one_head_each
from napkinmath.models.layers.attention import GroupedQueryAttention, Rotation
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import FusedGatedMlp, GatedMlp
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.packed_attention import PackedAttention, Packing

OWN_LOSS = (99, 0)  # the loss is the model's own in every version of transformers
BAICHUAN_ALIBI_HIDDEN = (
    5120  # Baichuan's 13B has position biases in the scores, its 7B a rotary embedding
)


def qwen(c: Config) -> ModelSpec:
    """QWenLMHeadModel: one biased linear for q, k, v, rotation in fp32, a feed-forward of half
    `intermediate_size` (Qwen-7B modeling_qwen.py).

    Its loss shifts the logits into a copy and leaves their type alone.
    """
    symbols = one_head_each(dense_symbols(c, head_size_default=c.size("kv_channels", 128)))
    symbols["f"] //= 2
    biased = not c.flag("no_bias", True)
    core = GroupedQueryAttention(
        names=("c_attn", "", "", "c_proj"),
        scope="attn",
        bias=True,
        output_bias=biased,
        rotation=Rotation.HALVES_FP32,
        dropout=c.probability("attn_dropout_prob"),
    )
    layer = DecoderLayer(
        attention=PackedAttention(core=core),
        mlp=GatedMlp(names=("w2", "w1", "c_proj"), bias=biased),
        names=("ln_1", "ln_2"),
    )
    embedding = TokenEmbedding(name="wte", wide_tables=True)
    head = CausalLmHead(
        norm_name="transformer.ln_f", shared_loss_since=OWN_LOSS, own_loss_upcasts=False
    )
    stages = (
        Stage(part=embedding, path="transformer"),
        Stage(part=layer, count=symbols["L"], path="transformer.h", checkpointed=True),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="qwen")


def baichuan(c: Config) -> ModelSpec:
    """BaichuanForCausalLM: Llama with one linear for q, k, v; the 13B adds position biases instead
    of rotating (modeling_baichuan.py)."""
    symbols = one_head_each(dense_symbols(c))
    alibi = symbols["h"] >= BAICHUAN_ALIBI_HIDDEN
    core = GroupedQueryAttention(
        names=("W_pack", "", "", "o_proj"), rotary=not alibi, rotation=Rotation.HALVES_FP32
    )
    layer = DecoderLayer(
        attention=PackedAttention(core=core),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    head = CausalLmHead(shared_loss_since=OWN_LOSS)
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "baichuan",
        embedding=TokenEmbedding(rotary=not alibi, wide_tables=not alibi, masked=alibi),
        head=head,
    )


def internlm(c: Config) -> ModelSpec:
    """InternLMForCausalLM: Llama with biases on the four linears of the attention
    (modeling_internlm.py)."""
    symbols = one_head_each(dense_symbols(c))
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols, bias=c.flag("bias", True))),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "internlm",
        head=CausalLmHead(shared_loss_since=OWN_LOSS),
    )


def internlm2(c: Config) -> ModelSpec:
    """InternLM2ForCausalLM: one linear for q, k, v, interleaved by group
    (modeling_internlm2.py)."""
    symbols = dense_symbols(c)
    core = GroupedQueryAttention(
        names=("wqkv", "", "", "wo"),
        scope="attention",
        **attention_fields(c, symbols, bias=c.flag("bias")),
    )
    mlp = GatedMlp(
        activation=c.activation("hidden_act", "silu"),
        names=("w1", "w3", "w2"),
        scope="feed_forward",
    )
    layer = DecoderLayer(
        attention=PackedAttention(core=core, packing=Packing.SLICES),
        mlp=mlp,
        names=("attention_norm", "ffn_norm"),
    )
    head = CausalLmHead(name="output", shared_loss_since=OWN_LOSS)
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "internlm2",
        embedding=TokenEmbedding(name="tok_embeddings"),
        head=head,
    )


def chatglm(c: Config) -> ModelSpec:
    """ChatGLM 2 and 3: one biased linear for q and two grouped k, v, half of each head turned in
    pairs, gate and up in one linear (modeling_chatglm.py)."""
    heads = c.size("num_attention_heads")
    groups = c.size("multi_query_group_num", 2) if c.flag("multi_query_attention", True) else heads
    c.divides("num_attention_heads", "multi_query_group_num", heads, groups)
    head_size = c.size("kv_channels", 128)
    symbols = {
        "h": c.size("hidden_size"),
        "a": heads,
        "k": groups,
        "dh": head_size,
        "f": c.size("ffn_hidden_size"),
        "v": c.size("padded_vocab_size"),
        "L": c.size("num_layers"),
    }
    core = GroupedQueryAttention(
        grouped=groups != heads,
        names=("query_key_value", "", "", "dense"),
        scope="self_attention",
        bias=c.flag("add_qkv_bias", True),
        output_bias=c.flag("add_bias_linear"),
        rotation=Rotation.PAIRS,
        rotary_size=head_size // 2,
    )
    mlp = FusedGatedMlp(names=("dense_h_to_4h", "dense_4h_to_h"), bias=c.flag("add_bias_linear"))
    layer = DecoderLayer(attention=PackedAttention(core=core), mlp=mlp)
    head = CausalLmHead(
        norm_name="transformer.encoder.final_layernorm",
        name="output_layer",
        shared_loss_since=OWN_LOSS,
    )
    stages = (
        Stage(
            part=TokenEmbedding(name="word_embeddings", rotary_size=head_size // 2),
            path="transformer.embedding",
        ),
        Stage(part=layer, count=symbols["L"], path="transformer.encoder.layers", checkpointed=True),
        Stage(part=head, path="transformer"),
    )
    return c.spec(stages, symbols, family="chatglm")


def minicpm(c: Config) -> ModelSpec:
    """MiniCPMForCausalLM: Llama with embeddings, residuals and logits multiplied by numbers
    (modeling_minicpm.py)."""
    symbols = dense_symbols(c)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
        scaled=True,
    )
    head = CausalLmHead(scaled=True, shared_loss_since=OWN_LOSS)
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "minicpm",
        embedding=TokenEmbedding(scaled=True),
        head=head,
        tied=True,
    )


def orion(c: Config) -> ModelSpec:
    """OrionForCausalLM: Llama under LayerNorms with biases (modeling_orion.py)."""
    symbols = dense_symbols(c)
    norm = Norm(kind=NormKind.LAYER)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
        norm=norm,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "orion",
        head=CausalLmHead(norm=norm, shared_loss_since=OWN_LOSS),
    )
