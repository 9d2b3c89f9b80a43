"""Hybrids: state-space or convolutional layers with attention layers in between (Jamba, Granite 4,
Nemotron-H, Bamba, Falcon H1, LFM2)."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.ir.symbols import fs, ma, mg, mi
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols
from napkinmath.models.families.moe import QWEN_MODULES, sigmoid_router
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer, MixerLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.falcon_h1 import MixedLayer, MultipliedMlp
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mamba import MambaMixer
from napkinmath.models.layers.mamba2 import Mamba2Mixer
from napkinmath.models.layers.mlp import FusedGatedMlp, GatedMlp, PlainMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.router import Router, Scoring
from napkinmath.models.layers.short_convolution import ShortConvolution

MAMBA_NAMES = ("mamba", "linear_attention")  # of transformers 4 and 5


def jamba(c: Config) -> ModelSpec:
    """JambaForCausalLM: one attention layer in a period, experts in every other feed-forward
    (transformers models/jamba)."""
    symbols, activation = dense_symbols(c, kv_default=8), c.activation("hidden_act", "silu")
    experts = c.size("num_experts", 16)
    symbols |= {"e": experts, "topk": c.size("num_experts_per_tok", 2), "fe": symbols["f"]}
    symbols["mi"] = c.size("mamba_expand", 2) * symbols["h"]
    rank = (
        c.size("mamba_dt_rank")
        if isinstance(c.values.get("mamba_dt_rank"), int)
        else -(-symbols["h"] // 16)
    )
    mixer = MambaMixer(
        inner=mi,
        state=c.size("mamba_d_state", 16),
        rank=rank,
        kernel=c.size("mamba_d_conv", 4),
        bias=c.flag("mamba_proj_bias"),
        conv_bias=c.flag("mamba_conv_bias", True),
        norm=Norm(),
        norm_names=("dt_layernorm", "b_layernorm", "c_layernorm"),
        scope="mamba",
        adapted=True,
    )
    attention = GroupedQueryAttention(rotary=False, **attention_fields(c, symbols, bias=False))
    dense = GatedMlp(activation=activation, scope="feed_forward")
    mixture = MixtureOfExperts(
        router=Router(name="router", cast_back=True),
        experts=Experts(activation=activation, modules=QWEN_MODULES),
        scope="feed_forward",
    )
    attends = (c.size("attn_layer_period", 8), c.size("attn_layer_offset", 4, low=0))
    mixes = (c.size("expert_layer_period", 2), c.size("expert_layer_offset", 1, low=0))
    layers: list[Part] = [
        DecoderLayer(
            attention=attention if i % attends[0] == attends[1] else mixer,
            mlp=mixture if experts > 1 and i % mixes[0] == mixes[1] else dense,
            names=("input_layernorm", "pre_ff_layernorm"),
        )
        for i in range(symbols["L"])
    ]
    head = CausalLmHead(norm_name="model.final_layernorm")
    return decoder(
        c, symbols, layers, "jamba", embedding=TokenEmbedding(rotary=False), head=head, padded=True
    )


def granitemoehybrid(c: Config) -> ModelSpec:
    """GraniteMoeHybridForCausalLM, Granite 4: Mamba 2 with few attention layers, shared and routed
    experts (transformers models/granitemoehybrid)."""
    symbols, activation = dense_symbols(c), c.activation("hidden_act", "silu")
    experts = c.size("num_local_experts", 8, low=0)
    symbols |= {
        "e": max(experts, 1),
        "topk": max(c.size("num_experts_per_tok", 2, low=0), 1),
        "fe": symbols["f"],
        "fs": c.size("shared_intermediate_size", 1024),
    }
    types = c.names("layer_types") or c.names("layers_block_type") or ("mamba",) * symbols["L"]
    c.same_length(
        "layer_types" if "layer_types" in c else "layers_block_type", len(types), symbols["L"]
    )
    heads = c.size("mamba_n_heads", 128)
    size = (
        c.size("mamba_d_head")
        if isinstance(c.values.get("mamba_d_head"), int)
        else c.size("mamba_expand", 2) * symbols["h"] // heads
    )
    symbols |= {"ma": heads, "mg": c.size("mamba_n_groups", 1)}
    mixer = Mamba2Mixer(
        heads=ma,
        size=size,
        state=c.size("mamba_d_state", 256),
        groups=mg,
        chunk=c.size("mamba_chunk_size", 256),
        kernel=c.size("mamba_d_conv", 4),
        bias=c.flag("mamba_proj_bias"),
        conv_bias=c.flag("mamba_conv_bias", True),
        norm_groups=mg,
        scope="mamba",
        adapted=True,
    )
    rotary = c.text("position_embedding_type", "") == "rope"
    attention = GroupedQueryAttention(rotary=rotary, **attention_fields(c, symbols))
    shared = FusedGatedMlp(
        activation=activation, width=fs, names=("input_linear", "output_linear"), scope="shared_mlp"
    )
    mixture = MixtureOfExperts(
        router=Router(name="router", scoring=Scoring.CHOSEN, cast_back=True),
        experts=Experts(activation=activation, looped=True),
        shared=SharedExpert(mlp=shared),
        scope="block_sparse_moe",
        shared_outside=True,
    )
    mlp = mixture if experts else shared
    layers: list[Part] = [
        DecoderLayer(attention=mixer if kind in MAMBA_NAMES else attention, mlp=mlp, scaled=True)
        for kind in types
    ]
    return decoder(
        c,
        symbols,
        layers,
        "granitemoehybrid",
        embedding=TokenEmbedding(rotary=rotary, scaled=True),
        head=CausalLmHead(scaled=True),
    )


def nemotron_h(c: Config) -> ModelSpec:
    """NemotronHForCausalLM: every layer is one mixer, Mamba 2, attention, feed-forward or experts
    (transformers models/nemotron_h)."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads", 32)
    kinds = _nemotron_layers(c)
    symbols = {
        "h": hidden,
        "a": heads,
        "k": c.size("num_key_value_heads", 8),
        "dh": c.size("head_dim", 128),
        "f": c.size("intermediate_size", 21504),
    }
    symbols |= {
        "v": c.size("vocab_size"),
        "L": len(kinds),
        "e": c.size("n_routed_experts", 8),
        "topk": c.size("num_experts_per_tok", 2),
    }
    symbols |= {
        "fe": c.size("moe_intermediate_size", 7688),
        "fs": c.size("moe_shared_expert_intermediate_size", 7688),
    }
    symbols |= {"ma": c.size("mamba_num_heads", 128), "mg": c.size("n_groups", 8)}
    activation, bias = c.activation("mlp_hidden_act", "relu2"), c.flag("mlp_bias")
    mamba = Mamba2Mixer(
        heads=ma,
        size=c.size("mamba_head_dim", 64),
        state=c.size("ssm_state_size", 128),
        groups=mg,
        chunk=c.size("chunk_size", 128),
        kernel=c.size("conv_kernel", 4),
        bias=c.flag("use_bias"),
        conv_bias=c.flag("use_conv_bias", True),
        norm_groups=mg,
    )
    plain = PlainMlp(
        activation=activation, bias=bias, names=("up_proj", "down_proj"), scope="mixer"
    )
    mixture = MixtureOfExperts(
        router=sigmoid_router(c, groups=1).replace(adapted_as=()),
        experts=Experts(activation=activation, gated=False),
        shared=SharedExpert(mlp=plain.replace(width=fs, scope="shared_experts")),
        latent=c.size("moe_latent_size", 0, low=0),
        scope="mixer",
    )
    attention = GroupedQueryAttention(
        rotary=False, scope="mixer", **attention_fields(c, symbols, bias=False)
    )
    mixers = {"linear_attention": mamba, "full_attention": attention, "mlp": plain, "moe": mixture}
    norm = Norm(kind=NormKind.RMS_CAST_LAST)
    layers: list[Part] = [
        MixerLayer(mixer=mixers[kind], norm=norm, residual_in_fp32=c.flag("residual_in_fp32"))
        for kind in kinds
    ]
    embedding = TokenEmbedding(rotary=False, name="embeddings")
    return decoder(
        c,
        symbols,
        layers,
        "nemotron_h",
        embedding=embedding,
        head=CausalLmHead(norm=norm, norm_name="model.norm_f"),
    )


def _nemotron_layers(c: Config) -> list[str]:
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    older = {"mamba": "linear_attention", "attention": "full_attention"}
    pattern = c.text("hybrid_override_pattern", "")
    kinds = [letters.get(letter, letter) for letter in pattern] or [
        older.get(name, name) for name in c.names("layers_block_type") or c.names("layer_types")
    ]
    unknown = [kind for kind in kinds if kind not in letters.values()]
    if unknown or not kinds:
        raise InputError(
            f"config field hybrid_override_pattern={shown(pattern)} of {shown(c.name)} does not"
            " name its layers; use letters M, E, * and -"
        )
    return kinds


def bamba(c: Config) -> ModelSpec:
    """BambaForCausalLM: Mamba 2 with attention at the listed layers, half of each head rotated
    (transformers models/bamba)."""
    symbols, activation = dense_symbols(c, kv_default=8), c.activation("hidden_act", "silu")
    heads, groups = c.size("mamba_n_heads", 128), c.size("mamba_n_groups", 1)
    size = (
        c.size("mamba_d_head")
        if isinstance(c.values.get("mamba_d_head"), int)
        else c.size("mamba_expand", 2) * symbols["h"] // heads
    )
    symbols |= {"ma": heads, "mg": groups}
    mixer = Mamba2Mixer(
        heads=ma,
        size=size,
        state=c.size("mamba_d_state", 256),
        groups=mg,
        chunk=c.size("mamba_chunk_size", 256),
        kernel=c.size("mamba_d_conv", 4),
        bias=c.flag("mamba_proj_bias"),
        conv_bias=c.flag("mamba_conv_bias", True),
        scope="mamba",
        adapted=True,
    )
    rotated = c.rotated(symbols["dh"], 0.5)
    attention = GroupedQueryAttention(
        rotary_size=rotated, **attention_fields(c, symbols, bias=False)
    )
    attends = c.layer_indices("attn_layer_indices", symbols["L"])
    mlp = GatedMlp(activation=activation, bias=c.flag("mlp_bias"), scope="feed_forward")
    layers: list[Part] = [
        DecoderLayer(
            attention=attention if i in attends else mixer,
            mlp=mlp,
            names=("input_layernorm", "pre_ff_layernorm"),
        )
        for i in range(symbols["L"])
    ]
    return decoder(
        c,
        symbols,
        layers,
        "bamba",
        embedding=TokenEmbedding(rotary_size=rotated),
        head=CausalLmHead(norm_name="model.final_layernorm"),
    )


def falcon_h1(c: Config) -> ModelSpec:
    """FalconH1ForCausalLM: Mamba 2 beside attention in every layer (transformers
    models/falcon_h1)."""
    symbols = dense_symbols(c, kv_default=2)
    inner, heads = c.values.get("mamba_d_ssm", 1024), c.size("mamba_n_heads", 128)
    width = c.size("mamba_d_ssm", 1024) if inner else c.size("mamba_expand", 2) * symbols["h"]
    size = c.values.get("mamba_d_head", "auto")
    symbols |= {"ma": heads, "mg": c.size("mamba_n_groups", 1)}
    mixer = Mamba2Mixer(
        heads=ma,
        size=width // heads if size == "auto" else c.size("mamba_d_head"),
        state=c.size("mamba_d_state", 256),
        groups=mg,
        chunk=c.size("mamba_chunk_size", 256),
        kernel=c.size("mamba_d_conv", 4),
        bias=c.flag("mamba_proj_bias"),
        output_bias=c.flag("projectors_bias"),
        conv_bias=c.flag("mamba_conv_bias", True),
        norm_groups=mg,
        scope="mamba",
        multiplied=True,
        normed=c.flag("mamba_rms_norm"),
    )
    layer = MixedLayer(
        attention=GroupedQueryAttention(key_scaled=True, **attention_fields(c, symbols)),
        mixer=mixer,
        mlp=MultipliedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias")),
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "falcon_h1",
        embedding=TokenEmbedding(scaled=True),
        head=CausalLmHead(norm_name="model.final_layernorm", scaled=True),
        padded=True,
    )


def lfm2(c: Config) -> ModelSpec:
    """Lfm2ForCausalLM: gated short convolutions, attention at the listed layers (transformers
    models/lfm2)."""
    c = c.renamed({"tie_embedding": "tie_word_embeddings"})
    symbols = dense_symbols(
        c, kv_default=8, ffn="block_ff_dim" if "block_ff_dim" in c else "intermediate_size"
    )
    if c.flag("block_auto_adjust_ff_dim", True):
        width, multiple = (
            int(c.number("block_ffn_dim_multiplier", 1.0) * (2 * symbols["f"] // 3)),
            c.size("block_multiple_of", 256),
        )
        symbols["f"] = -(-width // multiple) * multiple
    kinds = c.layer_names("layer_types", symbols["L"], ("full_attention", "conv"))
    if not kinds:
        attends = c.layer_indices("full_attn_idxs", symbols["L"], range(symbols["L"]))
        kinds = tuple("full_attention" if i in attends else "conv" for i in range(symbols["L"]))
    attention = GroupedQueryAttention(
        grouped=symbols["k"] != symbols["a"],
        head_norm=Norm(),
        norm_names=("q_layernorm", "k_layernorm"),
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    symbols["mi"] = symbols["h"]
    convolution = ShortConvolution(kernel=c.size("conv_L_cache", 3), bias=c.flag("conv_bias"))
    mlp = GatedMlp(names=("w1", "w3", "w2"), scope="feed_forward")
    names = ("operator_norm", "ffn_norm")
    layers: list[Part] = [
        DecoderLayer(
            attention=attention if kind == "full_attention" else convolution, mlp=mlp, names=names
        )
        for kind in kinds
    ]
    return decoder(
        c,
        symbols,
        layers,
        "lfm2",
        head=CausalLmHead(norm_name="model.embedding_norm"),
        tied=True,
        padded=True,
    )
