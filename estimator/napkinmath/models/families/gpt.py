"""GPT-Neo, GPT-J and CodeGen, which attend in fp32 and eager only."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.families.config import Config, pads
from napkinmath.models.families.packed import GPT_NAMES, LAYER_NORM, gpt_stages, gpt_symbols
from napkinmath.models.layers.chained_attention import GptJAttention, GptNeoAttention
from napkinmath.models.layers.decoder import DecoderLayer, ParallelLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.mlp import PlainMlp
from napkinmath.models.layers.positions import PositionedEmbedding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def gpt_neo(c: Config) -> ModelSpec:
    """GPTNeoForCausalLM: learned positions, every other layer local by a banded triangle
    (transformers models/gpt_neo)."""
    c = c.renamed({"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"})
    symbols = gpt_symbols(c)
    check_attention_types(c, symbols["L"])
    rows, dropout = c.size("max_position_embeddings", 2048), c.probability("resid_dropout")
    attention = GptNeoAttention(
        positions=rows, dropout=c.probability("attention_dropout"), output_dropout=dropout
    )
    mlp = PlainMlp(
        activation=c.activation("activation_function", "gelu_new"),
        names=("c_fc", "c_proj"),
        dropout=dropout,
    )
    layer = DecoderLayer(
        attention=attention, mlp=mlp, norm=LAYER_NORM, names=("ln_1", "ln_2"), names_outputs=True
    )
    embedding = PositionedEmbedding(
        rows=rows, dropout=c.probability("embed_dropout"), padded=pads(c), masked=True
    )
    return c.spec(
        gpt_stages(c, symbols, [layer] * symbols["L"], embedding, path="transformer", tied=True),
        symbols,
        family="gpt_neo",
    )


def check_attention_types(c: Config, layers: int) -> None:
    """`attention_types` such as [[["global", "local"], 6]] must describe every layer."""
    types: Any = c.values.get("attention_types")
    if types is None:
        return
    try:
        named: list[object] = [
            kind for kinds, count in types for _ in range(count) for kind in kinds
        ]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"config field attention_types={shown(types)} is not like [[['global', 'local'], 6]]"
        ) from error
    if len(named) != layers or not all(kind in ("global", "local") for kind in named):
        raise InputError(
            f"config field attention_types={shown(types)} does not name global or local for each of"
            f" the {layers} layers"
        )


def gptj(c: Config) -> ModelSpec:
    """GPTJForCausalLM (transformers models/gptj)."""
    return _rotated_pairs(c, "gptj", packed=False)


def codegen(c: Config) -> ModelSpec:
    """CodeGenForCausalLM: GPT-J with one linear in four shards (transformers models/codegen)."""
    return _rotated_pairs(c, "codegen", packed=True)


def _rotated_pairs(c: Config, family: str, *, packed: bool) -> ModelSpec:
    c = c.renamed(GPT_NAMES)
    symbols = gpt_symbols(c)
    if packed:
        c.divides("num_attention_heads", "shards", symbols["a"], 4)
    rotary = c.size("rotary_dim", 64)
    if rotary > symbols["dh"]:
        raise InputError(
            f"config field rotary_dim={rotary} is more than the head size {symbols['dh']}; use"
            f" {symbols['dh']} or less"
        )
    dropout = c.probability("resid_pdrop")
    attention = GptJAttention(
        positions=c.size("max_position_embeddings", 2048),
        rotary_size=rotary,
        packed=packed,
        dropout=c.probability("attn_pdrop"),
        output_dropout=dropout,
    )
    mlp = PlainMlp(
        activation=c.activation("activation_function", "gelu_new"),
        names=("fc_in", "fc_out"),
        dropout=dropout,
    )
    layer = ParallelLayer(
        attention=attention, mlp=mlp, norm=LAYER_NORM, names=("ln_1",), residual_last=True
    )
    embedding = TokenEmbedding(
        rotary=False, name="wte", dropout=c.probability("embd_pdrop"), padded=pads(c), masked=True
    )
    return c.spec(
        gpt_stages(
            c, symbols, [layer] * symbols["L"], embedding, path="transformer", tied=False, bias=True
        ),
        symbols,
        family=family,
    )
