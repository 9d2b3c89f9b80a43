"""Muse Glimmer: the text with the weights of its tower."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.families.gemma import SANDWICH
from napkinmath.models.families.llama import decoder, dense_symbols
from napkinmath.models.families.vision_language import joined
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight, idle_layer_norm
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.muse import MuseAttention
from napkinmath.models.layers.norm import Norm, NormKind

TOWER = "model.vision_tower"


def muse_glimmer(c: Config) -> ModelSpec:
    """MuseGlimmerForConditionalGeneration on text (transformers models/muse_glimmer)."""
    vision = c.nested("vision_config") if "vision_config" in c else Config({}, c.name, c.source)
    text = _text(c.nested("text_config"))
    return joined(c, _tower(c, vision, dict(text.symbols)["h"]), text, "muse_glimmer", idle=True)


def _text(c: Config) -> ModelSpec:
    symbols = dense_symbols(c, kv_default=2, head_size_default=128)
    layers, window = symbols["L"], c.size("sliding_window", 2048)
    fourth = [(layers - 1 - index) % 4 == 0 for index in range(layers)]
    sliding = c.sliding_layers(layers, [not full for full in fourth])
    bases = c.layer_sizes("layer_rope_theta", layers)
    turned = [base > 0 for base in bases] if bases else [not full for full in fourth]
    mlp = GatedMlp(activation=c.activation("hidden_activation", "silu"))
    parts: list[Part] = [
        DecoderLayer(
            attention=MuseAttention(
                grouped=symbols["a"] != symbols["k"],
                bias=c.flag("attention_bias"),
                window=window if slides else 0,
                turned=turns,
                dropout=c.probability("attention_dropout"),
            ),
            mlp=mlp,
            **SANDWICH,
        )
        for slides, turns in zip(sliding, turned, strict=True)
    ]
    return decoder(
        c,
        symbols,
        parts,
        "muse_glimmer",
        embedding=TokenEmbedding(normed_inside=True, windows=(window,) if any(sliding) else ()),
        head=CausalLmHead(norm=Norm(kind=NormKind.RMS_POWER), scaled=True, capped=True),
    )


def _tower(c: Config, v: Config, outputs: int) -> list[Stage]:
    width, inner = v.size("hidden_size", 1536), v.size("intermediate_size", 8960)
    pixels = 3 * v.size("patch_temporal", 2) * v.size("patch_size", 14) ** 2
    places = v.size("pos_emb_height", 32) * v.size("pos_emb_width", 32)
    projected = c.size("projector_hidden_size", 4096)
    frequencies = width // v.size("num_attention_heads", 16) // 4
    first = IdleModule(
        linears=(IdleLinear(name="patch_embedder.patch_embedding", inputs=pixels, outputs=width),),
        weights=(
            IdleWeight(
                name="patch_embedder.position_embedding_table.weight",
                axes=(places, width),
                kind="embedding",
            ),
            *idle_layer_norm("ln_pre", width),
            *idle_layer_norm("ln_post", width),
            *(
                IdleWeight(
                    name=f"rotary_emb.{name}", axes=(frequencies,), buffer=True, dtype="fp32"
                )
                for name in ("inv_freq", "original_inv_freq")
            ),
        ),
    )
    square = [f"attn.{name}" for name in ("proj", "q_proj", "k_proj", "v_proj")]
    layer = IdleModule(
        linears=(
            *(IdleLinear(name=name, inputs=width, outputs=width, bias=True) for name in square),
            IdleLinear(name="mlp.fc1", inputs=width, outputs=inner, bias=True),
            IdleLinear(name="mlp.fc2", inputs=inner, outputs=width, bias=True),
        ),
        weights=(*idle_layer_norm("norm1", width), *idle_layer_norm("norm2", width)),
    )
    merged = c.size("out_hidden_size", 6144)
    adapter = IdleModule(
        linears=(
            IdleLinear(name="vision_adapter.fc1", inputs=merged, outputs=projected),
            IdleLinear(name="vision_adapter.fc2", inputs=projected, outputs=projected),
            IdleLinear(name="vision_projection", inputs=projected, outputs=outputs),
        )
    )
    return [
        Stage(part=first, path=TOWER, modality="idle"),
        Stage(
            part=layer,
            path=f"{TOWER}.layers",
            count=v.size("num_hidden_layers", 50),
            modality="idle",
        ),
        Stage(part=adapter, path="model", modality="idle"),
    ]
