"""Decoders that ship their own modelling code with the weights and change one thing of another
family's: EXAONE 3, MiMo 7B, Llama-Nemotron's searched layers, Ling 2 and Sarvam."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import fs
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import attention_fields, decoder, dense_symbols
from napkinmath.models.families.moe import QWEN_MODULES, expert_symbols, sigmoid_router
from napkinmath.models.families.remote_code import OWN_LOSS
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer, MixerLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.moe import Experts, MixtureOfExperts, SharedExpert
from napkinmath.models.layers.next_token import NextTokenLayer
from napkinmath.models.layers.norm import Norm
from napkinmath.models.layers.packed_attention import PackedAttention


def exaone(c: Config) -> ModelSpec:
    """ExaoneForCausalLM, 3.0 and 3.5: Llama's layer under GPT's names (EXAONE-3.0-7.8B-Instruct
    modeling_exaone.py)."""
    c = c.renamed({"num_layers": "num_hidden_layers"})
    symbols = dense_symbols(c)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            scope="attn.attention",
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            **attention_fields(c, symbols, bias=False),
        ),
        mlp=GatedMlp(
            activation=c.activation("activation_function", "silu"),
            names=("c_fc_0", "c_fc_1", "c_proj"),
        ),
        names=("ln_1", "ln_2"),
    )
    head = CausalLmHead(norm_name="transformer.ln_f", shared_loss_since=OWN_LOSS)
    if c.flag("tie_word_embeddings"):
        head = head.replace(tied_to="transformer.wte.weight")
    stages = (
        Stage(
            part=TokenEmbedding(name="wte", padded=True, dropout=c.probability("embed_dropout")),
            path="transformer",
        ),
        Stage(part=layer, count=symbols["L"], path="transformer.h", checkpointed=True),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="exaone")


def mimo(c: Config) -> ModelSpec:
    """MiMoForCausalLM: Qwen 2 with a layer for the token after next, which its own forward leaves
    out (MiMo-7B-Base modeling_mimo.py)."""
    symbols = dense_symbols(c)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            **attention_fields(c, symbols, bias=c.flag("attention_bias", True), output_bias=False)
        ),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    head = CausalLmHead(shared_loss_since=OWN_LOSS)
    spec = decoder(c, symbols, [layer] * symbols["L"], "mimo", head=head)
    further = c.size("num_nextn_predict_layers", 1, low=0)
    if not further:
        return spec
    idle = Stage(
        part=NextTokenLayer(layer=layer), count=further, path="model.mtp_layers", modality="idle"
    )
    return spec.replace(stages=(*spec.stages[:-1], idle, spec.stages[-1]))


def nemotron_nas(c: Config) -> ModelSpec:
    """DeciLMForCausalLM of Llama-Nemotron: layers that a search gave a width of their own, some
    without attention, feed-forward or either (Llama-3_3-Nemotron-Super-49B-v1 modeling_decilm.py).
    A layer without both hands on what it is given, and is none here."""
    blocks, hidden = c.listed("block_configs"), c.size("hidden_size")
    layers = c.size("num_hidden_layers")
    c.same_length("block_configs", len(blocks), layers)
    chosen = [(group, width) for group, width in (_block(c, x) for x in blocks) if group or width]
    groups = {group for group, _ in chosen if group}
    if len(groups) != 1:
        raise InputError(
            f"config field block_configs of {shown(c.name)} has layers of n_heads_in_group"
            f" {sorted(groups)}; one number for all is priced"
        )
    heads = c.size("num_attention_heads")
    symbols = {
        "h": hidden,
        "a": heads,
        "k": heads // groups.pop(),
        "dh": hidden // heads,
        "f": max(width for _, width in chosen),
        "v": c.size("vocab_size"),
        "L": layers,
    }
    attention = GroupedQueryAttention(**attention_fields(c, symbols))
    activation = c.activation("hidden_act", "silu")

    def layer(group: int, width: int) -> Part:
        mlp = GatedMlp(activation=activation, width=width)
        if not group:
            return MixerLayer(mixer=mlp, name="post_attention_layernorm")
        if not width:
            return MixerLayer(mixer=attention, name="input_layernorm")
        return DecoderLayer(attention=attention, mlp=mlp)

    parts = [layer(group, width) for group, width in chosen]
    return decoder(c, symbols, parts, "nemotron-nas", head=CausalLmHead(shared_loss_since=OWN_LOSS))


def _block(c: Config, block: object) -> tuple[int, int]:
    """(query heads to a key/value head, 0 without attention; width of the feed-forward, 0 without)
    of an entry of `block_configs`."""
    parts = Config({"block": block}, c.name, c.source).nested("block")
    attention, ffn = parts.nested("attention"), parts.nested("ffn")
    if any(part.flag("replace_with_linear") for part in (attention, ffn)):
        raise InputError(
            f"config field block_configs of {shown(c.name)} has a layer whose attention or"
            " feed-forward is replaced by one linear, which is not priced"
        )
    wanted = int(2 * ffn.number("ffn_mult", 0.0) * c.size("hidden_size") / 3)
    width = -(-wanted // 256) * 256  # modeling_decilm.py _find_multiple(n, 256)
    return (
        0 if attention.flag("no_op") else attention.size("n_heads_in_group"),
        0 if ffn.flag("no_op") else width,
    )


def bailing_moe(c: Config) -> ModelSpec:
    """BailingMoeV2ForCausalLM and SarvamMoEForCausalLM: one linear for q, k, v with a norm on each
    head, half of it turned, every expert a module (Ling-mini-2.0 modeling_bailing_moe_v2.py, as in
    NVIDIA-NeMo/Megatron-Bridge models/bailing)."""
    symbols = {
        **dense_symbols(c),
        **expert_symbols(c, experts="num_experts", width="moe_intermediate_size", topk_default=8),
    }
    symbols["fs"] = symbols["fe"] * c.size("num_shared_experts", 1)
    activation, rotated = c.activation("hidden_act", "silu"), c.rotated(symbols["dh"], 1.0)
    core = GroupedQueryAttention(
        names=("query_key_value", "", "", "dense"),
        scope="attention",
        grouped=symbols["k"] != symbols["a"],
        bias=c.flag("use_qkv_bias"),
        output_bias=c.flag("use_bias"),
        head_norm=Norm() if c.flag("use_qk_norm", True) else None,
        norm_transposed=True,
        norm_names=("query_layernorm", "key_layernorm"),
        rotary_size=rotated if rotated != symbols["dh"] else 0,
        dropout=c.probability("attention_dropout"),
    )
    mixture = MixtureOfExperts(
        router=sigmoid_router(c, groups=1),
        experts=Experts(activation=activation, modules=QWEN_MODULES),
        shared=SharedExpert(mlp=GatedMlp(activation=activation, width=fs, scope="shared_experts")),
    )
    attention = PackedAttention(core=core)
    dense, sparse = (
        DecoderLayer(attention=attention, mlp=GatedMlp(activation=activation)),
        DecoderLayer(attention=attention, mlp=mixture),
    )
    first = c.size("first_k_dense_replace", 0, low=0)
    return decoder(
        c,
        symbols,
        [dense if i < first else sparse for i in range(symbols["L"])],
        "bailing_moe",
        embedding=TokenEmbedding(name="word_embeddings", rotary_size=rotated),
        head=CausalLmHead(shared_loss_since=OWN_LOSS),
        padded=True,
    )
