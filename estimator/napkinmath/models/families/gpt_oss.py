"""GPT-OSS: attention sinks, alternating sliding and full layers, experts with biases stored
transposed."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.ir.symbols import dh
from napkinmath.models.families.config import Config, runs
from napkinmath.models.families.llama import dense_symbols
from napkinmath.models.families.moe import expert_symbols, tied
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.moe import Experts, MixtureOfExperts
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.router import Router, Scoring
from napkinmath.models.layers.sinks import SinkAttention


def gpt_oss(c: Config) -> ModelSpec:
    """GptOssForCausalLM (transformers models/gpt_oss), weights in the precision of the run
    (dequantized from MXFP4)."""
    symbols = {
        **dense_symbols(c, kv_default=8, head_size_default=64),
        **expert_symbols(c, experts="num_local_experts", width="intermediate_size", topk_default=4),
    }
    window, layers = c.size("sliding_window", 128), symbols["L"]
    types = c.layer_names("layer_types", layers, ("full_attention", "sliding_attention")) or tuple(
        "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)
    )
    norm = Norm(kind=NormKind.RMS_CAST_LAST)
    mixture = MixtureOfExperts(
        router=Router(name="router", scoring=Scoring.CHOSEN, bias=True, fp32_scores=False),
        experts=Experts(bias=True, transposed=True, clamped=True),
    )

    def layer(kind: str) -> DecoderLayer:
        attention = SinkAttention(
            bias=c.flag("attention_bias", True),
            window=window if kind == "sliding_attention" else 0,
            dropout=c.number("attention_dropout", 0.0),
        )
        return DecoderLayer(attention=attention, mlp=mixture, norm=norm)

    stages = [
        Stage(part=layer(types[i]), path="model.layers", checkpointed=True) for i in range(layers)
    ]
    embedding = TokenEmbedding(
        rotary_size=dh // 2, masked=True, windows=(window,) if "sliding_attention" in types else ()
    )
    return c.spec(
        (
            Stage(part=embedding, path="model"),
            *runs(stages),
            Stage(part=CausalLmHead(norm=norm, tied_to=tied(c))),
        ),
        symbols,
        family="gpt_oss",
    )
