"""DeepSeek V2 and V3 (Moonlight, Kimi K2): latent attention, dense first layers, shared and grouped
routed experts."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.symbols import fs
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.moe import (
    QWEN_MODULES,
    QWEN_NAMES,
    ROUTER_NAME,
    expert_symbols,
    sigmoid_router,
    tied,
    unadapted,
)
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.latent_attention import LatentAttention
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.router import Router


def deepseek_v2(c: Config) -> ModelSpec:
    """DeepseekV2ForCausalLM (transformers models/deepseek_v2)."""
    grouped = c.text("topk_method", "greedy") == "group_limited_greedy"
    router = Router(
        fp32=True,
        rescaled=True,
        groups=c.size("n_group", 1) if grouped else 0,
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


def _deepseek(c: Config, router: Router, *, form: str, mlp_bias: bool) -> ModelSpec:
    attention = latent_attention(c, form)
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
    dense, sparse = (
        DecoderLayer(attention=attention, mlp=feed_forward()),
        DecoderLayer(attention=attention, mlp=mixture),
    )
    first = c.size("first_k_dense_replace", 3 if form != "complex" else 0, low=0)
    stages = [
        Stage(part=dense if i < first else sparse, path="model.layers", checkpointed=True)
        for i in range(layers)
    ]
    embedding = TokenEmbedding(rotary_size=attention.turned, complex_rotary=form == "complex")
    parts = (
        Stage(part=embedding, path="model"),
        *runs(stages),
        Stage(part=CausalLmHead(tied_to=tied(c))),
    )
    return c.spec(parts, symbols, family="deepseek")


def latent_attention(c: Config, form: str) -> LatentAttention:
    """The latent attention of a config; a q_lora_rank of null is a full-rank query projection."""
    low_rank = "q_lora_rank" not in c.values or "q_lora_rank" in c
    return LatentAttention(
        plain=c.size("qk_nope_head_dim", 128),
        turned=c.size("qk_rope_head_dim", 64),
        value=c.size("v_head_dim", 128),
        kv_rank=c.size("kv_lora_rank", 512),
        q_rank=c.size("q_lora_rank", 1536) if low_rank else 0,
        form=form,
        bias=c.flag("attention_bias"),
        dropout=c.number("attention_dropout", 0.0),
    )
