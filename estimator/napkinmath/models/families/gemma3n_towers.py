"""Gemma 3n's towers: images by MobileNet V5 300M; sounds by a conformer, by its weights, which no
batch of text and images runs.

Source: timm 1.0.31 models/mobilenetv5.py _gen_mobilenet_v5 and models/_efficientnet_blocks.py;
transformers 5.23 models/gemma3n/modeling_gemma3n.py Gemma3nAudioEncoder.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import Stage
from napkinmath.ir.pictures import Square
from napkinmath.models.families.config import Config
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight
from napkinmath.models.layers.mobilenet import (
    EdgeResidual,
    InvertedBottleneck,
    LastStage,
    PixelStem,
    PlaceAttention,
    SoftEmbedder,
)

VISION, SOUND = "model.vision_tower.timm_model", "model.audio_tower"
ARCHITECTURE = "mobilenetv5_300m_enc"
# 768 pixels of a side become 16 x 16 tokens, with two blank lines and a mark on either side:
# transformers 5.23 Gemma3nProcessor, and the preprocessor_config.json of the published models
PICTURES = Square(side=768, patch=48, tokens=256, marks=4)


def _convolution(name: str, inputs: int, outputs: int, kernel: int = 1) -> IdleWeight:
    return IdleWeight(name=f"{name}.weight", axes=(outputs, inputs, kernel, kernel), kind="conv")


def _norm(name: str, width: int) -> IdleWeight:
    return IdleWeight(name=f"{name}.weight", axes=(width,), kind="norm")


def _idle(part: IdleModule, path: str, count: int = 1) -> Stage:
    return Stage(part=part, path=path, count=count, modality="idle")


def vision_tower(v: Config) -> list[Stage]:
    """The tower of images."""
    named = v.text("architecture", ARCHITECTURE)
    if named != ARCHITECTURE:
        raise InputError(
            f"config field architecture={shown(named)} of Gemma 3n's tower has no rules; it is"
            f" {ARCHITECTURE!r} in every published one"
        )
    bottlenecks = (
        (1, (768, 256, 3, 5, 2)),
        (1, (1024, 256, 5)),
        (1, (1024, 256, 3)),
        (1, (1024, 256, 5)),
        (1, (1024, 256, 3)),
        (2, (1536, 640, 5, 5, 2)),
        *((2, (2560, 640, 5)),) * 7,
        (2, (640, 640)),
    )
    stages = [Stage(part=PixelStem(pictures=PICTURES), path=VISION)]
    edges = [EdgeResidual(middle=256, outputs=128, stride=2)]
    edges += [EdgeResidual(middle=512, outputs=128)] * 2
    stages += [Stage(part=one, path=f"{VISION}.blocks.0") for one in edges]
    stages += [
        Stage(part=_bottleneck(*sizes), path=f"{VISION}.blocks.{stage}")
        for stage, sizes in bottlenecks
    ]
    third = f"{VISION}.blocks.2"
    for _ in range(14):
        stages.append(Stage(part=PlaceAttention(heads=12, size=64, stride=2), path=third))
        stages.append(Stage(part=_bottleneck(1280, 640), path=third))
    attended = (PlaceAttention(heads=16, size=96), _bottleneck(2560, 1280))
    last = LastStage(
        blocks=(_bottleneck(3840, 1280, 5, 5, 2), *attended * 19),
        outputs=v.size("hidden_size", 2048),
    )
    stages.append(Stage(part=last, path=VISION))
    stages.append(Stage(part=SoftEmbedder(), path="model.embed_vision"))
    return stages


def _bottleneck(
    middle: int, outputs: int, start: int = 0, depth: int = 0, stride: int = 1
) -> InvertedBottleneck:
    return InvertedBottleneck(
        middle=middle, outputs=outputs, start=start, depth=depth, stride=stride
    )


def audio_tower(v: Config) -> list[Stage]:
    """The tower of sounds."""
    width, heads = v.size("hidden_size", 1536), v.size("conf_num_attention_heads", 8)
    one, two = _pair(v, "sscp_conv_channel_size", (128, 32))
    bins = v.size("input_feat_size", 128) // 4
    first = IdleModule(
        linears=(IdleLinear(name="input_proj_linear", inputs=bins * two, outputs=width),),
        weights=(
            _convolution("conv_0.conv", 1, one, 3),
            _norm("conv_0.norm", one),
            _convolution("conv_1.conv", one, two, 3),
            _norm("conv_1.norm", two),
        ),
    )
    ends = ("ffw_layer_start", "ffw_layer_end")
    shapes = [
        *((f"{end}.ffw_layer_1", width, 4 * width) for end in ends),
        *((f"{end}.ffw_layer_2", 4 * width, width) for end in ends),
        *((f"attention.attn.{name}_proj", width, width) for name in "qkv"),
        ("attention.attn.relative_position_embedding.pos_proj", width, width),
        ("attention.post", width, width),
        ("lconv1d.linear_start", width, 2 * width),
        ("lconv1d.linear_end", width, width),
    ]
    norms = (
        *(f"{end}.{which}_layer_norm" for end in ends for which in ("pre", "post")),
        "attention.pre_attn_norm",
        "attention.post_norm",
        "lconv1d.pre_layer_norm",
        "lconv1d.conv_norm",
        "norm",
    )
    buffers = (
        *(f"{where}gradient_clipping" for where in ("", "attention.", "lconv1d.")),
        *(f"{end}.gradient_clipping" for end in ends),
        *(f"attention.attn.{name}" for name in ("q_scale", "softcap", "local_causal_valid_mask")),
    )
    kernel = (width, 1, v.size("conf_conv_kernel_size", 5))
    layer = IdleModule(
        linears=tuple(IdleLinear(name=n, inputs=i, outputs=o) for n, i, o in shapes),
        weights=(
            *(_norm(name, width) for name in norms),
            IdleWeight(name="attention.attn.per_dim_scale", axes=(width // heads,)),
            IdleWeight(name="lconv1d.depthwise_conv1d.weight", axes=kernel, kind="conv"),
            *(IdleWeight(name=name, axes=(1,), buffer=True) for name in buffers),
            IdleWeight(
                name="attention.attn.relative_position_embedding.inv_timescales",
                axes=(width // 2,),
                buffer=True,
            ),
        ),
    )
    return [
        _idle(first, f"{SOUND}.subsample_conv_projection"),
        _idle(layer, f"{SOUND}.conformer", v.size("conf_num_hidden_layers", 12)),
    ]


def _pair(v: Config, field: str, default: tuple[int, int]) -> tuple[int, int]:
    found = v.sizes(field) or default
    if len(found) != 2:
        raise InputError(
            f"config field {field}={shown(list(found))} is not two numbers; Gemma 3n has"
            f" {list(default)}"
        )
    return found[0], found[1]
