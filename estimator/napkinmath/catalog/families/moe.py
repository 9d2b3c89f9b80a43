"""Decoders whose feed-forward is a mixture of experts over plain grouped-query attention."""

from __future__ import annotations

from napkinmath.catalog.families.config import Config, runs
from napkinmath.catalog.families.llama import dense_symbols
from napkinmath.catalog.layers.attention import GroupedQueryAttention
from napkinmath.catalog.layers.decoder import DecoderLayer
from napkinmath.catalog.layers.embedding import TokenEmbedding
from napkinmath.catalog.layers.head import CausalLmHead
from napkinmath.catalog.layers.mlp import GatedMlp
from napkinmath.catalog.layers.moe import Experts, MixtureOfExperts, Router, SharedExpert
from napkinmath.catalog.layers.norm import Norm
from napkinmath.catalog.layers.symbols import fs
from napkinmath.model_spec import ModelSpec, Stage


def expert_symbols(c: Config, *, experts: str, width: str, topk_default: int = 2) -> dict[str, int]:
    """e, topk and fe, with the choice checked against the number of experts."""
    from napkinmath.errors import InputError

    count, chosen = c.size(experts), c.size("num_experts_per_tok", topk_default)
    if chosen > count:
        raise InputError(f"num_experts_per_tok={chosen} is more than {experts}={count}; choose at most all experts")
    return {"e": count, "topk": chosen, "fe": c.size(width)}


# Names of transformers 4 that PEFT 0.21 translates, by the pattern of the model type (utils/transformers_weight_conversion.py
# with transformers' conversion_mapping.py); model types outside those patterns get no adapters on experts and router.
MIXTRAL_NAMES = (("w1", "w3"), ("w2",))
QWEN_NAMES = (("gate_proj", "up_proj"), ("down_proj",))
ROUTER_NAME = ("gate",)


def tied(c: Config, default: bool = False) -> str:
    """Path of the tied embedding, or nothing."""
    return "model.embed_tokens.weight" if c.flag("tie_word_embeddings", default) else ""


def mixtral(c: Config) -> ModelSpec:
    """MixtralForCausalLM (transformers models/mixtral)."""
    symbols = {**dense_symbols(c, kv_default=8), **expert_symbols(c, experts="num_local_experts", width="intermediate_size")}
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            grouped=symbols["k"] != symbols["a"], window=c.size("sliding_window", 0, low=0), dropout=c.number("attention_dropout", 0.0)
        ),
        mlp=MixtureOfExperts(
            router=Router(normalized=True, adapted_as=ROUTER_NAME),
            experts=Experts(activation=c.text("hidden_act", "silu"), adapted_as=MIXTRAL_NAMES),
        ),
    )
    return _decoder(c, (Stage(part=layer, count=symbols["L"], path="model.layers", checkpointed=True),), symbols, "mixtral")


def qwen2_moe(c: Config) -> ModelSpec:
    """Qwen2MoeForCausalLM (transformers models/qwen2_moe)."""
    symbols = {
        **dense_symbols(c, kv_default=16),
        **expert_symbols(c, experts="num_experts", width="moe_intermediate_size", topk_default=4),
        "fs": c.size("shared_expert_intermediate_size", 5632),
    }
    attention = GroupedQueryAttention(
        grouped=symbols["k"] != symbols["a"], bias=c.flag("qkv_bias", True), dropout=c.number("attention_dropout", 0.0)
    )
    activation = c.text("hidden_act", "silu")
    mixture = MixtureOfExperts(
        router=Router(normalized=c.flag("norm_topk_prob"), cast_back=True),
        experts=Experts(activation=activation),
        shared=SharedExpert(mlp=GatedMlp(activation=activation, width=fs, scope="shared_expert"), gated=True, first=True),
    )
    return _decoder(c, _sparse_layers(c, symbols["L"], attention, mixture, activation), symbols, "qwen2_moe")


def qwen3_moe(c: Config) -> ModelSpec:
    """Qwen3MoeForCausalLM (transformers models/qwen3_moe)."""
    symbols = {**dense_symbols(c, kv_default=4), **expert_symbols(c, experts="num_experts", width="moe_intermediate_size", topk_default=8)}
    bias, activation = c.flag("attention_bias"), c.text("hidden_act", "silu")
    attention = GroupedQueryAttention(
        grouped=symbols["k"] != symbols["a"], bias=bias, output_bias=bias, head_norm=Norm(), dropout=c.number("attention_dropout", 0.0)
    )
    mixture = MixtureOfExperts(
        router=Router(normalized=c.flag("norm_topk_prob"), cast_back=True, adapted_as=ROUTER_NAME),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES),
    )
    return _decoder(c, _sparse_layers(c, symbols["L"], attention, mixture, activation, translated=True), symbols, "qwen3_moe")


def _sparse_layers(
    c: Config, layers: int, attention: GroupedQueryAttention, mixture: MixtureOfExperts, activation: str, *, translated: bool = False
) -> tuple[Stage, ...]:
    """Qwen's rule: layer i is sparse unless listed in mlp_only_layers or (i + 1) is not a multiple of decoder_sparse_step.

    `translated`: PEFT moves the names of the projections to the experts, so that dense feed-forwards get no adapter.
    """
    dense_only = c.sizes("mlp_only_layers")
    every = c.size("decoder_sparse_step", 1)
    dense = DecoderLayer(
        attention=attention, mlp=GatedMlp(activation=activation, kind="linear without adapter" if translated else "linear")
    )
    sparse = DecoderLayer(attention=attention, mlp=mixture)
    return runs(
        [
            Stage(part=sparse if i not in dense_only and (i + 1) % every == 0 else dense, path="model.layers", checkpointed=True)
            for i in range(layers)
        ]
    )


def _decoder(
    c: Config,
    layers: tuple[Stage, ...],
    symbols: dict[str, int],
    family: str,
    *,
    embedding: TokenEmbedding = TokenEmbedding(),
    norm: Norm = Norm(),
    head_bias: bool = False,
) -> ModelSpec:
    return c.spec(
        (Stage(part=embedding, path="model"), *layers, Stage(part=CausalLmHead(norm=norm, bias=head_bias, tied_to=tied(c)))),
        symbols,
        family=family,
    )
