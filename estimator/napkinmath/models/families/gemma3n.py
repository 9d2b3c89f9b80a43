"""Gemma 3n: the text model, and the text with the weights of its towers."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import f
from napkinmath.models.families.config import Config
from napkinmath.models.families.dense_variants import SLIDING_TABLES
from napkinmath.models.families.gemma3n_towers import audio_tower, vision_tower
from napkinmath.models.families.llama import decoder, dense_symbols
from napkinmath.models.families.vision_language import image
from napkinmath.models.layers.gemma3n import (
    AltUp,
    Gemma3nEmbedding,
    Gemma3nHead,
    Gemma3nLayer,
    Placeholders,
    SparseMlp,
    WithGemma3nImages,
    held_names,
)
from napkinmath.models.layers.gemma4 import NORM, Gemma4Attention
from napkinmath.models.layers.vision_towers import WORDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TEXT = "model.language_model"

MAX_COPIES = 512  # of the hidden states; its models have 4, and each is projected by itself
SPARSE_LAYERS = 10  # of a model with more than that, where the config does not say


def gemma3n(c: Config) -> ModelSpec:
    """Gemma3nForConditionalGeneration: the ids of images and sounds are embedded in every place, the
    tower of sounds lies idle."""
    text, images, sounds = (c.nested(f"{one}_config") for one in ("text", "vision", "audio"))
    spec = gemma3n_text(text)
    beside = (
        _placeholders("embed_vision", images, 2048, between=True),
        _placeholders("embed_audio", sounds, 1536, kind="unquantized linear"),
    )
    first, *layers, head = spec.stages
    assert isinstance(first.part, Gemma3nEmbedding) and isinstance(head.part, Gemma3nHead)
    tied = head.part.tied_to and f"{TEXT}.embed_tokens.weight"
    held = [name for one in beside for name in one.holds]
    last = layers[-1].replace(closes=(*layers[-1].closes, *held))
    embedding = first.part.replace(beside=beside)
    stages = (
        Stage(part=embedding, path="model", publishes=WORDS, waits=True),
        *image(vision_tower(images)),
        Stage(part=WithGemma3nImages(text=embedding), path="model", modality="image"),
        *audio_tower(sounds),
        *(one.replace(path=f"{TEXT}.layers") for one in (*layers[:-1], last)),
        head.replace(part=head.part.replace(norm_name=f"{TEXT}.norm", tied_to=tied, is_last=False)),
    )
    return c.spec(stages, dict(spec.symbols), family="gemma3n")


def _placeholders(name: str, v: Config, width: int, **kind: Any) -> Placeholders:
    return Placeholders(
        name=name,
        rows=v.size("vocab_size", 128),
        width=v.size("hidden_size", width),
        **kind,
    )


def gemma3n_text(c: Config) -> ModelSpec:
    """Gemma3nForCausalLM (transformers models/gemma3n)."""
    layers = c.size("num_hidden_layers", 35)
    widths = (
        c.sizes("intermediate_size") if isinstance(c.values.get("intermediate_size"), list) else ()
    )
    if widths:
        c.same_length("intermediate_size", len(widths), layers)
    values = {**c.values, "intermediate_size": max(widths)} if widths else c.values
    symbols = dense_symbols(Config(values, c.name, c.source), kv_default=2, head_size_default=256)
    sliding = c.sliding_layers(layers, [(index + 1) % 5 > 0 for index in range(layers)])
    copies = c.size("altup_num_inputs", 4, low=2, high=MAX_COPIES)
    window = c.size("sliding_window", 512)
    per_layer = c.size("hidden_size_per_layer_input", 256)
    sparse = _sparse_layers(c, layers)
    parts: list[Part] = [
        Gemma3nLayer(
            attention=_attention(c, symbols, index, sliding, window),
            mlp=SparseMlp(
                activation=c.activation("hidden_activation", "gelu_pytorch_tanh"),
                width=widths[index] if widths else f,
                sparse=sparse[index],
            ),
            altup=AltUp(
                copies=copies,
                clipped=c.number_or_none("altup_coef_clip", 120.0) is not None,
                scaled=c.flag("altup_correct_scale", True),
            ),
            per_layer=per_layer,
            laurel_rank=c.size("laurel_rank", 64),
            activation=c.activation("hidden_activation", "gelu_pytorch_tanh"),
        )
        for index in range(layers)
    ]
    embedding = Gemma3nEmbedding(
        tables=(SLIDING_TABLES, "") if any(sliding) else ("",),
        windows=(window,) if any(sliding) else (),
        per_layer=per_layer,
        per_layer_rows=c.size("vocab_size_per_layer_input", 262_144),
        layers=layers,
        copies=copies,
    )
    head = Gemma3nHead(
        norm=NORM,
        capped=c.number_or_none("final_logit_softcapping", 30.0) is not None,
        copies=copies,
    )
    spec = decoder(
        c, symbols, parts, "gemma3n_text", embedding=embedding, head=head, tied=True, padded=True
    )
    *first, last, exit_ = spec.stages
    return spec.replace(stages=(*first, last.replace(closes=held_names(copies)), exit_))


def _sparse_layers(c: Config, layers: int) -> list[bool]:
    """Which layers cut their gates."""
    if "activation_sparsity_pattern" not in c:
        count = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return [index < count for index in range(layers)]
    pattern = c.listed("activation_sparsity_pattern")
    c.same_length("activation_sparsity_pattern", len(pattern), layers)
    found = [float(one) for one in pattern if isinstance(one, (int, float))]
    if len(found) != layers or not all(0 <= one < 1 for one in found):
        raise InputError(
            f"config field activation_sparsity_pattern={shown(pattern)} is not a list of shares;"
            " use 0 <= share < 1"
        )
    return [one > 0 for one in found]


def _attention(
    c: Config, symbols: dict[str, int], index: int, sliding: list[bool], window: int
) -> Gemma4Attention:
    layers, slides = symbols["L"], sliding[index]
    first_reader = layers - c.size("num_kv_shared_layers", 15, low=0)
    reads = index >= first_reader
    if set(sliding[: max(first_reader, 0)]) != set(sliding):
        raise InputError(
            "config field num_kv_shared_layers leaves a kind of layer without keys and values;"
            " use fewer"
        )
    return Gemma4Attention(
        grouped=symbols["a"] != symbols["k"],
        window=window if slides else 0,
        tables=SLIDING_TABLES if slides else "",
        bias=c.flag("attention_bias"),
        dropout=c.probability("attention_dropout"),
        values_last=True,
        reads=reads,
        shares=first_reader < layers
        and not reads
        and slides not in sliding[index + 1 : first_reader],
    )
