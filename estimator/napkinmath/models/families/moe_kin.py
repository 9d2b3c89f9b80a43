"""Mixtures of experts a small step from another family's: ERNIE 4.5, dots.llm1, GLM 4.7 Flash,
Mistral 4, Solar Open, FlexOlmo, Granite's shared expert, Hunyuan."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.ir.symbols import fs
from napkinmath.models.families.config import Config
from napkinmath.models.families.deepseek import latent_attention
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols
from napkinmath.models.families.moe import (
    QWEN_MODULES,
    QWEN_NAMES,
    ROUTER_NAME,
    expert_symbols,
    layer_kinds,
    sigmoid_router,
    unadapted,
)
from napkinmath.models.layers.attention import GroupedQueryAttention, Rotation
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.latent_attention import LatentAttention
from napkinmath.models.layers.mlp import FusedGatedMlp, GatedMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.router import Router, Scoring

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.models.layers.decoder import Sublayer


def _sigmoid_mixture(c: Config, activation: str) -> MixtureOfExperts:
    """DeepSeek V3's mixture under the names of Qwen's experts, one group of them unless the config
    says otherwise."""
    return MixtureOfExperts(
        router=sigmoid_router(c, groups=1),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES, modules=QWEN_MODULES),
        shared=SharedExpert(mlp=unadapted(activation, width=fs, scope="shared_experts")),
    )


def _layers(
    kinds: list[bool], attention: Sublayer, activation: str, mixture: MixtureOfExperts
) -> list[Part]:
    dense, sparse = (
        DecoderLayer(attention=attention, mlp=unadapted(activation)),
        DecoderLayer(attention=attention, mlp=mixture),
    )
    return [sparse if kind else dense for kind in kinds]


def glm4_moe_lite(c: Config) -> ModelSpec:
    """Glm4MoeLiteForCausalLM: DeepSeek V3's attention and mixture, the first layer dense
    (transformers models/glm4_moe_lite)."""
    attention = latent_attention(c, "pairs" if c.flag("rope_interleave", True) else "halves")
    symbols, activation = _latent_symbols(c, attention), c.activation("hidden_act", "silu")
    parts = _layers(
        layer_kinds(c, symbols["L"], 1), attention, activation, _sigmoid_mixture(c, activation)
    )
    return decoder(
        c, symbols, parts, "glm4_moe_lite", embedding=TokenEmbedding(rotary_size=attention.turned)
    )


def mistral4(c: Config) -> ModelSpec:
    """Mistral4ForCausalLM: DeepSeek V3's attention with queries scaled by position, a softmax over
    all experts in the type of the model (transformers models/mistral4)."""
    defaults = {"qk_nope_head_dim": 64, "kv_lora_rank": 256, "q_lora_rank": 1024}
    given = Config({**defaults, **c.values}, c.name, c.source)
    form = "pairs" if c.flag("rope_interleave", True) else "halves"
    attention = latent_attention(given, form).replace(scaled_by_position=True)
    symbols, activation = _latent_symbols(c, attention), c.activation("hidden_act", "silu")
    router = Router(
        scoring=Scoring.SOFTMAX_BIASED,
        fp32_scores=False,
        normalized=c.flag("norm_topk_prob", True),
        rescaled=True,
        groups=max(c.size("n_group", 1), 2),
    )
    shared = GatedMlp(activation=activation, width=fs, scope="shared_experts")
    mixture = MixtureOfExperts(
        router=router, experts=Experts(activation=activation), shared=SharedExpert(mlp=shared)
    )
    dense, first = GatedMlp(activation=activation), c.size("first_k_dense_replace", 0, low=0)
    parts: list[Part] = [
        DecoderLayer(attention=attention, mlp=mixture if i >= first else dense)
        for i in range(symbols["L"])
    ]
    embedding = TokenEmbedding(rotary_size=attention.turned)
    return decoder(c, symbols, parts, "mistral4", embedding=embedding, padded=True)


def _latent_symbols(c: Config, attention: LatentAttention) -> dict[str, int]:
    """Sizes of a decoder with latent attention and a mixture with shared experts."""
    heads = c.size("num_attention_heads")
    symbols = {
        "h": c.size("hidden_size"),
        "a": heads,
        "k": heads,
        "dh": attention.plain + attention.turned,
        "f": c.size("intermediate_size"),
        "v": c.size("vocab_size"),
        "L": c.size("num_hidden_layers"),
    }
    symbols |= expert_symbols(
        c, experts="n_routed_experts", width="moe_intermediate_size", topk_default=4
    )
    return {**symbols, "fs": symbols["fe"] * c.size("n_shared_experts", 1)}


def dots1(c: Config) -> ModelSpec:
    """Dots1ForCausalLM: Qwen 3's attention, DeepSeek V3's mixture (transformers models/dots1)."""
    symbols = {
        **dense_symbols(c),
        **expert_symbols(
            c, experts="n_routed_experts", width="moe_intermediate_size", topk_default=6
        ),
    }
    symbols["fs"] = symbols["fe"] * c.size("n_shared_experts", 1)
    activation = c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(head_norm=Norm(), **attention_fields(c, symbols))
    kinds = layer_kinds(c, symbols["L"], c.size("first_k_dense_replace", 0, low=0))
    return decoder(
        c, symbols, _layers(kinds, attention, activation, _sigmoid_mixture(c, activation)), "dots1"
    )


def solar_open(c: Config) -> ModelSpec:
    """SolarOpenForCausalLM: Llama's attention, GLM 4.5's mixture in every layer (transformers
    models/solar_open)."""
    symbols = dense_symbols(c, kv_default=8, head_size_default=128, ffn="moe_intermediate_size")
    symbols |= expert_symbols(
        c, experts="n_routed_experts", width="moe_intermediate_size", topk_default=8
    )
    symbols["fs"] = symbols["fe"] * c.size("n_shared_experts", 1)
    activation = c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(**attention_fields(c, symbols, output_bias=False))
    layer = DecoderLayer(attention=attention, mlp=_sigmoid_mixture(c, activation))
    return decoder(c, symbols, [layer] * symbols["L"], "solar_open")


def ernie4_5_moe(c: Config) -> ModelSpec:
    """Ernie4_5_MoeForCausalLM: ERNIE 4.5's attention, softmax routing in fp32 with a bias for the
    choice (transformers models/ernie4_5_moe)."""
    symbols = {
        **dense_symbols(c, kv_default=4),
        **expert_symbols(
            c,
            experts="moe_num_experts",
            width="moe_intermediate_size",
            topk="moe_k",
            topk_default=6,
        ),
    }
    symbols["fs"] = symbols["fe"] * max(c.size("moe_num_shared_experts", 2, low=0), 1)
    bias, activation = c.flag("use_bias"), c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(
        rotation=Rotation.PAIRS_WIDE,
        grouped=symbols["k"] != symbols["a"],
        bias=bias,
        output_bias=bias,
    )
    common = SharedExpert(
        mlp=unadapted(activation, bias=bias, width=fs, scope="shared_experts"), first=True
    )
    mixture = MixtureOfExperts(
        router=Router(
            scoring=Scoring.SOFTMAX_BIASED,
            fp32=True,
            normalized=True,
            correction_bias=True,
            kept_fp32=True,
            cast_back=True,
            adapted_as=ROUTER_NAME,
        ),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES, modules=QWEN_MODULES),
        shared=common if c.size("moe_num_shared_experts", 2, low=0) else None,
    )
    start, end, every = (
        c.size("moe_layer_start_index", 1, low=0),
        c.whole("moe_layer_end_index", -1),
        c.size("moe_layer_interval", 1),
    )
    last = symbols["L"] - 1 if end == -1 else end
    kinds = [(index + 1) % every == 0 and start <= index <= last for index in range(symbols["L"])]
    dense, sparse = (
        DecoderLayer(attention=attention, mlp=unadapted(activation, bias=bias)),
        DecoderLayer(attention=attention, mlp=mixture),
    )
    layers: list[Part] = [sparse if kind else dense for kind in kinds]
    head = CausalLmHead(bias=bias)
    return decoder(
        c,
        symbols,
        layers,
        "ernie4_5_moe",
        embedding=TokenEmbedding(wide_tables=True),
        head=head,
        tied=True,
        padded=True,
    )


def hunyuan_v1_moe(c: Config) -> ModelSpec:
    """HunYuanMoEV1ForCausalLM: Hunyuan's norms after the rotation, softmax routing in fp32, a shared
    expert first (transformers models/hunyuan_v1_moe)."""
    counts = {
        field: _alike(c, field, default) for field, default in (("num_experts", 1), ("moe_topk", 1))
    }
    filled = Config({**c.values, **counts}, c.name, c.source)
    symbols = {
        **dense_symbols(c),
        **expert_symbols(filled, experts="num_experts", width="intermediate_size", topk="moe_topk"),
    }
    activation = c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(
        head_norm=Norm(),
        norm_transposed=True,
        norm_after_rotation=True,
        norm_names=("query_layernorm", "key_layernorm"),
        **attention_fields(c, symbols),
    )
    mixture = MixtureOfExperts(
        router=Router(linear="wg", normalized=True),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES, modules=QWEN_MODULES),
        shared=SharedExpert(mlp=unadapted(activation, scope="shared_mlp"), first=True),
    )
    layer = DecoderLayer(attention=attention, mlp=mixture)
    return decoder(c, symbols, [layer] * symbols["L"], "hunyuan_v1_moe", padded=True)


def _alike(c: Config, field: str, default: int) -> int:
    """A number that the config gives once, or the same for every layer."""
    if not isinstance(c.values.get(field), (list, tuple)):
        return c.size(field, default)
    found = set(c.sizes(field))
    if len(found) != 1:
        raise InputError(
            f"config field {field} of {shown(c.name)} differs by layer; one number is priced"
        )
    return found.pop()


def flex_olmo(c: Config) -> ModelSpec:
    """FlexOlmoForCausalLM: OLMo 2's norms around a mixture (transformers models/flex_olmo)."""
    from napkinmath.models.families.dense_variants import POST_NAMES, WIDE_TABLES

    symbols, norm = (
        {
            **dense_symbols(c),
            **expert_symbols(c, experts="num_experts", width="intermediate_size", topk_default=5),
        },
        Norm(kind=NormKind.RMS_CAST_LAST),
    )
    activation = c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(
        rotation=Rotation.HALVES_FP32, wide_norm=norm, **attention_fields(c, symbols)
    )
    mixture = MixtureOfExperts(
        router=Router(normalized=c.flag("norm_topk_prob"), cast_back=True, adapted_as=ROUTER_NAME),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES, modules=QWEN_MODULES),
    )
    layer = DecoderLayer(attention=attention, mlp=mixture, norm=norm, **POST_NAMES)
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "flex_olmo",
        embedding=WIDE_TABLES,
        head=CausalLmHead(norm=norm),
        padded=True,
    )


def granitemoeshared(c: Config) -> ModelSpec:
    """GraniteMoeSharedForCausalLM: Granite's mixture beside a shared expert (transformers
    models/granitemoeshared)."""
    symbols = {
        **dense_symbols(c),
        **expert_symbols(c, experts="num_local_experts", width="intermediate_size"),
    }
    width, activation = (
        c.size("shared_intermediate_size", 0, low=0),
        c.activation("hidden_act", "silu"),
    )
    symbols["fs"] = max(width, 1)
    common = FusedGatedMlp(
        activation=activation, width=fs, names=("input_linear", "output_linear"), scope="shared_mlp"
    )
    mixture = MixtureOfExperts(
        router=Router(name="router", scoring=Scoring.CHOSEN, cast_back=True),
        experts=Experts(activation=activation, looped=True),
        shared=SharedExpert(mlp=common) if width else None,
        scope="block_sparse_moe",
        shared_outside=True,
    )
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)), mlp=mixture, scaled=True
    )
    embedding, head = TokenEmbedding(scaled=True), CausalLmHead(scaled=True)
    return decoder(
        c, symbols, [layer] * symbols["L"], "granitemoeshared", embedding=embedding, head=head
    )
