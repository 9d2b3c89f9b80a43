"""Decoders a small step from Llama's layer: other norms, activations, rotations, or their order."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols, sliding_stack
from napkinmath.models.layers.attention import GroupedQueryAttention, Rotation
from napkinmath.models.layers.decoder import DecoderLayer, ParallelLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import FusedGatedMlp, GatedMlp, PlainMlp
from napkinmath.models.layers.norm import Norm, NormKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SLIDING_TABLES = " of sliding layers"
WIDE_TABLES = TokenEmbedding(wide_tables=True)
LAYER_NORM = Norm(kind=NormKind.LAYER)
POST_NAMES: dict[str, Any] = {
    "names": ("", ""),
    "post_names": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def starcoder2(c: Config) -> ModelSpec:
    """Starcoder2ForCausalLM: LayerNorm, biases, two-linear feed-forward, a window on every layer
    (transformers models/starcoder2)."""
    symbols = dense_symbols(c, kv_default=2)
    window, bias, dropout = (
        c.size("sliding_window", 0, low=0),
        c.flag("use_bias", True),
        c.probability("residual_dropout"),
    )
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            window=window, output_dropout=dropout, **attention_fields(c, symbols, bias=bias)
        ),
        mlp=PlainMlp(
            activation=c.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=bias,
            names=("c_fc", "c_proj"),
            dropout=dropout,
        ),
        norm=LAYER_NORM,
    )
    embedding = TokenEmbedding(
        full_mask=not window,
        windows=(window,) if window else (),
        dropout=c.probability("embedding_dropout"),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "starcoder2",
        embedding=embedding,
        head=CausalLmHead(norm=LAYER_NORM),
        tied=True,
    )


def layer_tables(sliding: list[bool], **fields: Any) -> TokenEmbedding:
    """An embedding with rotary tables for each kind of layer that occurs."""
    tables = tuple(
        name for name, used in (("", not all(sliding)), (SLIDING_TABLES, any(sliding))) if used
    )
    return TokenEmbedding(tables=tables, **fields)


def exaone4(c: Config) -> ModelSpec:
    """Exaone4ForCausalLM: norms after each sublayer and on each head; full layers do not rotate
    (transformers models/exaone4)."""
    symbols = dense_symbols(c, kv_default=None if "num_key_value_heads" in c.values else 32)
    layers = symbols["L"]
    window = c.size("sliding_window", 0, low=0) if "sliding_window" in c.values else 4096
    pattern = c.size("sliding_window_pattern", 4, low=0) if window else 0
    sliding = c.sliding_layers(
        layers, [pattern > 0 and (index + 1) % pattern > 0 for index in range(layers)]
    )
    fields, mlp = (
        attention_fields(c, symbols, bias=False),
        GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    return sliding_stack(
        c,
        symbols,
        sliding,
        window,
        lambda w: DecoderLayer(
            attention=GroupedQueryAttention(
                window=w,
                rotary=w > 0 or not window,
                head_norm=Norm(),
                norm_transposed=True,
                **fields,
            ),
            mlp=mlp,
            **POST_NAMES,
        ),
        "exaone4",
    )


def smollm3(c: Config) -> ModelSpec:
    """SmolLM3ForCausalLM: every fourth layer does not rotate (transformers models/smollm3)."""
    symbols = dense_symbols(c, kv_default=4)
    layers, interval = symbols["L"], c.size("no_rope_layer_interval", 4)
    rotates = [flag != 0 for flag in c.layer_sizes("no_rope_layers", layers)] or [
        (index + 1) % interval != 0 for index in range(layers)
    ]
    fields = attention_fields(c, symbols)
    mlp = GatedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias"))
    window = c.size("sliding_window", 0, low=0) if c.flag("use_sliding_window") else 0
    sliding = c.sliding_layers(layers, [window > 0 and not flag for flag in rotates])

    def layer(index: int) -> Part:
        attention = GroupedQueryAttention(
            rotary=rotates[index], window=window if sliding[index] else 0, **fields
        )
        return DecoderLayer(attention=attention, mlp=mlp)

    embedding = TokenEmbedding(windows=(window,) if window and any(sliding) else ())
    return decoder(
        c,
        symbols,
        [layer(index) for index in range(layers)],
        "smollm3",
        embedding=embedding,
        tied=True,
        padded=True,
    )


def arcee(c: Config) -> ModelSpec:
    """ArceeForCausalLM: Llama's attention, two linears around relu² (transformers models/arcee)."""
    symbols = dense_symbols(c)
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "relu2"),
        bias=c.flag("mlp_bias"),
        names=("up_proj", "down_proj"),
    )
    layer = DecoderLayer(attention=GroupedQueryAttention(**attention_fields(c, symbols)), mlp=mlp)
    return decoder(c, symbols, [layer] * symbols["L"], "arcee")


def nemotron(c: Config) -> ModelSpec:
    """NemotronForCausalLM: LayerNorm of (1 + weight), half of each head rotated, two linears around
    relu² (transformers models/nemotron)."""
    symbols, norm = dense_symbols(c), Norm(kind=NormKind.LAYER_ONE_PLUS)
    rotated = c.rotated(symbols["dh"], 0.5)
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "relu2"),
        bias=c.flag("mlp_bias"),
        names=("up_proj", "down_proj"),
    )
    layer = DecoderLayer(
        attention=GroupedQueryAttention(rotary_size=rotated, **attention_fields(c, symbols)),
        mlp=mlp,
        norm=norm,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "nemotron",
        embedding=TokenEmbedding(rotary_size=rotated),
        head=CausalLmHead(norm=norm),
    )


def apertus(c: Config) -> ModelSpec:
    """ApertusForCausalLM: a norm on each head, xIELU with two trained numbers a layer (transformers
    models/apertus)."""
    symbols = dense_symbols(c)
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "xielu"), bias=False, names=("up_proj", "down_proj")
    )
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            head_norm=Norm(), norm_transposed=True, **attention_fields(c, symbols)
        ),
        mlp=mlp,
        names=("attention_layernorm", "feedforward_layernorm"),
    )
    return decoder(c, symbols, [layer] * symbols["L"], "apertus", padded=True)


def helium(c: Config) -> ModelSpec:
    """HeliumForCausalLM: neighbouring elements rotated together (transformers models/helium)."""
    symbols = dense_symbols(c, kv_default=20, head_size_default=128)
    fields = attention_fields(c, symbols, output_bias=False)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(rotation=Rotation.PAIRS, **fields),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias")),
        norm=Norm(kind=NormKind.RMS_CAST_LAST),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "helium",
        head=CausalLmHead(norm=Norm(kind=NormKind.RMS_CAST_LAST)),
        padded=True,
    )


def hunyuan(c: Config) -> ModelSpec:
    """HunYuanDenseV1ForCausalLM: a norm on each head after the rotation (transformers
    models/hunyuan_v1_dense)."""
    symbols = dense_symbols(c)
    attention = GroupedQueryAttention(
        head_norm=Norm(),
        norm_transposed=True,
        norm_after_rotation=True,
        norm_names=("query_layernorm", "key_layernorm"),
        **attention_fields(c, symbols),
    )
    layer = DecoderLayer(
        attention=attention, mlp=GatedMlp(activation=c.activation("hidden_act", "silu"))
    )
    return decoder(c, symbols, [layer] * symbols["L"], "hunyuan_v1_dense", padded=True)


def glm(c: Config) -> ModelSpec:
    """GlmForCausalLM: half of each head rotated in pairs, gate and up in one linear (transformers
    models/glm)."""
    return _glm(c, "glm", {})


def glm4(c: Config) -> ModelSpec:
    """Glm4ForCausalLM: GLM with norms after each sublayer too (transformers models/glm4)."""
    return _glm(c, "glm4", _NORMED_AFTER)


def glm4v_text(c: Config) -> ModelSpec:
    """The text of Glm4vForConditionalGeneration: GLM 4's layers under tables of three axes, whole
    heads turned unless the config says a part (transformers models/glm4v)."""
    return _glm(
        c,
        "glm4v_text",
        _NORMED_AFTER,
        rotation=Rotation.PAIRS_READY,
        rotated=1.0,
        tables_per_row=True,
        head_size=0,
    )


def glm_ocr_text(c: Config) -> ModelSpec:
    """The same without biases (transformers models/glm_ocr)."""
    return glm4v_text(Config({**c.values, "attention_bias": False}, c.name, c.source)).replace(
        family="glm_ocr_text"
    )


_NORMED_AFTER = {"post_names": ("post_self_attn_layernorm", "post_mlp_layernorm")}


def _glm(
    c: Config,
    family: str,
    names: dict[str, Any],
    *,
    rotation: Rotation = Rotation.PAIRS,
    rotated: float = 0.5,
    tables_per_row: bool = False,
    head_size: int = 128,
) -> ModelSpec:
    """`head_size`: where the config says none; 0 is a share of the hidden size."""
    symbols = dense_symbols(c, kv_default=2, head_size_default=head_size)
    size = c.rotated(symbols["dh"], rotated)
    fields = attention_fields(c, symbols, bias=c.flag("attention_bias", True), output_bias=False)
    attention = GroupedQueryAttention(rotation=rotation, rotary_size=size, **fields)
    layer = DecoderLayer(
        attention=attention,
        mlp=FusedGatedMlp(activation=c.activation("hidden_act", "silu")),
        **names,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        family,
        embedding=TokenEmbedding(rotary_size=size, tables_per_row=tables_per_row),
        padded=True,
    )


def phi(c: Config) -> ModelSpec:
    """PhiForCausalLM: attention and feed-forward side by side under one LayerNorm, part of each
    head rotated (transformers models/phi)."""
    symbols = dense_symbols(c)
    rotated = c.rotated(symbols["dh"], 0.5)
    attention = GroupedQueryAttention(
        rotary_size=rotated,
        holds_pieces=True,
        head_norm=LAYER_NORM if c.flag("qk_layernorm") else None,
        norm_transposed=True,
        norm_names=("q_layernorm", "k_layernorm"),
        names=("q_proj", "k_proj", "v_proj", "dense"),
        **attention_fields(c, symbols, bias=True),
    )
    layer = ParallelLayer(
        attention=attention,
        mlp=PlainMlp(activation=c.activation("hidden_act", "gelu_new")),
        norm=LAYER_NORM,
        residual_last=True,
        dropout=c.probability("resid_pdrop"),
    )
    embedding = TokenEmbedding(rotary_size=rotated, dropout=c.probability("embd_pdrop"))
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "phi",
        embedding=embedding,
        head=CausalLmHead(norm=LAYER_NORM, norm_name="model.final_layernorm", bias=True),
    )


def stablelm(c: Config) -> ModelSpec:
    """StableLmForCausalLM: LayerNorm, a quarter of each head rotated, side by side in some sizes
    (transformers models/stablelm)."""
    symbols = dense_symbols(c, kv_default=None if "num_key_value_heads" in c.values else 32)
    rotated, dropout = c.rotated(symbols["dh"], 0.25), c.probability("hidden_dropout")
    attention = GroupedQueryAttention(
        rotary_size=rotated,
        holds_pieces=True,
        norm_each=c.flag("qk_layernorm"),
        norm_names=("q_layernorm", "k_layernorm"),
        **attention_fields(c, symbols, bias=c.flag("use_qkv_bias"), output_bias=False),
    )
    mlp = GatedMlp(activation=c.activation("hidden_act", "silu"), dropout=dropout)
    layer: Part = DecoderLayer(attention=attention, mlp=mlp, norm=LAYER_NORM, holds_attention=True)
    if c.flag("use_parallel_residual"):
        layer = ParallelLayer(attention=attention, mlp=mlp, norm=LAYER_NORM)
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "stablelm",
        embedding=TokenEmbedding(rotary_size=rotated),
        head=CausalLmHead(norm=LAYER_NORM),
    )
