"""Llama's layer with one thing changed: Seed-OSS, ERNIE 4.5, PaddleOCR-VL, CWM, Ministral 3,
Jais 2, HyperCLOVA X, Youtu."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.families.config import Config
from napkinmath.models.families.deepseek import latent_attention
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols, sliding_stack
from napkinmath.models.layers.attention import GroupedQueryAttention, Rotation
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp, PlainMlp
from napkinmath.models.layers.norm import Norm, NormKind


def seed_oss(c: Config) -> ModelSpec:
    """SeedOssForCausalLM: biases on q, k and v, dropout of what is added to the residual
    (transformers models/seed_oss)."""
    symbols, dropout = (
        dense_symbols(c, head_size_default=128),
        c.probability("residual_dropout", 0.1),
    )
    fields = attention_fields(
        c, symbols, bias=c.flag("attention_bias", True), output_bias=c.flag("attention_out_bias")
    )
    fields["dropout"] = c.probability("attention_dropout", 0.1)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(output_dropout=dropout, **fields),
        mlp=GatedMlp(
            activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias"), dropout=dropout
        ),
    )
    return decoder(c, symbols, [layer] * symbols["L"], "seed_oss")


def ernie4_5(c: Config) -> ModelSpec:
    """Ernie4_5ForCausalLM: pairs turned in fp32, one switch for all biases (transformers
    models/ernie4_5)."""
    symbols, bias = dense_symbols(c, kv_default=2, head_size_default=128), c.flag("use_bias")
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            rotation=Rotation.PAIRS_WIDE,
            grouped=symbols["k"] != symbols["a"],
            bias=bias,
            output_bias=bias,
        ),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=bias),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "ernie4_5",
        embedding=TokenEmbedding(wide_tables=True),
        tied=True,
        padded=True,
    )


def paddleocr_vl_text(c: Config) -> ModelSpec:
    """The text of PaddleOCRVLForConditionalGeneration: one switch for all biases, tables of three
    axes (transformers models/paddleocr_vl)."""
    symbols, bias = dense_symbols(c, kv_default=2, head_size_default=128), c.flag("use_bias")
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            grouped=symbols["k"] != symbols["a"], bias=bias, output_bias=bias
        ),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=bias),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "paddleocr_vl_text",
        embedding=TokenEmbedding(tables_per_row=True),
        tied=True,
        padded=True,
    )


def cwm(c: Config) -> ModelSpec:
    """CwmForCausalLM: a window on three layers of four, the first one full (transformers
    models/cwm)."""
    symbols = dense_symbols(c, kv_default=8, head_size_default=128)
    sliding = c.sliding_layers(symbols["L"], [index % 4 > 0 for index in range(symbols["L"])])
    fields, mlp = (
        attention_fields(c, symbols, bias=False),
        GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    return sliding_stack(
        c,
        symbols,
        sliding,
        c.size("sliding_window", 8192),
        lambda w: DecoderLayer(attention=GroupedQueryAttention(window=w, **fields), mlp=mlp),
        "cwm",
    )


def ministral3(c: Config) -> ModelSpec:
    """Ministral3ForCausalLM: queries scaled by their position (transformers models/ministral3)."""
    symbols = dense_symbols(c, kv_default=8, head_size_default=128)
    window = c.size("sliding_window", 0, low=0)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            window=window, scaled_by_position=True, **attention_fields(c, symbols, bias=False)
        ),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    embedding = TokenEmbedding(full_mask=not window, windows=(window,) if window else ())
    return decoder(
        c, symbols, [layer] * symbols["L"], "ministral3", embedding=embedding, padded=True
    )


def jais2(c: Config) -> ModelSpec:
    """Jais2ForCausalLM: LayerNorm, biases, two linears around relu² (transformers models/jais2)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.LAYER)
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "relu2"),
        bias=c.flag("mlp_bias", True),
        names=("up_proj", "down_proj"),
    )
    fields = attention_fields(c, symbols, bias=c.flag("attention_bias", True))
    layer = DecoderLayer(attention=GroupedQueryAttention(**fields), mlp=mlp, norm=norm)
    return decoder(c, symbols, [layer] * symbols["L"], "jais2", head=CausalLmHead(norm=norm))


def minicpm3(c: Config) -> ModelSpec:
    """MiniCPM3ForCausalLM: DeepSeek's latent attention, embeddings, residuals and what the head
    reads each multiplied by a number (transformers models/minicpm3)."""
    sizes: dict[str, object] = {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": c.size("hidden_size") // c.size("num_attention_heads"),
    }
    filled = Config({**sizes, **c.values}, c.name, c.source)
    return _latent(filled, "halves", "minicpm3", scaled=True)


def youtu(c: Config) -> ModelSpec:
    """YoutuForCausalLM: latent attention, dense feed-forward (transformers models/youtu)."""
    form = "pairs" if c.flag("rope_interleave", True) else "halves"
    return _latent(c, form, "youtu", scaled=False)


def _latent(c: Config, form: str, family: str, *, scaled: bool) -> ModelSpec:
    """A dense decoder of latent attention."""
    heads = c.size("num_attention_heads")
    attention = latent_attention(c, form)
    symbols = {
        "h": c.size("hidden_size"),
        "a": heads,
        "k": heads,
        "dh": attention.plain + attention.turned,
    }
    symbols |= {
        "f": c.size("intermediate_size"),
        "v": c.size("vocab_size"),
        "L": c.size("num_hidden_layers"),
    }
    layer = DecoderLayer(
        attention=attention,
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias")),
        scaled=scaled,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        family,
        embedding=TokenEmbedding(rotary_size=attention.turned, scaled_inside=scaled),
        head=CausalLmHead(hidden_scaled=scaled),
        tied=True,
    )
