"""Llama 4, text alone and with its vision tower."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import fe
from napkinmath.ir.tiled_pictures import BestFit
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import decoder, dense_symbols
from napkinmath.models.families.vision_language import image
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.llama4 import (
    AllExperts,
    ComplexBidirectionalAttention,
    Llama4Attention,
    Llama4Patches,
    PixelShuffle,
)
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.projectors import LinearProjector
from napkinmath.models.layers.vision_towers import (
    WORDS,
    TowerLayer,
    TowerNorm,
    WithImages,
)


def llama4_text(c: Config) -> ModelSpec:
    """Llama4ForCausalLM (transformers models/llama4)."""
    symbols = dense_symbols(c, kv_default=8, head_size_default=128)
    symbols["f"] = c.size("intermediate_size_mlp", 16384)
    symbols |= {
        "e": c.size("num_local_experts", 16),
        "topk": c.size("num_experts_per_tok", 1),
        "fe": c.size("intermediate_size"),
    }
    layers, chunk, activation = (
        symbols["L"],
        c.size("attention_chunk_size", 0, low=0),
        c.activation("hidden_act", "silu"),
    )
    every = c.size("no_rope_layer_interval", 4)
    turned = c.layer_sizes("no_rope_layers", layers) or tuple(
        int((i + 1) % every != 0) for i in range(layers)
    )
    step = c.size("interleave_moe_layer_step", 1)
    sparse = c.layer_indices("moe_layers", layers, range(step - 1, layers, step))
    expert = AllExperts(
        shared=GatedMlp(activation=activation, width=fe, scope="shared_expert"),
        activation=activation,
    )
    dense = GatedMlp(activation=activation, scope="feed_forward")

    def layer(index: int) -> Part:
        attention = Llama4Attention(
            rotated=bool(turned[index]),
            normed=c.flag("use_qk_norm", True),
            tempered=c.flag("attn_temperature_tuning", True),
            bias=c.flag("attention_bias"),
            window=chunk if turned[index] else 0,
            dropout=c.number("attention_dropout", 0.0),
        )
        mlp = expert if index in sparse else dense
        return DecoderLayer(attention=attention, mlp=mlp, names_outputs=True)

    embedding = TokenEmbedding(complex_rotary=True, windows=(chunk,) if chunk else (), chunked=True)
    return decoder(c, symbols, [layer(i) for i in range(layers)], "llama4", embedding=embedding)


def llama4(c: Config) -> ModelSpec:
    """Llama4ForConditionalGeneration (transformers models/llama4)."""
    v = c.nested("vision_config")
    text = llama4_text(c.nested("text_config"))
    first, *rest = text.stages
    projector = LinearProjector(outputs=dict(text.symbols)["h"], name="linear_1", bias=False)
    stages = [
        first.replace(path=f"language_model.{first.path}", publishes=WORDS, waits=True),
        *image([*_tower(v), Stage(part=projector, path="multi_modal_projector")]),
        Stage(part=WithImages(), modality="image"),
    ]
    for stage in rest:
        part: Part = stage.part
        if isinstance(part, CausalLmHead):
            part = part.replace(tied_to=f"language_model.{part.tied_to}" if part.tied_to else "")
        stages.append(stage.replace(part=part, path=f"language_model.{stage.path}".rstrip(".")))
    return c.spec(tuple(stages), dict(text.symbols), family="llama4")


def _merged_patches(v: Config) -> int:
    """Patches that the pixel shuffle makes one token of; InputError where it makes none."""
    ratio = v.number("pixel_shuffle_ratio", 0.5)
    if not 0.01 <= ratio <= 1:
        raise InputError(
            f"config field pixel_shuffle_ratio={shown(ratio)} is not between 0.01 and 1; Llama 4"
            " has 0.5"
        )
    return round(1 / ratio**2)


def _tower(v: Config) -> list[Stage]:
    width, heads = v.size("hidden_size", 768), v.size("num_attention_heads", 16)
    v.divides("hidden_size", "num_attention_heads", width, heads)
    patch = v.size("patch_size", 14)
    side = v.size("image_size", 448)
    merged = _merged_patches(v)
    attention = ComplexBidirectionalAttention(
        names=("q_proj", "k_proj", "v_proj"), heads=heads, size=width // heads, rotary=True
    )
    layer = TowerLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 5632),
        names=("input_layernorm", "post_attention_layernorm"),
        output="o_proj",
    )
    first = Llama4Patches(
        pictures=BestFit(side=side, patch=patch, per_tile=(side // patch) ** 2 // merged),
        width=width,
        patch=(patch, patch),
        channels=v.size("num_channels", 3),
        rotary_size=width // heads,
    )
    adapter = PixelShuffle(
        inputs=width,
        merged=merged,
        inner=v.size("projector_input_dim", 4096),
        outputs=v.size("projector_output_dim", 4096),
        dropout=v.number("projector_dropout", 0.0),
    )
    return [
        Stage(part=first, path="vision_model"),
        Stage(
            part=layer,
            count=v.size("num_hidden_layers", 34),
            path="vision_model.model.layers",
            checkpointed=True,
        ),
        Stage(
            part=TowerNorm(norm=Norm(kind=NormKind.LAYER), name="layernorm_post"),
            path="vision_model",
        ),
        Stage(part=adapter, path="vision_model.vision_adapter"),
    ]
