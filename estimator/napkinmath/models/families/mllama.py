"""Llama 3.2 Vision: Llama's layers with layers of cross-attention to the tiles of images in
between."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.tiled_pictures import Padded
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.llama import attention_fields, dense_symbols
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mllama import (
    BetweenEncoders,
    CrossAttentionLayer,
    GatedTowerLayer,
    TileAttention,
    TileFeatures,
    Tiles,
    WithCrossMask,
)
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.vision_towers import TowerLayer

TOWER, TEXT = "model.vision_model", "model.language_model"
EXTRA_ROWS = 8
"""Rows of the token table beyond the vocabulary."""


def mllama(c: Config) -> ModelSpec:
    """MllamaForConditionalGeneration: tower, projector, text (transformers models/mllama)."""
    vision, text = c.nested("vision_config"), c.nested("text_config")
    tower, tiles, patches = _tower(vision)
    return c.spec(
        (*tower, *_text(text, TEXT, tiles, patches)),
        dense_symbols(text, kv_default=8),
        family="mllama",
    )


def mllama_text(c: Config) -> ModelSpec:
    """MllamaForCausalLM: the text alone, whose layers of cross-attention lie idle."""
    return c.spec(_text(c, "model", 4, 1601), dense_symbols(c, kv_default=8), family="mllama")


def _text(c: Config, path: str, tiles: int, patches: int) -> tuple[Stage, ...]:
    symbols = dense_symbols(c, kv_default=8)
    fields = {**attention_fields(c, symbols, bias=False)}
    fields.pop("dropout")
    attention, mlp = (
        GroupedQueryAttention(**fields),
        GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    across = c.layer_indices("cross_attention_layers", symbols["L"], range(3, symbols["L"], 5))
    layer = Stage(
        part=DecoderLayer(attention=attention, mlp=mlp), path=f"{path}.layers", checkpointed=True
    )
    crossing = layer.replace(
        part=CrossAttentionLayer(attention=attention, mlp=mlp, patches=tiles * patches),
        modality="across",
    )
    layers = runs([crossing if index in across else layer for index in range(symbols["L"])])
    embedding = WithCrossMask(
        text=TokenEmbedding(extra_rows=EXTRA_ROWS, padded=True), tiles=tiles, patches=patches
    )
    head = CausalLmHead(
        norm_name=f"{path}.norm", upcast=path == "model"
    )  # the joint model leaves them as they are
    return (Stage(part=embedding, path=path), *layers, Stage(part=head))


def _tower(v: Config) -> tuple[tuple[Stage, ...], int, int]:
    """The tower's stages, the tiles of an image and the patches of a tile with its class token."""
    width, heads, tiles = (
        v.size("hidden_size", 1280),
        v.size("attention_heads", v.size("num_attention_heads", 16)),
        v.size("max_num_tiles", 4),
    )
    v.divides("hidden_size", "attention_heads", width, heads)
    patches = (v.size("image_size", 448) // v.size("patch_size", 14)) ** 2 + 1
    ratios = 1 + (len(v.listed("supported_aspect_ratios")) or 8)
    taken = len(v.sizes("intermediate_layers_indices")) or 5
    layer = TowerLayer(
        attention=TileAttention(heads=heads, size=width // heads),
        width=width,
        inner=v.size("intermediate_size", 5120),
        activation=v.activation("hidden_act", "gelu"),
        output_bias=False,
        names=("input_layernorm", "post_attention_layernorm"),
        output="o_proj",
    )
    first = Tiles(
        pictures=Padded(side=v.size("image_size", 448), patch=v.size("patch_size", 14), most=tiles),
        tiles=tiles,
        patches=patches,
        width=width,
        patch=v.size("patch_size", 14),
        channels=v.size("num_channels", 3),
        ratios=ratios,
    )
    last = Stage(
        part=TileFeatures(tiles=tiles, patches=patches, inner=taken),
        path="model",
        modality="image",
        publishes="image features",
    )
    return (
        (
            Stage(part=first, path=TOWER, modality="image"),
            Stage(
                part=layer,
                count=v.size("num_hidden_layers", 32),
                path=f"{TOWER}.transformer.layers",
                modality="image",
            ),
            Stage(part=BetweenEncoders(tiles=tiles, ratios=ratios), path=TOWER, modality="image"),
            Stage(
                part=GatedTowerLayer(layer=layer),
                count=v.size("num_global_layers", 8),
                path=f"{TOWER}.global_transformer.layers",
                modality="image",
            ),
            last,
        ),
        tiles,
        patches,
    )
