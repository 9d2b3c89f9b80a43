"""Qwen's omni models as they are fine-tuned: the thinker, with the weights of its tower of sounds.
The talker and the vocoder take no part.

Source: transformers 5.23 models/qwen2_5_omni and models/qwen3_omni_moe; LLaMA-Factory's and
ms-swift's loaders train `model.thinker`.
"""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.families.qwen_vl import MergerNames, qwen3_tower, windowed_tower
from napkinmath.models.families.vision_language import text_spec
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight, idle_layer_norm

SOUND = "model.audio_tower"


def qwen2_5_omni(c: Config) -> ModelSpec:
    """The thinker of Qwen2_5OmniForConditionalGeneration."""
    return qwen2_5_omni_thinker(c.nested("thinker_config"))


def qwen3_omni_moe(c: Config) -> ModelSpec:
    """The thinker of Qwen3OmniMoeForConditionalGeneration."""
    return qwen3_omni_moe_thinker(c.nested("thinker_config"))


def qwen2_5_omni_thinker(c: Config) -> ModelSpec:
    """Qwen2_5OmniThinkerForConditionalGeneration: Qwen 2.5 VL with a linear each for the q, k and v
    of its tower, and Whisper's encoder."""
    spec = windowed_tower(c, "qwen2_5_omni_thinker", separate=("q", "k", "v"))
    return _with_sounds(spec, _one_dimensional(c.nested("audio_config")))


def qwen3_omni_moe_thinker(c: Config) -> ModelSpec:
    """Qwen3OmniMoeThinkerForConditionalGeneration: Qwen 3 VL's mixture with other names in its
    mergers, and an encoder over two-dimensional convolutions."""
    names = MergerNames(norm="ln_q", linears=("mlp.0", "mlp.2"), deep="merger_list")
    text = text_spec(c, "qwen3_vl_moe_text")
    spec = qwen3_tower(c, text, "qwen3_omni_moe_thinker", names=names)
    return _with_sounds(spec, _two_dimensional(c.nested("audio_config")))


def _with_sounds(spec: ModelSpec, sounds: list[Stage]) -> ModelSpec:
    first, *rest = spec.stages
    return spec.replace(stages=(first, *sounds, *rest))


def _one_dimensional(v: Config) -> list[Stage]:
    """Whisper's convolutions and layers, and a linear into the text's width."""
    width, bins = v.size("d_model", 1280), v.size("num_mel_bins", 128)
    out = v.size("output_dim", 3584)
    convolutions = tuple(
        weight
        for name, inputs in (("conv1", bins), ("conv2", width))
        for weight in (
            IdleWeight(name=f"{name}.weight", axes=(width, inputs, 3), kind="conv"),
            IdleWeight(name=f"{name}.bias", axes=(width,), kind="bias"),
        )
    )
    ids = IdleWeight(name="audio_bos_eos_token.weight", axes=(2, out), kind="embedding")
    last = (IdleLinear(name="proj", inputs=width, outputs=out, bias=True),)
    return _encoder(v, (*convolutions, ids), last, key_bias=False)


def _two_dimensional(v: Config) -> list[Stage]:
    """Three convolutions of two dimensions that each halve both, and two linears behind the
    layers."""
    width, channels = v.size("d_model", 1280), v.size("downsample_hidden_size", 480)
    bins = v.size("num_mel_bins", 128)
    for _ in range(3):
        bins = (bins + 1) // 2
    convolutions = tuple(
        weight
        for name, inputs in (("conv2d1", 1), ("conv2d2", channels), ("conv2d3", channels))
        for weight in (
            IdleWeight(name=f"{name}.weight", axes=(channels, inputs, 3, 3), kind="conv"),
            IdleWeight(name=f"{name}.bias", axes=(channels,), kind="bias"),
        )
    )
    linears = (
        IdleLinear(name="conv_out", inputs=channels * bins, outputs=width),
        IdleLinear(name="proj1", inputs=width, outputs=width, bias=True),
        IdleLinear(name="proj2", inputs=width, outputs=v.size("output_dim", 3584), bias=True),
    )
    return _encoder(v, convolutions, linears, key_bias=True)


def _encoder(
    v: Config, first: tuple[IdleWeight, ...], ends: tuple[IdleLinear, ...], *, key_bias: bool
) -> list[Stage]:
    width, inner = v.size("d_model", 1280), v.size("encoder_ffn_dim", 5120)
    table = (v.size("max_source_positions", 1500), width)
    whole = IdleModule(
        linears=ends,
        weights=(
            *first,
            *idle_layer_norm("ln_post", width),
            IdleWeight(
                name="positional_embedding.positional_embedding",
                axes=table,
                buffer=True,
                dtype="fp32",
            ),
        ),
    )
    layer = IdleModule(
        linears=(
            *(
                IdleLinear(
                    name=f"self_attn.{name}_proj",
                    inputs=width,
                    outputs=width,
                    bias=key_bias or name != "k",
                )
                for name in ("k", "v", "q", "out")
            ),
            IdleLinear(name="fc1", inputs=width, outputs=inner, bias=True),
            IdleLinear(name="fc2", inputs=inner, outputs=width, bias=True),
        ),
        weights=(
            *idle_layer_norm("self_attn_layer_norm", width),
            *idle_layer_norm("final_layer_norm", width),
        ),
    )
    layers = v.size("encoder_layers", 32)
    return [
        Stage(part=whole, path=SOUND, modality="idle"),
        Stage(part=layer, path=f"{SOUND}.layers", count=layers, modality="idle"),
    ]
