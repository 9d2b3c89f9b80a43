"""MiniMax Text-01 and M1: lightning attention with full attention in between, experts in every
layer."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols
from napkinmath.models.families.moe import (
    MIXTRAL_MODULES,
    MIXTRAL_NAMES,
    ROUTER_NAME,
    expert_symbols,
    windowed,
)
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.lightning import LightningAttention, NormedResidualLayer
from napkinmath.models.layers.moe import Experts, MixtureOfExperts
from napkinmath.models.layers.router import Router

KINDS = ("linear_attention", "full_attention")


def minimax(c: Config) -> ModelSpec:
    """MiniMaxForCausalLM: Mixtral's attention and experts, lightning attention in the layers that
    layer_types says (transformers models/minimax)."""
    symbols, activation = dense_symbols(c, kv_default=8), c.activation("hidden_act", "silu")
    symbols |= expert_symbols(c, experts="num_local_experts", width="intermediate_size")
    kinds = c.layer_names("layer_types", symbols["L"], KINDS) or tuple(
        KINDS[(index + 1) % 2] for index in range(symbols["L"])
    )
    window = c.size("sliding_window", 0, low=0)
    mixture = MixtureOfExperts(
        router=Router(normalized=True, adapted_as=ROUTER_NAME),
        experts=Experts(activation=activation, adapted_as=MIXTRAL_NAMES, modules=MIXTRAL_MODULES),
    )
    full = GroupedQueryAttention(window=window, **attention_fields(c, symbols, bias=False))
    linear = LightningAttention(block=c.size("block_size", 256), activation=activation)
    layers: list[Part] = [
        NormedResidualLayer(attention=linear if kind == KINDS[0] else full, mlp=mixture)
        for kind in kinds
    ]
    return decoder(c, symbols, layers, "minimax", embedding=windowed(window))
