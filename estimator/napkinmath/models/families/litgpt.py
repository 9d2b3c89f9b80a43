"""litgpt's GPT: one model class for many architectures, read from the Hugging Face config of the
same model.

Source: litgpt 0.4 model.py (GPT, Block, CausalSelfAttention), config.py (the flags of each
architecture).
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.chunked_head import ChunkedHead, LoopEmbedding
from napkinmath.models.layers.decoder import DecoderLayer, ParallelLayer
from napkinmath.models.layers.fused_qkv import FusedQkvAttention
from napkinmath.models.layers.mlp import GatedMlp, PlainMlp
from napkinmath.models.layers.norm import Norm, NormKind


class Flags(Record):
    """What litgpt's Config says of an architecture beyond its sizes."""

    norm: NormKind = NormKind.RMS
    gated: bool = True
    activation: str = "silu"
    parallel: bool = False
    shared_norm: bool = False
    bias: bool = False
    head_bias: bool = False
    rotary: str = ""
    """Field of the Hugging Face config with the rotated share of a head."""
    scaled: bool = False
    post_norms: bool = False


FLAGS: dict[str, Flags] = {
    "llama": Flags(),
    "mistral": Flags(),
    "mixtral": Flags(),
    "phi3": Flags(),
    "qwen2": Flags(),
    "olmo": Flags(norm=NormKind.LAYER_PLAIN),
    "phi": Flags(
        norm=NormKind.LAYER,
        gated=False,
        activation="gelu",
        parallel=True,
        shared_norm=True,
        bias=True,
        head_bias=True,
        rotary="partial_rotary_factor",
    ),
    "gpt_neox": Flags(
        norm=NormKind.LAYER,
        gated=False,
        activation="gelu",
        parallel=True,
        bias=True,
        rotary="rotary_pct",
    ),
    "falcon": Flags(
        norm=NormKind.LAYER, gated=False, activation="gelu", parallel=True, shared_norm=True
    ),
    "stablelm": Flags(norm=NormKind.LAYER, rotary="partial_rotary_factor"),
    "gemma": Flags(norm=NormKind.RMS, activation="gelu", scaled=True),
    "gemma2": Flags(norm=NormKind.RMS, activation="gelu", scaled=True, post_norms=True),
}


def litgpt(c: Config) -> ModelSpec:
    """The GPT that litgpt builds for this architecture; head and embedding are never tied."""
    model_type = c.text("model_type", "")
    flags = FLAGS.get(model_type)
    if flags is None:
        raise InputError(
            f"litgpt's form of model_type {shown(model_type)} is not known; known:"
            f" {', '.join(sorted(FLAGS))}"
        )
    symbols = _symbols(c)
    size = symbols["dh"]
    rotated = int(c.number(flags.rotary, 1.0) * size) if flags.rotary else size
    part = rotated if rotated < size else 0
    norm = Norm(kind=flags.norm)
    attention = FusedQkvAttention(
        bias=flags.bias, rotary_size=part, capped="attn_logit_softcapping" in c
    )
    names = ("fc_1", "fc_2", "proj")
    mlp = (
        GatedMlp(activation=flags.activation, bias=flags.bias, names=names)
        if flags.gated
        else PlainMlp(activation=flags.activation, bias=flags.bias, names=("fc", "proj"))
    )
    head = ChunkedHead(norm=norm, bias=flags.head_bias, capped="final_logit_softcapping" in c)
    stages = (
        Stage(part=LoopEmbedding(rotary_size=part, scaled=flags.scaled), path="transformer"),
        Stage(
            part=_layer(c, flags, attention, mlp, norm),
            count=symbols["L"],
            path="transformer.h",
            checkpointed=True,
        ),
        Stage(part=head),
    )
    return c.spec(stages, symbols, family="litgpt")


def _layer(
    c: Config, flags: Flags, attention: FusedQkvAttention, mlp: GatedMlp | PlainMlp, norm: Norm
) -> Part:
    if flags.parallel and c.flag("use_parallel_residual", True):
        shared = flags.shared_norm and not c.flag("new_decoder_architecture")
        return ParallelLayer(
            attention=attention,
            mlp=mlp,
            norm=norm,
            names=("norm_1",) if shared else ("norm_1", "norm_2"),
            residual_last=True,
        )
    posts = ("post_attention_norm", "post_mlp_norm") if flags.post_norms else ("", "")
    return DecoderLayer(
        attention=attention, mlp=mlp, norm=norm, names=("norm_1", "norm_2"), post_names=posts
    )


def _symbols(c: Config) -> dict[str, int]:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    groups = c.size("num_kv_heads", c.size("num_key_value_heads", heads))
    if c.flag("multi_query") and not c.flag("new_decoder_architecture"):
        groups = 1
    size = c.size("head_dim", hidden // heads)
    width = c.size("ffn_hidden_size", c.size("intermediate_size", 4 * hidden))
    return {
        "h": hidden,
        "a": heads,
        "k": groups,
        "dh": size,
        "f": width,
        "v": c.size("vocab_size"),
        "L": c.size("num_hidden_layers"),
    }
