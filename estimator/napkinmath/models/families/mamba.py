"""Mamba, Falcon Mamba and Mamba 2: state-space models without attention."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import ma, mg, mi
from napkinmath.models.families.config import Config
from napkinmath.models.layers.decoder import MixerLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mamba import MambaMixer
from napkinmath.models.layers.mamba2 import Mamba2Mixer
from napkinmath.models.layers.norm import Norm


def mamba(c: Config) -> ModelSpec:
    """MambaForCausalLM (transformers models/mamba)."""
    return _mamba(c, None, "mamba")


def falcon_mamba(c: Config) -> ModelSpec:
    """FalconMambaForCausalLM: steps, B and C normed without weights (transformers
    models/falcon_mamba)."""
    return _mamba(c, Norm(), "falcon_mamba")


def _mamba(c: Config, norm: Norm | None, family: str) -> ModelSpec:
    hidden, layers = c.size("hidden_size"), c.size("num_hidden_layers")
    inner = c.size("intermediate_size", _expanded(c, hidden))
    rank = (
        c.size("time_step_rank")
        if isinstance(c.values.get("time_step_rank"), int)
        else -(-hidden // 16)
    )
    mixer = MambaMixer(
        inner=mi,
        state=c.size("state_size", 16),
        rank=rank,
        kernel=c.size("conv_kernel", 4),
        bias=c.flag("use_bias"),
        conv_bias=c.flag("use_conv_bias", True),
        norm=norm,
    )
    layer = MixerLayer(mixer=mixer, residual_in_fp32=c.flag("residual_in_fp32", True))
    symbols = {"h": hidden, "v": c.size("vocab_size"), "mi": inner}
    return stateful(c, layer, layers, symbols, family)


def stateful(
    c: Config,
    layer: Part,
    layers: int,
    symbols: dict[str, int],
    family: str,
    *,
    tied_default: bool = True,
) -> ModelSpec:
    """Embeddings under `backbone`, equal layers, a norm and a head, tied unless the config says
    otherwise."""
    tied = "backbone.embeddings.weight" if c.flag("tie_word_embeddings", tied_default) else ""
    return c.spec(
        (
            Stage(
                part=TokenEmbedding(rotary=False, name="embeddings", full_mask=False),
                path="backbone",
            ),
            Stage(part=layer, count=layers, path="backbone.layers", checkpointed=True),
            Stage(part=CausalLmHead(norm_name="backbone.norm_f", tied_to=tied)),
        ),
        {**symbols, "L": layers},
        family=family,
    )


def _expanded(c: Config, hidden: int) -> int:
    """Width inside a mixer. Raises InputError where none is left."""
    inner = int(c.number("expand", 2) * hidden)
    if inner < 1:
        raise InputError(
            f"expand={shown(c.values.get('expand'))} leaves a width of {inner}; use e.g. 2"
        )
    return inner


def mamba2(c: Config) -> ModelSpec:
    """Mamba2ForCausalLM (transformers models/mamba2)."""
    hidden, heads, size = c.size("hidden_size"), c.size("num_heads", 128), c.size("head_dim", 64)
    groups = c.size("n_groups", 8)
    inner = _expanded(c, hidden)
    if heads * size != inner:
        raise InputError(
            f"num_heads={heads} times head_dim={size} is {heads * size}, not expand · hidden_size ="
            f" {inner}; change one of them"
        )
    mixer = Mamba2Mixer(
        heads=ma,
        size=size,
        state=c.size("state_size", 128),
        groups=mg,
        chunk=c.size("chunk_size", 256),
        kernel=c.size("conv_kernel", 4),
        bias=c.flag("use_bias"),
        conv_bias=c.flag("use_conv_bias", True),
        norm_groups=mg,
    )
    layer = MixerLayer(mixer=mixer, residual_in_fp32=c.flag("residual_in_fp32", True))
    return stateful(
        c,
        layer,
        c.size("num_hidden_layers"),
        {"h": hidden, "v": c.size("vocab_size"), "ma": heads, "mg": groups},
        "mamba2",
        tied_default=False,
    )
