"""Qwen 3 Next and Qwen 3.5: gated delta layers with a gated attention layer in every few."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.ir.symbols import fs, lk, lv
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols
from napkinmath.models.families.moe import QWEN_NAMES, ROUTER_NAME, expert_symbols, unadapted
from napkinmath.models.families.qwen_vl import qwen3_tower
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.gated_attention import GatedAttention
from napkinmath.models.layers.gated_delta import GatedDeltaNet
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.router import Router

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.models.layers.decoder import Sublayer

NORM = Norm(kind=NormKind.RMS_GEMMA)


def qwen3_next(c: Config) -> ModelSpec:
    """Qwen3NextForCausalLM (transformers models/qwen3_next)."""
    activation = c.activation("hidden_act", "silu")
    symbols = {**_symbols(c), **_expert_symbols(c, topk=10)}
    mixture = _mixture(c, activation, translated=True)
    every, dense_only = (
        c.size("decoder_sparse_step", 1),
        c.layer_indices("mlp_only_layers", symbols["L"]),
    )
    dense = unadapted(activation)
    mlps: list[Sublayer] = [
        mixture if i not in dense_only and (i + 1) % every == 0 else dense
        for i in range(symbols["L"])
    ]
    return _hybrid(c, symbols, mlps, "qwen3_next", joint=True)


def qwen3_5_text(c: Config) -> ModelSpec:
    """Qwen3_5ForCausalLM, dense (transformers models/qwen3_5)."""
    symbols = _symbols(c)
    mlps: list[Sublayer] = [GatedMlp(activation=c.activation("hidden_act", "silu"))] * symbols["L"]
    return _hybrid(c, symbols, mlps, "qwen3_5", joint=False)


def qwen3_5_moe_text(c: Config) -> ModelSpec:
    """Qwen3_5MoeForCausalLM (transformers models/qwen3_5_moe)."""
    symbols = {**_symbols(c, width="moe_intermediate_size"), **_expert_symbols(c, topk=8)}
    mlps: list[Sublayer] = [
        _mixture(c, c.activation("hidden_act", "silu"), translated=False, normalized=True)
    ] * symbols["L"]
    return _hybrid(c, symbols, mlps, "qwen3_5_moe", joint=False)


def qwen3_5(c: Config) -> ModelSpec:
    """Qwen3_5ForConditionalGeneration and its mixture of experts: Qwen 3 VL's tower before the
    hybrid (transformers models/qwen3_5)."""
    text = c.nested("text_config")
    if "tie_word_embeddings" in c and "tie_word_embeddings" not in text:
        text = Config(
            {**text.values, "tie_word_embeddings": c.flag("tie_word_embeddings")},
            text.name,
            text.source,
        )
    spec = qwen3_5_moe_text(text) if "num_experts" in text else qwen3_5_text(text)
    return qwen3_tower(c, spec, spec.family, deep_features=False)


def _symbols(c: Config, *, width: str = "intermediate_size") -> dict[str, int]:
    return dense_symbols(c, head_size_default=256, ffn=width)


def _expert_symbols(c: Config, *, topk: int) -> dict[str, int]:
    symbols = expert_symbols(
        c, experts="num_experts", width="moe_intermediate_size", topk_default=topk
    )
    return {**symbols, "fs": c.size("shared_expert_intermediate_size", 512)}


def _mixture(
    c: Config, activation: str, *, translated: bool, normalized: bool = False
) -> MixtureOfExperts:
    kind = "linear without adapter" if translated else "linear"
    return MixtureOfExperts(
        router=Router(
            normalized=normalized or c.flag("norm_topk_prob", True),
            cast_back=True,
            adapted_as=ROUTER_NAME if translated else (),
        ),
        experts=Experts(activation=activation, adapted_as=QWEN_NAMES if translated else ((), ())),
        shared=SharedExpert(
            mlp=GatedMlp(activation=activation, width=fs, scope="shared_expert", kind=kind),
            gated=True,
            first=True,
        ),
    )


def _hybrid(
    c: Config, symbols: dict[str, int], mlps: list[Sublayer], family: str, *, joint: bool
) -> ModelSpec:
    rotated = c.rotated(symbols["dh"], 0.25)
    fields = attention_fields(c, symbols)
    attention = GatedAttention(
        bias=bool(fields["bias"]),
        rotary_size=rotated if rotated != symbols["dh"] else 0,
        dropout=c.number("attention_dropout", 0.0),
    )
    symbols |= {
        "lk": c.size("linear_num_key_heads", 16),
        "lv": c.size("linear_num_value_heads", 32),
    }
    c.divides("linear_num_value_heads", "linear_num_key_heads", symbols["lv"], symbols["lk"])
    delta = GatedDeltaNet(
        key_heads=lk,
        value_heads=lv,
        key_size=c.size("linear_key_head_dim", 128),
        value_size=c.size("linear_value_head_dim", 128),
        kernel=c.size("linear_conv_kernel_dim", 4),
        joint=joint,
    )
    every = c.size("full_attention_interval", 4)
    types = c.layer_names(
        "layer_types", symbols["L"], ("full_attention", "linear_attention")
    ) or tuple(
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(symbols["L"])
    )
    layers: list[Part] = [
        DecoderLayer(
            attention=delta if kind == "linear_attention" else attention, mlp=mlp, norm=NORM
        )
        for kind, mlp in zip(types, mlps, strict=True)
    ]
    return decoder(
        c,
        symbols,
        layers,
        family,
        embedding=TokenEmbedding(rotary_size=rotated),
        head=CausalLmHead(norm=NORM),
    )
