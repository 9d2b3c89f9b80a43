"""DeepSeek V2 and V3 (Moonlight, Kimi K2): latent attention, dense first layers, shared and grouped
routed experts."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.symbols import fs
from napkinmath.models.families.config import Config, pads, runs
from napkinmath.models.families.moe import (
    QWEN_MODULES,
    QWEN_NAMES,
    ROUTER_NAME,
    expert_symbols,
    layer_kinds,
    sigmoid_router,
    tied,
    unadapted,
)
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.indexed_attention import IndexedAttention, MaskedEmbedding
from napkinmath.models.layers.latent_attention import LatentAttention
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.router import Router

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def deepseek_v2(c: Config) -> ModelSpec:
    """DeepseekV2ForCausalLM (transformers models/deepseek_v2)."""
    grouped = c.text("topk_method", "greedy") == "group_limited_greedy"
    router = Router(
        fp32=True,
        rescaled=True,
        groups=c.size("n_group", 1) if grouped else 0,
        chosen_groups=c.size("topk_group", 1) if grouped and c.size("n_group", 1) > 1 else 0,
        adapted_as=ROUTER_NAME,
    )
    return _deepseek(c, router, form="complex", mlp_bias=c.flag("mlp_bias"))


def deepseek_v3(c: Config) -> ModelSpec:
    """DeepseekV3ForCausalLM (transformers models/deepseek_v3); the multi-token prediction layer is
    not loaded."""
    router = sigmoid_router(c, groups=8)
    return _deepseek(
        c, router, form="pairs" if c.flag("rope_interleave", True) else "halves", mlp_bias=False
    )


def deepseek_v32(c: Config) -> ModelSpec:
    """DeepseekV32ForCausalLM: V3 with an indexer in every layer (transformers
    models/deepseek_v32)."""
    attention = _indexed_attention(c, heads=64)
    return _indexed(c, [attention] * c.size("num_hidden_layers"), groups=8)


def glm_moe_dsa(c: Config) -> ModelSpec:
    """GlmMoeDsaForCausalLM: DeepSeek V3.2's layer with one group of experts, whose layers return
    the keys that they chose; some take those of the layer before (transformers
    models/glm_moe_dsa)."""
    attention = _indexed_attention(c, heads=32).replace(pairs=True, hands_on=True)
    layers = c.size("num_hidden_layers")
    kinds = c.layer_names("indexer_types", layers, ("full", "shared"))
    every, offset = c.size("index_topk_freq", 1), c.size("index_skip_topk_offset", 2, low=0)
    own = [kind == "full" for kind in kinds] or [
        max(index - offset + 1, 0) % every == 0 for index in range(layers)
    ]
    if "index_topk_pattern" in c and not kinds:
        raise InputError(
            "config field index_topk_pattern has no rules here; give indexer_types, a list of"
            " 'full' and 'shared'"
        )
    if not own[0]:
        raise InputError("config field indexer_types begins with 'shared'; the first is 'full'")
    return _indexed(c, [attention.replace(own=flag) for flag in own], groups=1)


def _indexed_attention(c: Config, *, heads: int) -> IndexedAttention:
    return IndexedAttention(
        **latent_fields(c, "pairs"),
        index_heads=c.size("index_n_heads", heads),
        index_size=c.size("index_head_dim", 128),
        chosen=c.size("index_topk", 2048),
    )


def _indexed(c: Config, attentions: list[IndexedAttention], *, groups: int) -> ModelSpec:
    embedding = MaskedEmbedding(rotary_size=attentions[0].turned, padded=pads(c))
    router = sigmoid_router(c, groups=groups)
    return _deepseek(
        c, router, form="pairs", mlp_bias=False, attentions=attentions, embedding=embedding
    )


def _deepseek(
    c: Config,
    router: Router,
    *,
    form: str,
    mlp_bias: bool,
    attentions: Sequence[LatentAttention] = (),
    embedding: TokenEmbedding | None = None,
) -> ModelSpec:
    attention = attentions[0] if attentions else latent_attention(c, form)
    hidden, heads, layers = (
        c.size("hidden_size"),
        c.size("num_attention_heads"),
        c.size("num_hidden_layers"),
    )
    symbols = {"h": hidden, "a": heads, "k": heads, "dh": attention.plain + attention.turned}
    symbols |= {"f": c.size("intermediate_size"), "v": c.size("vocab_size"), "L": layers}
    symbols |= expert_symbols(
        c, experts="n_routed_experts", width="moe_intermediate_size", topk_default=8
    )
    symbols["fs"] = symbols["fe"] * c.size("n_shared_experts", 1)
    activation = c.activation("hidden_act", "silu")

    def feed_forward(**sizes: object) -> GatedMlp:
        return unadapted(activation, bias=mlp_bias, **sizes)

    mixture = MixtureOfExperts(
        router=router,
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES, modules=QWEN_MODULES),
        shared=SharedExpert(mlp=feed_forward(width=fs, scope="shared_experts")),
    )
    first = c.size("first_k_dense_replace", 3 if form != "complex" else 0, low=0)
    kinds = layer_kinds(c, layers, first)
    dense = feed_forward()
    stages = [
        Stage(
            part=DecoderLayer(attention=one, mlp=mixture if sparse else dense),
            path="model.layers",
            checkpointed=True,
        )
        for one, sparse in zip(attentions or [attention] * layers, kinds, strict=True)
    ]
    embedding = embedding or TokenEmbedding(
        rotary_size=attention.turned, complex_rotary=form == "complex"
    )
    parts = (
        Stage(part=embedding, path="model"),
        *runs(stages),
        Stage(part=CausalLmHead(tied_to=tied(c))),
    )
    return c.spec(parts, symbols, family="deepseek")


def latent_attention(c: Config, form: str) -> LatentAttention:
    """The latent attention of a config; a q_lora_rank of null is a full-rank query projection."""
    return LatentAttention(**latent_fields(c, form))


def latent_fields(c: Config, form: str) -> dict[str, Any]:
    """What latent attention reads from a config."""
    low_rank = "q_lora_rank" not in c.values or "q_lora_rank" in c
    return {
        "plain": c.size("qk_nope_head_dim", 128),
        "turned": c.size("qk_rope_head_dim", 64),
        "value": c.size("v_head_dim", 128),
        "kv_rank": c.size("kv_lora_rank", 512),
        "q_rank": c.size("q_lora_rank", 1536) if low_rank else 0,
        "form": form,
        "bias": c.flag("attention_bias"),
        "dropout": c.number("attention_dropout", 0.0),
    }
