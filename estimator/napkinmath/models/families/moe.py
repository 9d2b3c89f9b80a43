"""Decoders whose feed-forward is a mixture of experts over plain grouped-query attention."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.ir.symbols import fs
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import (
    MEGATRON_DROPOUT,
    attention_fields,
    decoder,
    dense_symbols,
)
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.router import Router, Scoring

# Names of transformers 4 that PEFT 0.21 translates, by the pattern of the model type
# (utils/transformers_weight_conversion.py with transformers' conversion_mapping.py); model types
# outside those patterns get no adapters on experts and router.
MIXTRAL_NAMES = (("w1", "w3"), ("w2",))
QWEN_NAMES = (("gate_proj", "up_proj"), ("down_proj",))
# The same linears as modules of one expert each, in transformers 4: gate, up, down.
MIXTRAL_MODULES = ("w1", "w3", "w2")
QWEN_MODULES = ("gate_proj", "up_proj", "down_proj")
ROUTER_NAME = ("gate",)


def expert_symbols(
    c: Config, *, experts: str, width: str, topk: str = "num_experts_per_tok", topk_default: int = 2
) -> dict[str, int]:
    """e, topk and fe, with the choice checked against the number of experts."""
    from napkinmath.base.errors import InputError

    # transformers 5 saves some under the other of these names (attribute_map of Qwen3MoeConfig)
    others = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
    if experts not in c and others.get(experts, experts) in c:
        experts = others[experts]
    count, chosen = c.size(experts), c.size(topk, topk_default)
    if chosen > count:
        raise InputError(
            f"{topk}={chosen} is more than {experts}={count}; choose at most all experts"
        )
    return {"e": count, "topk": chosen, "fe": c.size(width)}


def tied(c: Config, default: bool = False) -> str:
    """Path of the tied embedding, or nothing."""
    return "model.embed_tokens.weight" if c.flag("tie_word_embeddings", default) else ""


def windowed(window: int) -> TokenEmbedding:
    """The embedding of a decoder in which every layer has the window, if there is one."""
    return TokenEmbedding(full_mask=not window, windows=(window,) if window else ())


def mixtral(c: Config) -> ModelSpec:
    """MixtralForCausalLM (transformers models/mixtral)."""
    symbols = {
        **dense_symbols(c, kv_default=8),
        **expert_symbols(c, experts="num_local_experts", width="intermediate_size"),
    }
    window = c.size("sliding_window", 0, low=0)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(window=window, **attention_fields(c, symbols, bias=False)),
        mlp=MixtureOfExperts(
            router=Router(normalized=True, adapted_as=ROUTER_NAME),
            experts=Experts(
                activation=c.activation("hidden_act", "silu"),
                adapted_as=MIXTRAL_NAMES,
                modules=MIXTRAL_MODULES,
            ),
        ),
        dropout=c.probability(MEGATRON_DROPOUT),
    )
    return decoder(c, symbols, [layer] * symbols["L"], "mixtral", embedding=windowed(window))


def qwen2_moe(c: Config) -> ModelSpec:
    """Qwen2MoeForCausalLM (transformers models/qwen2_moe)."""
    symbols = {
        **dense_symbols(c, kv_default=16),
        **expert_symbols(c, experts="num_experts", width="moe_intermediate_size", topk_default=4),
    }
    symbols["fs"] = c.size("shared_expert_intermediate_size", 5632)
    attention = GroupedQueryAttention(
        **attention_fields(c, symbols, bias=c.flag("qkv_bias", True), output_bias=False)
    )
    activation = c.activation("hidden_act", "silu")
    mixture = MixtureOfExperts(
        router=Router(normalized=c.flag("norm_topk_prob"), cast_back=True),
        experts=Experts(activation=activation, modules=QWEN_MODULES),
        shared=SharedExpert(
            mlp=GatedMlp(activation=activation, width=fs, scope="shared_expert"),
            gated=True,
            first=True,
        ),
    )
    return decoder(
        c,
        symbols,
        sparse_layers(c, symbols["L"], attention, mixture, GatedMlp(activation=activation)),
        "qwen2_moe",
    )


def qwen3_moe(c: Config) -> ModelSpec:
    """Qwen3MoeForCausalLM (transformers models/qwen3_moe)."""
    experts = Experts(
        activation=c.activation("hidden_act", "silu"), adapted_as=QWEN_NAMES, modules=QWEN_MODULES
    )
    return _qwen3_moe(c, experts, ROUTER_NAME, unadapted(experts.activation))


def qwen3_vl_moe_text(c: Config) -> ModelSpec:
    """The text of Qwen3VLMoe, whose experts all-linear leaves alone: it is no model that peft
    translates (utils/transformers_weight_conversion.py)."""
    experts = Experts(activation=c.activation("hidden_act", "silu"))
    return _qwen3_moe(c, experts, (), GatedMlp(activation=experts.activation))


def _qwen3_moe(
    c: Config, experts: Experts, router_name: tuple[str, ...], dense: GatedMlp
) -> ModelSpec:
    symbols = {
        **dense_symbols(c, kv_default=4),
        **expert_symbols(c, experts="num_experts", width="moe_intermediate_size", topk_default=8),
    }
    attention = GroupedQueryAttention(head_norm=Norm(), **attention_fields(c, symbols))
    mixture = MixtureOfExperts(
        router=Router(normalized=c.flag("norm_topk_prob"), cast_back=True, adapted_as=router_name),
        experts=experts,
    )
    return decoder(
        c, symbols, sparse_layers(c, symbols["L"], attention, mixture, dense), "qwen3_moe"
    )


def unadapted(activation: str, **fields: object) -> GatedMlp:
    """A dense feed-forward whose projections PEFT's all-linear leaves out, because it has moved
    their names to the experts."""
    return GatedMlp(activation=activation, kind="linear without adapter").replace(**fields)


def sparse_layers(
    c: Config,
    layers: int,
    attention: GroupedQueryAttention,
    mixture: MixtureOfExperts,
    dense: GatedMlp,
) -> list[Part]:
    """Qwen's rule: layer i is sparse unless listed in mlp_only_layers or (i + 1) is not a multiple
    of decoder_sparse_step."""
    dense_only, every = c.layer_indices("mlp_only_layers", layers), c.size("decoder_sparse_step", 1)
    plain, sparse = (
        DecoderLayer(attention=attention, mlp=dense),
        DecoderLayer(attention=attention, mlp=mixture),
    )
    return [
        sparse if i not in dense_only and (i + 1) % every == 0 else plain for i in range(layers)
    ]


def olmoe(c: Config) -> ModelSpec:
    """OlmoeForCausalLM: norms over all query and all key heads (transformers models/olmoe)."""
    symbols = {
        **dense_symbols(c),
        **expert_symbols(c, experts="num_experts", width="intermediate_size", topk_default=8),
    }
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            wide_norm=Norm(), clipped="clip_qkv" in c, **attention_fields(c, symbols)
        ),
        mlp=MixtureOfExperts(
            router=Router(
                normalized=c.flag("norm_topk_prob"), cast_back=True, adapted_as=ROUTER_NAME
            ),
            experts=Experts(
                activation=c.activation("hidden_act", "silu"),
                adapted_as=QWEN_NAMES,
                modules=QWEN_MODULES,
            ),
        ),
    )
    return decoder(c, symbols, [layer] * symbols["L"], "olmoe", padded=True)


def granitemoe(c: Config) -> ModelSpec:
    """GraniteMoeForCausalLM: Granite's multipliers, softmax over the chosen experts (transformers
    models/granitemoe)."""
    symbols = {
        **dense_symbols(c),
        **expert_symbols(c, experts="num_local_experts", width="intermediate_size"),
    }
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)),
        mlp=MixtureOfExperts(
            router=Router(name="router", scoring=Scoring.CHOSEN, cast_back=True),
            experts=Experts(activation=c.activation("hidden_act", "silu"), looped=True),
            scope="block_sparse_moe",
        ),
        scaled=True,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "granitemoe",
        embedding=TokenEmbedding(scaled=True),
        head=CausalLmHead(scaled=True),
    )


def phimoe(c: Config) -> ModelSpec:
    """PhimoeForCausalLM: LayerNorm, biases, the sparse mixer as router (transformers
    models/phimoe).

    The router is a subclass of nn.Linear that returns a tuple: PEFT's all-linear picks it and
    fails, so it is priced without an adapter.
    """
    symbols = {
        **dense_symbols(c, kv_default=8),
        **expert_symbols(c, experts="num_local_experts", width="intermediate_size"),
    }
    window, norm = c.size("sliding_window", 0, low=0), Norm(kind=NormKind.LAYER)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(window=window, **attention_fields(c, symbols)),
        mlp=MixtureOfExperts(
            router=Router(name="router", scoring=Scoring.SPARSE_MIXER, fp32_scores=False),
            experts=Experts(activation=c.activation("hidden_act", "silu"), modules=MIXTRAL_MODULES),
        ),
        norm=norm,
    )
    head = CausalLmHead(norm=norm, bias=c.flag("lm_head_bias"))
    return decoder(
        c, symbols, [layer] * symbols["L"], "phimoe", embedding=windowed(window), head=head
    )


def glm4_moe(c: Config) -> ModelSpec:
    """Glm4MoeForCausalLM: half of each head rotated, dense first layers, sigmoid routing, a shared
    expert (transformers models/glm4_moe)."""
    return _glm4_moe(c, "glm4_moe")


def glm4v_moe_text(c: Config) -> ModelSpec:
    """The text of Glm4vMoeForConditionalGeneration: the same under tables of three axes (transformers
    models/glm4v_moe)."""
    return _glm4_moe(c, "glm4v_moe_text", biased=True, tables_per_row=True)


def _glm4_moe(
    c: Config, family: str, *, biased: bool = False, tables_per_row: bool = False
) -> ModelSpec:
    symbols = {
        **dense_symbols(c),
        **expert_symbols(
            c, experts="n_routed_experts", width="moe_intermediate_size", topk_default=8
        ),
    }
    symbols["fs"] = symbols["fe"] * c.size("n_shared_experts", 1)
    rotated, activation = c.rotated(symbols["dh"], 0.5), c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(
        rotary_size=rotated if rotated != symbols["dh"] else 0,
        head_norm=Norm() if c.flag("use_qk_norm") else None,
        **attention_fields(c, symbols, bias=c.flag("attention_bias", biased), output_bias=False),
    )
    mixture = MixtureOfExperts(
        router=sigmoid_router(c, groups=1),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES, modules=QWEN_MODULES),
        shared=SharedExpert(mlp=unadapted(activation, width=fs, scope="shared_experts")),
    )
    dense, sparse = (
        DecoderLayer(attention=attention, mlp=unadapted(activation)),
        DecoderLayer(attention=attention, mlp=mixture),
    )
    first = c.size("first_k_dense_replace", 1, low=0)
    layers: list[Part] = [dense if i < first else sparse for i in range(symbols["L"])]
    embedding = TokenEmbedding(rotary_size=rotated, tables_per_row=tables_per_row)
    return decoder(c, symbols, layers, family, embedding=embedding)


def layer_kinds(c: Config, layers: int, first_sparse: int) -> list[bool]:
    """Which layers hold experts, from `mlp_layer_types`; without it, those from `first_sparse`
    on."""
    kinds = c.layer_names("mlp_layer_types", layers, ("dense", "sparse"))
    return [kind == "sparse" for kind in kinds] or [i >= first_sparse for i in range(layers)]


def sigmoid_router(c: Config, *, groups: int) -> Router:
    """DeepSeek V3's router, in fp32, with a correction bias; one group takes the same masks as
    several."""
    groups = c.size("n_group", groups)
    chosen = c.size("topk_group", max(groups // 2, 1))
    return Router(
        scoring=Scoring.SIGMOID,
        fp32=True,
        fp32_scores=False,  # the product's own type, which autocast makes its own
        normalized=c.flag("norm_topk_prob", True),
        rescaled=True,
        groups=max(groups, 2),
        chosen_groups=chosen if chosen < groups else 0,
        correction_bias=True,
        adapted_as=ROUTER_NAME,
    )


def minimax_m2(c: Config) -> ModelSpec:
    """MiniMaxM2ForCausalLM: norms over all query and key heads, part of each head rotated, sigmoid
    routing (transformers models/minimax_m2)."""
    symbols = {
        **dense_symbols(c),
        **expert_symbols(c, experts="num_local_experts", width="intermediate_size", topk_default=8),
    }
    rotated = c.size("rotary_dim", c.rotated(symbols["dh"]))
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            wide_norm=Norm(), rotary_size=rotated, **attention_fields(c, symbols, bias=False)
        ),
        mlp=MixtureOfExperts(
            router=Router(
                scoring=Scoring.SIGMOID,
                normalized=True,
                correction_bias=True,
                bias_outside=True,
                adapted_as=ROUTER_NAME,
            ),
            experts=Experts(
                activation=c.activation("hidden_act", "silu"),
                adapted_as=MIXTRAL_NAMES,
                modules=MIXTRAL_MODULES,
            ),
        ),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "minimax_m2",
        embedding=TokenEmbedding(rotary_size=rotated),
    )


def deepseek_moe(c: Config) -> ModelSpec:
    """DeepseekForCausalLM, the first DeepSeekMoE: plain attention, softmax routing, shared experts.

    transformers has no class for it; its own code keeps every expert as a module. Source:
    deepseek-ai/deepseek-moe-16b-base modeling_deepseek.py.
    """
    symbols = {
        **dense_symbols(c),
        **expert_symbols(
            c, experts="n_routed_experts", width="moe_intermediate_size", topk_default=6
        ),
    }
    symbols["fs"] = symbols["fe"] * c.size("n_shared_experts", 2)
    activation = c.activation("hidden_act", "silu")
    attention = GroupedQueryAttention(**attention_fields(c, symbols))
    mixture = MixtureOfExperts(
        router=Router(normalized=c.flag("norm_topk_prob")),
        experts=Experts(activation=activation, modules=QWEN_MODULES),
        shared=SharedExpert(mlp=GatedMlp(activation=activation, width=fs, scope="shared_experts")),
    )
    dense = DecoderLayer(attention=attention, mlp=GatedMlp(activation=activation))
    sparse, first = (
        DecoderLayer(attention=attention, mlp=mixture),
        c.size("first_k_dense_replace", 1, low=0),
    )
    return decoder(
        c, symbols, [dense if i < first else sparse for i in range(symbols["L"])], "deepseek"
    )
