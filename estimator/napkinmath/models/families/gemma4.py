"""Gemma 4: text models, and text with its towers."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import dg, dh, f, k, kg
from napkinmath.models.families.config import Config
from napkinmath.models.families.dense_variants import SLIDING_TABLES
from napkinmath.models.families.gemma4_towers import (
    audio_tower,
    frame_embedder,
    patch_embedder,
    vision_tower,
)
from napkinmath.models.families.llama import decoder, dense_symbols
from napkinmath.models.families.vision_language import Seen, joined
from napkinmath.models.layers.gemma4 import NORM, Gemma4Attention, Gemma4Embedding, Gemma4Layer
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def gemma4_unified_text(c: Config) -> ModelSpec:
    """Gemma4UnifiedForCausalLM: Gemma 4 without embeddings for each layer (transformers
    models/gemma4_unified)."""
    return gemma4_text(_unified(c))


def _unified(c: Config) -> Config:
    values = {"sliding_window": 1024, **c.values, "hidden_size_per_layer_input": 0}
    return Config({**values, "enable_moe_block": False}, c.name, c.source)


def gemma4_text(c: Config, *, joint: bool = False) -> ModelSpec:
    """Gemma4ForCausalLM (transformers models/gemma4)."""
    symbols = dense_symbols(c, kv_default=4, head_size_default=256)
    layers = symbols["L"]
    sliding = _kinds(c, layers)
    symbols |= _full_heads(c, sliding, symbols["k"])
    if c.flag("enable_moe_block"):
        symbols |= {
            "e": c.size("num_experts"),
            "topk": c.size("top_k_experts"),
            "fe": c.size("moe_intermediate_size"),
        }
    per_layer, window = (
        c.size("hidden_size_per_layer_input", 256, low=0),
        c.size("sliding_window", 512),
    )
    parts = [_layer(c, symbols, index, sliding, window, per_layer) for index in range(layers)]
    embedding = Gemma4Embedding(
        tables=(SLIDING_TABLES, "") if any(sliding) else ("",),
        windows=(window,) if any(sliding) else (),
        full_size=dg,
        per_layer=per_layer,
        per_layer_rows=c.size("vocab_size_per_layer_input", 262_144),
        layers=layers,
        joint=joint,
    )
    head = CausalLmHead(
        norm=NORM, capped=c.number_or_none("final_logit_softcapping", 0.0) not in (None, 0.0)
    )
    return decoder(
        c, symbols, parts, "gemma4_text", embedding=embedding, head=head, tied=True, padded=True
    )


def _kinds(c: Config, layers: int) -> list[bool]:
    """Which layers have a window: five of six unless said otherwise, never the last."""
    if c.text("use_bidirectional_attention", "vision") == "all":
        raise InputError(
            "config field use_bidirectional_attention='all' has no rules: attention of a Gemma 4"
            " that reads in both directions; use null or 'vision'"
        )
    kinds = c.sliding_layers(layers, [(index + 1) % 6 > 0 for index in range(layers)])
    return [*kinds[:-1], False]


def _full_heads(c: Config, sliding: list[bool], heads: int) -> dict[str, int]:
    """Key/value heads and head size of the full layers: fields of their own, or what a saved config
    says of each layer."""
    found = {
        "kg": c.size("num_global_key_value_heads", heads) if c.flag("attention_k_eq_v") else heads,
        "dg": c.size("global_head_dim", 512),
    }
    if "per_layer_config" in c:
        found = _saved_heads(c, sliding, found)
    c.divides(
        "num_attention_heads",
        "num_global_key_value_heads",
        c.size("num_attention_heads"),
        found["kg"],
    )
    return found


def _saved_heads(c: Config, sliding: list[bool], default: dict[str, int]) -> dict[str, int]:
    given = c.nested("per_layer_config")
    # numbers of layers: whole, as text, or filled up with zeros (to_dict of transformers 5.23)
    keys = {str(int(k)) if str(k).isdecimal() else str(k): v for k, v in given.values.items()}
    saved = Config(keys, given.name, c.source)
    kinds = {
        tuple(
            one.size(field, default[name])
            for name, field in (("kg", "num_key_value_heads"), ("dg", "head_dim"))
        )
        for index, flag in enumerate(sliding)
        if not flag
        for one in (saved.nested(str(index)),)
    }
    extra = [key for key in saved.values if not key.isdecimal() or sliding[int(key)]]
    if len(kinds) > 1 or extra:
        raise InputError(
            f"config field per_layer_config={shown(saved.values)} gives layers of one kind heads"
            " of different sizes; there are rules for full layers that are alike"
        )
    return dict(zip(("kg", "dg"), kinds.pop(), strict=True))


def _layer(
    c: Config,
    symbols: dict[str, int],
    index: int,
    sliding: list[bool],
    window: int,
    per_layer: int,
) -> Part:
    slides, layers = sliding[index], symbols["L"]
    first_reader = layers - c.size("num_kv_shared_layers", 0, low=0)
    reads = index >= first_reader
    shares = first_reader < layers and not reads and slides not in sliding[index + 1 : first_reader]
    activation = c.activation("hidden_activation", "gelu_pytorch_tanh")
    kind: dict[str, Any] = (
        {"size": dh, "heads": k, "window": window, "tables": SLIDING_TABLES}
        if slides
        else {"size": dg, "heads": kg, "joined": c.flag("attention_k_eq_v")}
    )
    attention = Gemma4Attention(
        grouped=symbols["a"] != symbols["k" if slides else "kg"],
        bias=c.flag("attention_bias"),
        dropout=c.probability("attention_dropout"),
        shares=shares,
        reads=reads,
        **kind,
    )
    wide = 2 if reads and c.flag("use_double_wide_mlp") else 1
    return Gemma4Layer(
        attention=attention,
        mlp=GatedMlp(activation=activation, width=wide * f),
        experts=Experts(activation=activation) if c.flag("enable_moe_block") else None,
        per_layer=per_layer,
        layers=layers,
        activation=activation,
    )


def gemma4(c: Config) -> ModelSpec:
    """Gemma4ForConditionalGeneration (transformers models/gemma4): the text, a tower of images, the
    weights of a tower of sounds."""
    text = c.nested("text_config")
    tied = text.flag("tie_word_embeddings", True) or c.flag("tie_word_embeddings", True)
    values = {**text.values, "tie_word_embeddings": tied}
    spec = gemma4_text(Config(values, c.name, c.source), joint=True)
    width = dict(spec.symbols)["h"]
    # with a tied head the last projector's linear is the model's last parameter, which stays whole
    whole = "unquantized linear" if tied else "linear"
    sounds: list[Stage] = []
    if "audio_config" in c:
        sounds = audio_tower(c.nested("audio_config"), width, whole)
    if "vision_config" not in c:
        return joined(c, sounds, spec, "gemma4", idle=True)
    kind = "linear" if sounds else whole
    images = vision_tower(c.nested("vision_config"), width, kind)
    seen = text.text("use_bidirectional_attention", "") == "vision"
    windows = Seen.IN_WINDOWS if seen else Seen.NOT_AHEAD
    return joined(c, [*sounds, *images], spec, "gemma4", seen=windows)


def gemma4_unified(c: Config) -> ModelSpec:
    """Gemma4UnifiedForConditionalGeneration: no towers, linears that bring squares of pixels and
    frames of sound to the text's width (transformers models/gemma4_unified)."""
    text = c.nested("text_config")
    tied = text.flag("tie_word_embeddings", True) or c.flag("tie_word_embeddings", True)
    values = {**text.values, "tie_word_embeddings": tied}
    spec = gemma4_text(_unified(Config(values, c.name, c.source)), joint=True)
    width = dict(spec.symbols)["h"]
    sounds = frame_embedder(c.nested("audio_config"), width) if "audio_config" in c else []
    seen = text.text("use_bidirectional_attention", "vision") == "vision"
    first, *rest = spec.stages
    masked = first.replace(part=first.part.replace(always_masked=seen))
    spec = spec.replace(stages=(masked, *rest))
    if "vision_config" not in c:
        return joined(c, sounds, spec, "gemma4_unified", idle=True)
    images = patch_embedder(c.nested("vision_config"), width)
    return joined(c, [*sounds, images], spec, "gemma4_unified")
