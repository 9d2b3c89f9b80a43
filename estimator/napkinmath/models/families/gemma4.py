"""Gemma 4: text models, and text with the weights of its towers."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import dg, dh, f, k, kg
from napkinmath.models.families.config import Config
from napkinmath.models.families.dense_variants import SLIDING_TABLES
from napkinmath.models.families.llama import decoder, dense_symbols
from napkinmath.models.families.vision_language import joined
from napkinmath.models.layers.gemma4 import NORM, Gemma4Attention, Gemma4Embedding, Gemma4Layer
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.idle import IdleLinear, IdleModule, IdleWeight
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
    saved = c.nested("per_layer_config")
    kinds = {
        tuple(
            one.size(field, default[name])
            for name, field in (("kg", "num_key_value_heads"), ("dg", "head_dim"))
        )
        for index, flag in enumerate(sliding)
        if not flag
        for one in (saved.nested(str(index)),)
    }
    extra = [key for key in saved.values if not key.isdigit() or sliding[int(key)]]
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


# ---------------------------------------------------------------- towers, for which there are no rules

RANGES = ("input_min", "input_max", "output_min", "output_max")
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def gemma4(c: Config) -> ModelSpec:
    """Gemma4ForConditionalGeneration (transformers models/gemma4): the text runs, towers of images
    and sounds lie idle."""
    text = c.nested("text_config")
    tied = text.flag("tie_word_embeddings", True) or c.flag("tie_word_embeddings", True)
    values = {**text.values, "tie_word_embeddings": tied}
    spec = gemma4_text(Config(values, c.name, c.source), joint=True)
    towers: list[Stage] = []
    width = dict(spec.symbols)["h"]
    projected: list[tuple[str, int]] = []
    for field, made, name in (
        ("vision_config", _vision, "embed_vision"),
        ("audio_config", _audio, "embed_audio"),
    ):
        if field in c:
            found, inputs = made(c.nested(field))
            towers += found
            projected.append((name, inputs))
    for name, inputs in projected:
        # with a tied head the last of them is the model's last parameter, which stays whole
        last = tied and name == projected[-1][0]
        kind = "unquantized linear" if last else "linear"
        towers.append(_projection(name, inputs, width, kind))
    return joined(c, towers, spec, "gemma4", idle=True)


def _clipped(
    v: Config, name: str, inputs: int, outputs: int
) -> tuple[IdleLinear, list[IdleWeight]]:
    """Gemma4ClippableLinear: a linear with the ranges of what goes in and comes out."""
    clips = v.flag("use_clipped_linears", v.text("model_type", "") == "gemma4_audio")
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


def _projection(name: str, inputs: int, outputs: int, kind: str = "linear") -> Stage:
    linear = IdleLinear(name="embedding_projection", inputs=inputs, outputs=outputs, kind=kind)
    return _idle(IdleModule(linears=(linear,)), f"model.{name}")


def _vision(v: Config) -> tuple[list[Stage], int]:
    """The tower's stages, and the width of what it gives."""
    width, size = v.size("hidden_size", 768), v.size("head_dim", 64)
    heads = v.size("num_attention_heads", 12) * size
    kv_heads = v.size("num_key_value_heads", 12) * size
    inner, patch = v.size("intermediate_size", 3072), v.size("patch_size", 16)
    table = (2, v.size("position_embedding_size", 10 * 1024), width)
    first = IdleModule(
        linears=(IdleLinear(name="input_proj", inputs=3 * patch**2, outputs=width),),
        weights=(IdleWeight(name="position_embedding_table", axes=table),),
    )
    layer = _module(
        v,
        [
            ("self_attn.q_proj", width, heads),
            ("self_attn.k_proj", width, kv_heads),
            ("self_attn.v_proj", width, kv_heads),
            ("self_attn.o_proj", heads, width),
            ("mlp.gate_proj", width, inner),
            ("mlp.up_proj", width, inner),
            ("mlp.down_proj", inner, width),
        ],
        norms=(
            *((name, width) for name in SANDWICH),
            ("self_attn.q_norm", size),
            ("self_attn.k_norm", size),
        ),
    )
    names = ("std_bias", "std_scale") if v.flag("standardize") else ()
    last = tuple(IdleWeight(name=name, axes=(width,), buffer=True) for name in names)
    return [
        _idle(first, "model.vision_tower.patch_embedder"),
        _idle(layer, "model.vision_tower.encoder.layers", v.size("num_hidden_layers", 16)),
        _idle(IdleModule(weights=last), "model.vision_tower"),
    ], width


def _audio(v: Config) -> tuple[list[Stage], int]:
    """The tower's stages, and the width of what it gives."""
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
    return [
        _idle(first, "model.audio_tower.subsample_conv_projection"),
        _idle(layer, "model.audio_tower.layers", v.size("num_hidden_layers", 12)),
        _idle(IdleModule(linears=(last,)), "model.audio_tower"),
    ], out
