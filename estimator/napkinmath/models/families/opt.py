"""OPT, XGLM and BioGPT: decoders of the fairseq line."""

from __future__ import annotations

from napkinmath.ir.model_spec import ModelSpec, Stage
from napkinmath.models.families.config import Config, pads, runs
from napkinmath.models.families.llama import dense_symbols, one_head_each
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.chained_attention import XglmAttention
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import PlainMlp
from napkinmath.models.layers.norm import Norm, NormKind
from napkinmath.models.layers.positions import PositionedEmbedding

NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
NORMS = ("self_attn_layer_norm", "final_layer_norm")


def opt(c: Config) -> ModelSpec:
    """OPTForCausalLM: learned positions counted from the mask, queries scaled as projected
    (transformers models/opt).

    OPT 350M projects its embeddings in and out and puts its norms last.
    """
    symbols = one_head_each(dense_symbols(c, ffn="ffn_dim"))
    bias, dropout = c.flag("enable_bias", True), c.probability("dropout", 0.1)
    norm = Norm(
        kind=(
            NormKind.LAYER
            if c.flag("layer_norm_elementwise_affine", True)
            else NormKind.LAYER_NO_AFFINE
        )
    )
    before = c.flag("do_layer_norm_before", True)
    width = c.size("word_embed_proj_dim", symbols["h"])
    projected = width if width != symbols["h"] else 0
    attention = GroupedQueryAttention(
        rotary=False,
        query_scaled=True,
        bias=bias,
        output_bias=bias,
        dropout=c.probability("attention_dropout"),
        names=NAMES,
    )
    mlp = PlainMlp(
        activation=c.activation("activation_function", "relu"), bias=bias, scope="", inlined=True
    )
    layer = DecoderLayer(
        attention=attention, mlp=mlp, norm=norm, names=NORMS, norms_last=not before, dropout=dropout
    )
    path = "model.decoder"
    embedding = PositionedEmbedding(
        name="embed_tokens",
        position_name="embed_positions",
        rows=c.size("max_position_embeddings", 2048) + 2,
        offset=2,
        per_sequence=True,
        width=projected,
        padded=pads(c, True),
    )
    final = norm if before and not c.flag("_remove_final_layer_norm") else None
    head = CausalLmHead(
        norm=final,
        norm_name=f"{path}.final_layer_norm",
        project_out=projected,
        project_name=f"{path}.project_out",
    )
    return c.spec(_stages(c, symbols, layer, embedding, head, path), symbols, family="opt")


def xglm(c: Config) -> ModelSpec:
    """XGLMForCausalLM: scaled embeddings, a table of sines, eager only (transformers
    models/xglm)."""
    c = c.renamed(
        {
            "d_model": "hidden_size",
            "attention_heads": "num_attention_heads",
            "num_layers": "num_hidden_layers",
        }
    )
    symbols = one_head_each(dense_symbols(c, ffn="ffn_dim"))
    dropout = c.probability("dropout", 0.1)
    attention = XglmAttention(dropout=c.probability("attention_dropout", 0.1))
    mlp = PlainMlp(
        activation=c.activation("activation_function", "gelu"),
        inner_dropout=c.probability("activation_dropout"),
        scope="",
    )
    layer = DecoderLayer(
        attention=attention, mlp=mlp, norm=Norm(kind=NormKind.LAYER), names=NORMS, dropout=dropout
    )
    embedding = PositionedEmbedding(
        name="embed_tokens",
        position_name="embed_positions",
        rows=c.size("max_position_embeddings", 2048) + 2,
        sines=True,
        scaled=c.flag("scale_embedding", True),
        dropout=dropout,
        padded=pads(c, True),
        masked=True,
    )
    head = CausalLmHead(norm=Norm(kind=NormKind.LAYER), norm_name="model.layer_norm")
    return c.spec(_stages(c, symbols, layer, embedding, head, "model"), symbols, family="xglm")


def biogpt(c: Config) -> ModelSpec:
    """BioGptForCausalLM: scaled embeddings and learned positions (transformers models/biogpt)."""
    symbols = one_head_each(dense_symbols(c))
    dropout = c.probability("hidden_dropout_prob", 0.1)
    attention = GroupedQueryAttention(
        rotary=False,
        wide_softmax=False,
        bias=True,
        output_bias=True,
        dropout=c.probability("attention_probs_dropout_prob", 0.1),
        names=NAMES,
    )
    mlp = PlainMlp(
        activation=c.activation("hidden_act", "gelu"),
        inner_dropout=c.probability("activation_dropout"),
        scope="",
        inlined=True,
    )
    layer = DecoderLayer(
        attention=attention, mlp=mlp, norm=Norm(kind=NormKind.LAYER), names=NORMS, dropout=dropout
    )
    embedding = PositionedEmbedding(
        name="embed_tokens",
        position_name="embed_positions",
        rows=c.size("max_position_embeddings", 1024) + 2,
        offset=2,
        scaled=c.flag("scale_embedding", True),
        dropout=dropout,
        padded=pads(c, True),
    )
    head = CausalLmHead(
        norm=Norm(kind=NormKind.LAYER), norm_name="biogpt.layer_norm", name="output_projection"
    )
    return c.spec(_stages(c, symbols, layer, embedding, head, "biogpt"), symbols, family="biogpt")


def _stages(
    c: Config,
    symbols: dict[str, int],
    layer: DecoderLayer,
    embedding: PositionedEmbedding,
    head: CausalLmHead,
    path: str,
) -> tuple[Stage, ...]:
    if c.flag("tie_word_embeddings", True):
        head = head.replace(tied_to=f"{path}.embed_tokens.weight")
    layers = runs([Stage(part=layer, path=f"{path}.layers", checkpointed=True)] * symbols["L"])
    return (Stage(part=embedding, path=path), *layers, Stage(part=head))
