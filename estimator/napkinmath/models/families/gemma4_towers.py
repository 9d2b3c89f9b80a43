"""Gemma 4's towers: of images, and the weights of that of sounds, for which there are no rules."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import Part, Stage
from napkinmath.ir.pictures import Budget, MergedBudget
from napkinmath.models.families.config import Config
from napkinmath.models.families.vision_language import DEFAULT_SIDE
from napkinmath.models.layers.gemma4_vision import (
    PADDING,
    RANGES,
    Gemma4Embedder,
    Gemma4Patches,
    Gemma4Pooler,
    Gemma4Squares,
    Gemma4VisionAttention,
    Gemma4VisionLayer,
)
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight
from napkinmath.models.layers.vision_towers import BLOCKS

TOWER = "model.vision_tower"


def vision_tower(v: Config, outputs: int, kind: str) -> list[Stage]:
    """The tower of images and its projector into `outputs`, whose linear is of `kind`."""
    width, size, patch = (
        v.size("hidden_size", 768),
        v.size("head_dim", 64),
        v.size("patch_size", 16),
    )
    heads, kv_heads = v.size("num_attention_heads", 12), v.size("num_key_value_heads", 12)
    v.divides("num_attention_heads", "num_key_value_heads", heads, kv_heads)
    pictures = Budget(side=DEFAULT_SIDE, patch=patch, pooled=v.size("pooling_kernel_size", 3))
    first = Gemma4Patches(
        pictures=pictures,
        width=width,
        patch=(patch, patch),
        positions=v.size("position_embedding_size", 10 * 1024),
        rotary_size=size,
        leaf=False,
    )
    attention = Gemma4VisionAttention(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        clips=v.flag("use_clipped_linears"),
        dropout=v.probability("attention_dropout"),
    )
    layer = Gemma4VisionLayer(
        attention=attention,
        width=width,
        inner=v.size("intermediate_size", 3072),
        activation=v.activation("hidden_activation", "gelu_pytorch_tanh"),
    )
    layers, pooler = (
        v.size("num_hidden_layers", 16),
        Gemma4Pooler(pictures=pictures, standardized=v.flag("standardize")),
    )
    return [
        Stage(part=first, path=TOWER),
        Stage(
            part=layer,
            count=layers,
            path=f"{TOWER}.encoder.layers",
            checkpointed=True,
            closes=(BLOCKS,),
        ),
        Stage(part=pooler, path=TOWER, closes=(PADDING,)),
        Stage(part=Gemma4Embedder(outputs=outputs, kind=kind), path="model.embed_vision"),
    ]


def _clipped(
    v: Config, name: str, inputs: int, outputs: int
) -> tuple[IdleLinear, list[IdleWeight]]:
    """Gemma4ClippableLinear: a linear with the ranges of what goes in and comes out."""
    clips = v.flag("use_clipped_linears", True)
    ranges = [IdleWeight(name=f"{name}.{one}", axes=(1,), buffer=True) for one in RANGES if clips]
    return IdleLinear(name=f"{name}.linear", inputs=inputs, outputs=outputs), ranges


def _module(
    v: Config,
    clipped: list[tuple[str, int, int]],
    *,
    linears: tuple[IdleLinear, ...] = (),
    norms: tuple[tuple[str, int], ...] = (),
    others: tuple[IdleWeight, ...] = (),
) -> IdleModule:
    made = [_clipped(v, *one) for one in clipped]
    weights = [one for _, ranges in made for one in ranges]
    weights += [IdleWeight(name=f"{n}.weight", axes=(w,), kind="norm") for n, w in norms]
    return IdleModule(linears=(*(one for one, _ in made), *linears), weights=(*weights, *others))


def _idle(part: Part, path: str, count: int = 1) -> Stage:
    return Stage(part=part, path=path, count=count, modality="idle")


def audio_tower(v: Config, outputs: int, kind: str) -> list[Stage]:
    """The weights of the tower of sounds and its projector, whose linear is of `kind`."""
    width, heads = v.size("hidden_size", 1024), v.size("num_attention_heads", 8)
    channels = v.sizes("subsampling_conv_channels") or (128, 32)
    if len(channels) != 2:
        raise InputError(
            f"config field subsampling_conv_channels={shown(list(channels))} is not two numbers;"
            " Gemma 4 has [128, 32]"
        )
    one, two = channels
    first = IdleModule(
        linears=(IdleLinear(name="input_proj_linear", inputs=one // 4 * two, outputs=width),),
        weights=(
            IdleWeight(name="layer0.conv.weight", axes=(one, 1, 3, 3), kind="conv"),
            IdleWeight(name="layer0.norm.weight", axes=(one,), kind="norm"),
            IdleWeight(name="layer1.conv.weight", axes=(two, one, 3, 3), kind="conv"),
            IdleWeight(name="layer1.norm.weight", axes=(two,), kind="norm"),
        ),
    )
    fed = [
        (f"feed_forward{which}.ffw_layer_{step}", inputs, outputs_)
        for which in (1, 2)
        for step, inputs, outputs_ in ((1, width, 4 * width), (2, 4 * width, width))
    ]
    attended = [
        (f"self_attn.{name}", width, width) for name in ("q_proj", "k_proj", "v_proj", "post")
    ]
    mixed = [("lconv1d.linear_start", width, 2 * width), ("lconv1d.linear_end", width, width)]
    norms = (
        *(f"feed_forward{w}.{n}_layer_norm" for w in (1, 2) for n in ("pre", "post")),
        "lconv1d.pre_layer_norm",
        "lconv1d.conv_norm",
        "norm_pre_attn",
        "norm_post_attn",
        "norm_out",
    )
    kernel = (width, 1, v.size("conv_kernel_size", 5))
    layer = _module(
        v,
        [*fed, *attended, *mixed],
        linears=(IdleLinear(name="self_attn.relative_k_proj", inputs=width, outputs=width),),
        norms=tuple((name, width) for name in norms),
        others=(
            IdleWeight(name="self_attn.per_dim_scale", axes=(width // heads,)),
            IdleWeight(name="lconv1d.depthwise_conv1d.weight", axes=kernel, kind="conv"),
        ),
    )
    out = v.size("output_proj_dims", 1536)
    last = IdleLinear(name="output_proj", inputs=width, outputs=out, bias=True)
    projection = IdleLinear(name="embedding_projection", inputs=out, outputs=outputs, kind=kind)
    return [
        _idle(first, "model.audio_tower.subsample_conv_projection"),
        _idle(layer, "model.audio_tower.layers", v.size("num_hidden_layers", 12)),
        _idle(IdleModule(linears=(last,)), "model.audio_tower"),
        _idle(IdleModule(linears=(projection,)), "model.embed_audio"),
    ]


def patch_embedder(v: Config, outputs: int) -> Stage:
    """Gemma 4 12B's squares of patches: norms, a linear, a table of positions by row and column."""
    patch, pooled = v.size("patch_size", 16), v.size("pooling_kernel_size", 3)
    width = v.size("mm_embed_dim", 3840)
    if (given := v.size("output_proj_dims", 3840)) != width:
        raise InputError(
            f"config field output_proj_dims={given} is not mm_embed_dim={width}, whose features it"
            " takes; change one of them"
        )
    part = Gemma4Squares(
        pictures=MergedBudget(side=DEFAULT_SIDE, patch=patch, pooled=pooled),
        width=width,
        patch=(patch * pooled,) * 2,
        positions=v.size("mm_posemb_size", 1120),
        leaf=False,
        outputs=outputs,
    )
    return Stage(part=part, path="model.embed_vision")


def frame_embedder(v: Config, outputs: int) -> list[Stage]:
    """Gemma 4 12B's frames of sound: a norm without weights and a linear."""
    linear = IdleLinear(
        name="embedding_projection",
        inputs=v.size("audio_embed_dim", 640),
        outputs=outputs,
        kind="unquantized linear",
    )
    return [_idle(IdleModule(linears=(linear,)), "model.embed_audio")]
