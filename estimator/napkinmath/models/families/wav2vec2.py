"""wav2vec 2.0, HuBERT, UniSpeech, Data2Vec: encoders of samples with a loss over paths of letters."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b
from napkinmath.models.families.config import Config
from napkinmath.models.layers.wav2vec2 import (
    FEATURES,
    PLACES,
    PROJECTED,
    RAW,
    CtcHead,
    PlaceConvolution,
    SoundClassifier,
    SoundConvolutions,
    SoundEntrance,
    SoundLayer,
    SoundNorm,
)
from napkinmath.models.layers.wavlm import GatedPlaceAttention
from napkinmath.models.tasks import CTC, SEQUENCE, named_task

UNPRICED = ("use_weighted_layer_sum", "add_adapter", "conv_pos_batch_norm")
"""Fields that add modules; false where nobody sets them."""


def wav2vec2(c: Config) -> ModelSpec:
    """Wav2Vec2ForCTC and its copies (transformers models/wav2vec2, hubert, unispeech,
    unispeech_sat); a sequence is the steps of the encoder. Layers that a config leaves out at
    random (`layerdrop`) are priced as run."""
    groups = c.size("num_conv_pos_embedding_groups", 16)
    kernel = c.size("num_conv_pos_embeddings", 128)
    first = c.flag("do_stable_layer_norm")
    places = PlaceConvolution(kernel=kernel, groups=groups, activation=_act(c)["activation"])
    return _spec(c, places, norm_first=first)


def wavlm(c: Config) -> ModelSpec:
    """WavLMForCTC: attention with gated relative positions, whose table the first layer has
    (transformers models/wavlm/modeling_wavlm.py)."""
    spec = wav2vec2(c)
    gated = GatedPlaceAttention(dropout=c.probability("attention_dropout", 0.1))
    stages: list[Stage] = []
    for stage in spec.stages:
        if not isinstance(stage.part, SoundLayer):
            stages.append(stage)
            continue
        first = gated.replace(buckets=c.size("num_buckets", 320))
        stages.append(stage.replace(part=stage.part.replace(gated=first), count=1, closes=()))
        if stage.count > 1:
            later = stage.part.replace(gated=gated)
            stages.append(stage.replace(part=later, count=stage.count - 1))
    return spec.replace(stages=tuple(stages))


def data2vec_audio(c: Config) -> ModelSpec:
    """Data2VecAudioForCTC: positions of several convolutions, a norm after every one (transformers
    models/data2vec/modeling_data2vec_audio.py)."""
    groups = c.size("num_conv_pos_embedding_groups", 16)
    places = PlaceConvolution(
        kernel=c.size("conv_pos_kernel_size", 19),
        groups=groups,
        layers=c.size("num_conv_pos_embeddings", 5),
        **_act(c),
    )
    return _spec(c, places, norms="layer")


def _act(c: Config) -> dict[str, str]:
    return {"activation": c.activation("feat_extract_activation", "gelu")}


def _spec(
    c: Config, places: PlaceConvolution, *, norm_first: bool = False, norms: str = ""
) -> ModelSpec:
    for field in UNPRICED:
        if c.flag(field):
            raise InputError(f"config field {field}=true has no rules; run `estimate trace`")
    if c.values.get("adapter_attn_dim") is not None:
        raise InputError(
            f"config field adapter_attn_dim={shown(c.values['adapter_attn_dim'])} has no rules; run"
            " `estimate trace`"
        )
    width, heads = c.size("hidden_size", 768), c.size("num_attention_heads", 12)
    c.divides("hidden_size", "num_attention_heads", width, heads)
    layers = c.size("num_hidden_layers", 12)
    symbols = {
        "h": width,
        "a": heads,
        "k": heads,
        "dh": width // heads,
        "v": c.size("vocab_size", 32),
        "L": layers,
    }
    found = _convolutions(c, norms or c.text("feat_extract_norm", "group"))
    hop = 1
    for stride in found.strides:
        hop *= stride
    masks = tuple(
        c.flag("apply_spec_augment", True) and c.number(f"mask_{axis}_prob", usual) > 0
        for axis, usual in (("time", 0.05), ("feature", 0.0))
    )
    marked = c.number("mask_time_prob", 0.05) > 0 or c.number("mask_feature_prob", 0.0) > 0
    probability = c.probability("hidden_dropout", 0.1)
    entrance = SoundEntrance(
        convolutions=found,
        places=places,
        hop=hop,
        normed_features=c.flag("feat_proj_layer_norm", True),
        projection_dropout=c.probability("feat_proj_dropout"),
        dropout=probability,
        norm_first=norm_first,
        masks=(masks[0], masks[1]),
        marked=marked,
        hands_back=c.text("model_type", "") != "hubert",
    )
    layer = SoundLayer(
        width=c.size("intermediate_size", 3072),
        activation=c.activation("hidden_act", "gelu"),
        dropout=probability,
        attention_dropout=c.probability("attention_dropout", 0.1),
        activation_dropout=c.probability("activation_dropout", 0.1),
        norm_first=norm_first,
    )
    head: Part = CtcHead(dropout=c.probability("final_dropout", 0.1))
    if named_task(next(iter(c.names("architectures")), ""), CTC) == SEQUENCE:
        head = SoundClassifier(width=c.size("classifier_proj_size", 256), classes=c.num_labels())
        entrance = entrance.replace(labels=(b,))
    kind = c.text("model_type", "wav2vec2")
    path = kind.replace("-", "_")
    at_the_end = (PROJECTED, RAW)
    closes = (PLACES,) if norm_first else (PLACES, *at_the_end)
    stages = (
        Stage(part=entrance, path=path, returned=(FEATURES,)),
        Stage(
            part=layer,
            count=layers,
            path=f"{path}.encoder.layers",
            checkpointed=True,
            closes=closes,
        ),
        *((Stage(part=SoundNorm(), path=f"{path}.encoder", closes=at_the_end),) * norm_first),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family=kind)


def _convolutions(c: Config, norms: str) -> SoundConvolutions:
    if norms not in ("group", "layer"):
        raise InputError(f"config field feat_extract_norm={shown(norms)} is not group or layer")
    channels = c.sizes("conv_dim") or (512,) * 7
    kernels = c.sizes("conv_kernel") or (10, 3, 3, 3, 3, 2, 2)
    strides = c.sizes("conv_stride") or (5, 2, 2, 2, 2, 2, 2)
    if not (len(channels) == len(kernels) == len(strides)) or not all(strides):
        raise InputError("config fields conv_dim, conv_kernel and conv_stride differ in length")
    return SoundConvolutions(
        channels=channels,
        kernels=kernels,
        strides=strides,
        bias=c.flag("conv_bias"),
        norms=norms,
        activation=c.activation("feat_extract_activation", "gelu"),
    )
