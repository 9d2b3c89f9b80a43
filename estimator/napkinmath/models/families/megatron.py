"""Megatron-Core's own decoders, whose layer is put together from launch arguments: any norm,
activation, bias, grouping, position and mixture beside any other; and its hybrid of one mixer a layer.

Source: Megatron-LM d98e8a64 megatron/core/models/gpt/gpt_model.py, gpt_layer_specs.py,
models/hybrid/hybrid_model.py and hybrid_layer_allocation.py (letters), transformer/attention.py,
mlp.py, moe/moe_layer.py, multi_latent_attention.py.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.ir.symbols import fs, ma, mg
from napkinmath.models.families.config import Config
from napkinmath.models.families.deepseek import latent_attention
from napkinmath.models.families.llama import MEGATRON_DROPOUT, decoder, dense_symbols
from napkinmath.models.families.moe import expert_symbols
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer, MixerLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.latent_attention import LatentAttention
from napkinmath.models.layers.mamba2 import Mamba2Mixer
from napkinmath.models.layers.mlp import GatedMlp, PlainMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.positions import PositionedEmbedding
from napkinmath.models.layers.router import Router

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from napkinmath.base.expr import Size
    from napkinmath.models.layers.decoder import Sublayer

    Attending: TypeAlias = GroupedQueryAttention | LatentAttention

_NORMS = {
    "RMSNorm": NormKind.RMS,
    "LayerNorm": NormKind.LAYER,
}
_MIXERS = {
    "M": "Mamba 2",
    "*": "attention",
    "+": "latent attention",
    "-": "feed-forward",
    "E": "experts",
}


def megatron(c: Config) -> ModelSpec:
    """Megatron-Core's GPTModel, or its HybridModel where a pattern names the layers."""
    pattern = c.text("hybrid_layer_pattern", "")
    symbols = _symbols(c, pattern)
    norm = Norm(kind=_NORMS[c.text("normalization", "LayerNorm")])
    attention = _attention(c, symbols, norm)
    make = _mixers if pattern else _decoder_layers
    return decoder(
        c,
        symbols,
        make(c, symbols["L"], attention, norm),
        "megatron",
        embedding=_embedding(c, attention),
        head=CausalLmHead(norm=norm),
    )


def _mixers(c: Config, layers: int, attention: Attending, norm: Norm) -> list[Part]:
    pattern = c.text("hybrid_layer_pattern", "")
    made = {letter: _mixer(c, letter, attention) for letter in sorted(set(pattern))}
    parts = {letter: MixerLayer(mixer=mixer, norm=norm) for letter, mixer in made.items()}
    return [parts[letter] for letter in pattern]


def _mixer(c: Config, letter: str, attention: Attending) -> Sublayer:
    if letter == "M":
        return _mamba(c)
    if letter == "E":
        return _mixture(c)
    return _feed_forward(c) if letter == "-" else attention


def _decoder_layers(c: Config, layers: int, attention: Attending, norm: Norm) -> list[Part]:
    dropout = c.probability(MEGATRON_DROPOUT)
    kinds = _sparse(c, layers)
    made = {
        sparse: DecoderLayer(
            attention=attention,
            mlp=_mixture(c) if sparse else _feed_forward(c),
            norm=norm,
            dropout=dropout,
        )
        for sparse in sorted(set(kinds))
    }
    return [made[sparse] for sparse in kinds]


def _symbols(c: Config, pattern: str) -> dict[str, int]:
    odd = sorted({letter for letter in pattern if letter not in _MIXERS})
    if odd:
        raise InputError(
            f"hybrid_layer_pattern of Megatron-LM has {shown(', '.join(odd))}, for which there are no"
            f" rules; read are {', '.join(f'{k} ({v})' for k, v in _MIXERS.items())}"
        )
    symbols = dense_symbols(c)
    if pattern:
        symbols["L"] = len(pattern)
        symbols["ma"] = c.size("mamba_num_heads", 2 * symbols["h"] // c.size("mamba_head_dim", 64))
        symbols["mg"] = c.size("mamba_num_groups", 8)
    if "num_experts" in c or "E" in pattern:
        symbols |= expert_symbols(
            c, experts="num_experts", width="moe_ffn_hidden_size", topk="moe_router_topk"
        )
        if "moe_shared_expert_intermediate_size" in c:
            symbols["fs"] = c.size("moe_shared_expert_intermediate_size")
    return symbols


def _attention(c: Config, symbols: dict[str, int], norm: Norm) -> Attending:
    if c.flag("multi_latent_attention"):
        return latent_attention(c, "pairs").replace(norm=norm)
    bias = c.flag("add_bias_linear", True)
    rotary = c.text("position_embedding_type", "rope") in ("rope", "yarn", "mrope")
    return GroupedQueryAttention(
        grouped=symbols["k"] != symbols["a"],
        bias=bias or c.flag("add_qkv_bias"),
        output_bias=bias,
        dropout=c.probability("attention_dropout"),
        rotary=rotary,
        rotary_size=_turned(c, symbols["dh"]),
        head_norm=norm if c.flag("qk_layernorm") else None,
    )


def _turned(c: Config, size: int) -> int:
    """The rotated part of a head, 0 where it is whole."""
    part = int(size * c.number("rotary_percent", 1.0))
    return part if part < size else 0


def _feed_forward(c: Config, width: Size | None = None, scope: str = "mlp") -> GatedMlp | PlainMlp:
    kind = GatedMlp if c.flag("gated", True) else PlainMlp
    found = kind(
        activation=c.activation("activation", "silu"),
        bias=c.flag("add_bias_linear", True),
        scope=scope,
    )
    return found if width is None else found.replace(width=width)


def _mixture(c: Config) -> MixtureOfExperts:
    shared = None
    if "moe_shared_expert_intermediate_size" in c:
        shared = SharedExpert(
            mlp=_feed_forward(c, fs, "shared_experts"), gated=c.flag("moe_shared_expert_gate")
        )
    return MixtureOfExperts(
        router=Router(normalized=True),
        experts=Experts(
            activation=c.activation("activation", "silu"),
            gated=c.flag("gated", True),
            bias=c.flag("add_bias_linear", True),
        ),
        shared=shared,
        latent=c.size("moe_latent_size", 0, low=0),
    )


def _mamba(c: Config) -> Mamba2Mixer:
    """core/ssm/mamba_mixer.py: a kernel of 4, chunks of 128, a norm over each group."""
    return Mamba2Mixer(
        heads=ma,
        size=c.size("mamba_head_dim", 64),
        state=c.size("mamba_state_dim", 128),
        groups=mg,
        chunk=128,
        kernel=4,
        bias=False,
        conv_bias=True,
        norm_groups=mg,
    )


def _sparse(c: Config, layers: int) -> list[bool]:
    """Which layers hold experts: every n-th from the first, or as a list says."""
    if "num_experts" not in c:
        return [False] * layers
    given: object = c.values.get("moe_layer_freq", 1)
    if not isinstance(given, int):
        listed = values.listed(given)
        c.same_length("moe_layer_freq", len(listed), layers)
        return [bool(one) for one in listed]
    every = c.size("moe_layer_freq", 1)
    return [index % every == 0 for index in range(layers)]


def _embedding(c: Config, attention: Attending) -> TokenEmbedding | PositionedEmbedding:
    dropout = c.probability(MEGATRON_DROPOUT)
    if isinstance(attention, LatentAttention):  # which rotates by itself
        return TokenEmbedding(rotary_size=attention.turned, dropout=dropout)
    if c.text("position_embedding_type", "rope") == "learned_absolute":
        return PositionedEmbedding(
            name="embed_tokens",
            position_name="position_embeddings",
            rows=c.size("max_position_embeddings"),
            dropout=dropout,
        )
    return TokenEmbedding(
        rotary=attention.rotary, rotary_size=attention.rotary_size, dropout=dropout
    )
