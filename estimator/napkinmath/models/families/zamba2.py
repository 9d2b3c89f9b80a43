"""Zamba 2: Mamba 2 with few transformer blocks that many layers share."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Part
from napkinmath.ir.symbols import ma, mg
from napkinmath.models.families.config import Config
from napkinmath.models.families.llama import decoder
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mamba2 import Mamba2Mixer
from napkinmath.models.layers.zamba2 import (
    KeptEmbedding,
    SharedAttention,
    SharedMlp,
    Use,
    Zamba2Layer,
)

MAMBA = ("mamba", "linear_attention")  # of transformers 4 and 5
USUAL_PLACES = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""Shared layers where a config lists none (configuration_zamba2.py)."""


def zamba2(c: Config) -> ModelSpec:
    """Zamba2ForCausalLM (transformers models/zamba2)."""
    hidden, heads, layers = (
        c.size("hidden_size", 2560),
        c.size("num_attention_heads", 32),
        c.size("num_hidden_layers", 54),
    )
    c.divides("hidden_size", "num_attention_heads", 2 * hidden, heads)
    kv_heads = c.size("num_key_value_heads", heads)
    inner = int(c.number("mamba_expand", 2) * hidden)
    symbols = {
        "h": hidden,
        "a": heads,
        "k": kv_heads,
        "dh": 2 * hidden // heads,
        "f": c.size("intermediate_size", 4 * hidden),
        "v": c.size("vocab_size", 32000),
        "L": layers,
        "ma": c.size("n_mamba_heads", 8),
        "mg": c.size("mamba_ngroups", 1),
    }
    mixer = Mamba2Mixer(
        heads=ma,
        size=inner // symbols["ma"],
        state=c.size("mamba_d_state", 64),
        groups=mg,
        chunk=c.size("chunk_size", 256),
        kernel=c.size("mamba_d_conv", 4),
        bias=c.flag("add_bias_linear"),
        norm_groups=mg,
        scope="mamba",
        adapted=True,
    )
    rotary = c.flag("use_mem_rope")
    kinds = _kinds(c, layers)
    plain = Zamba2Layer(mixer=mixer)
    uses = iter(_uses(c, kinds))
    parts: list[Part] = []
    for index, kind in enumerate(kinds):
        if kind in MAMBA:
            parts.append(plain)
            continue
        use = next(uses)
        attention = SharedAttention(
            use=use,
            kind=use.kind,
            rotary=rotary,
            grouped=kv_heads != heads,
            dropout=c.probability("attention_dropout"),
        )
        mlp = SharedMlp(
            activation=c.activation("hidden_act", "gelu"), bias=c.flag("add_bias_linear"), use=use
        )
        parts.append(plain.replace(attention=attention, mlp=mlp, place=str(index)))
    return decoder(
        c,
        symbols,
        parts,
        "zamba2",
        embedding=KeptEmbedding(rotary=rotary),
        head=CausalLmHead(norm_name="model.final_layernorm"),
        tied=True,
        padded=True,
    )


def _kinds(c: Config, layers: int) -> tuple[str, ...]:
    named = c.layer_names("layers_block_type", layers, (*MAMBA, "hybrid"))
    if named:
        return named
    usual = ["hybrid" if i in USUAL_PLACES else "mamba" for i in range(54)]
    c.same_length("layers_block_type", len(usual), layers)
    return tuple(usual)


def _uses(c: Config, kinds: tuple[str, ...]) -> list[Use]:
    """Every use of a shared block: the blocks take turns."""
    places = [i for i, kind in enumerate(kinds) if kind not in MAMBA]
    blocks = c.size("num_mem_blocks", 1)
    same = [range(i % blocks, len(places), blocks) for i in range(len(places))]
    return [
        Use(
            index=i,
            others=tuple(other for other in same[i] if other != i),
            owner="" if i < blocks else f"model.layers.{places[i % blocks]}.shared_transformer",
            rank=c.size("adapter_rank", 128),
            attends_adapted=c.flag("use_shared_attention_adapter"),
        )
        for i in range(len(places))
    ]
