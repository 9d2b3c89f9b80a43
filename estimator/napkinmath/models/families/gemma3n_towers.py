"""Gemma 3n's towers, by their weights: images by MobileNet V5 300M, sounds by a conformer. No batch
of text runs them.

Source: timm 1.0.31 models/mobilenetv5.py _gen_mobilenet_v5 and models/_efficientnet_blocks.py;
transformers 5.23 models/gemma3n/modeling_gemma3n.py Gemma3nAudioEncoder.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight

VISION, SOUND = "model.vision_tower.timm_model", "model.audio_tower"
ARCHITECTURE = "mobilenetv5_300m_enc"


def _convolution(name: str, inputs: int, outputs: int, kernel: int = 1) -> IdleWeight:
    return IdleWeight(name=f"{name}.weight", axes=(outputs, inputs, kernel, kernel), kind="conv")


def _norm(name: str, width: int) -> IdleWeight:
    return IdleWeight(name=f"{name}.weight", axes=(width,), kind="norm")


def _scale(name: str, width: int) -> IdleWeight:
    return IdleWeight(name=f"{name}layer_scale.gamma", axes=(width,))


def _edge(inputs: int, middle: int, outputs: int) -> IdleModule:
    """An edge residual block: a 3 x 3 convolution and one of single points."""
    return IdleModule(
        weights=(
            _convolution("conv_exp", inputs, middle, 3),
            _norm("bn1", middle),
            _convolution("conv_pwl", middle, outputs),
            _norm("bn2", outputs),
        )
    )


def _bottleneck(
    inputs: int, middle: int, outputs: int, start: int = 0, depth: int = 0, *, name: str = ""
) -> tuple[IdleWeight, ...]:
    """A universal inverted bottleneck; `start` and `depth` are kernels of its convolutions by
    channel, 0 is none."""
    found = [_convolution(f"{name}dw_start.conv", 1, inputs, start)] if start else []
    found += [_norm(f"{name}dw_start.bn", inputs)] if start else []
    found += [_convolution(f"{name}pw_exp.conv", inputs, middle), _norm(f"{name}pw_exp.bn", middle)]
    found += [_convolution(f"{name}dw_mid.conv", 1, middle, depth)] if depth else []
    found += [_norm(f"{name}dw_mid.bn", middle)] if depth else []
    return (
        *found,
        _convolution(f"{name}pw_proj.conv", middle, outputs),
        _norm(f"{name}pw_proj.bn", outputs),
        _scale(name, outputs),
    )


def _attended(width: int, heads: int, size: int, *, reduces: bool) -> IdleModule:
    """Attention with one key/value head, whose keys and values may be reduced by a convolution, and
    the bottleneck behind it."""
    weights = [_norm("attn.norm", width), _convolution("attn.query.proj", width, heads * size)]
    for one in ("key", "value"):
        if reduces:
            weights.append(_convolution(f"attn.{one}.down_conv", 1, width, 3))
            weights.append(_norm(f"attn.{one}.norm", width))
        weights.append(_convolution(f"attn.{one}.proj", width, size))
    weights += [_convolution("attn.output.proj", heads * size, width), _scale("attn.", width)]
    return IdleModule(weights=(*weights, *_bottleneck(width, 2 * width, width, name="uib.")))


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
    stem = IdleModule(
        weights=(
            _convolution("conv_stem.conv", 3, 64, 3),
            IdleWeight(name="conv_stem.conv.bias", axes=(64,), kind="bias"),
            _norm("conv_stem.bn", 64),
        )
    )
    bottlenecks = (
        (1, 1, (128, 768, 256, 3, 5)),
        (1, 2, (256, 1024, 256, 5)),
        (1, 2, (256, 1024, 256, 3)),
        (2, 1, (256, 1536, 640, 5, 5)),
        (2, 7, (640, 2560, 640, 5)),
        (2, 1, (640, 640, 640)),
        (3, 1, (640, 3840, 1280, 5, 5)),
    )
    fusion = (
        _convolution("ffn.pw_exp.conv", 640 + 1280, 3840),
        _norm("ffn.pw_exp.bn", 3840),
        _convolution("ffn.pw_proj.conv", 3840, 2048),
        _norm("ffn.pw_proj.bn", 2048),
        _norm("norm", 2048),
    )
    return [
        _idle(stem, VISION),
        _idle(_edge(64, 256, 128), f"{VISION}.blocks.0"),
        _idle(_edge(128, 512, 128), f"{VISION}.blocks.0", 2),
        *(
            _idle(IdleModule(weights=_bottleneck(*sizes)), f"{VISION}.blocks.{stage}", count)
            for stage, count, sizes in bottlenecks
        ),
        _idle(_attended(640, 12, 64, reduces=True), f"{VISION}.blocks.2", 14),
        _idle(_attended(1280, 16, 96, reduces=False), f"{VISION}.blocks.3", 19),
        _idle(IdleModule(weights=fusion), f"{VISION}.msfa"),
    ]


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
