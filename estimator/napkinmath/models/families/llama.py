"""Llama and the families that share its layer."""

from __future__ import annotations

from itertools import groupby

from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config, pads, runs
from napkinmath.models.layers.attention import GroupedQueryAttention
from napkinmath.models.layers.decoder import DecoderLayer
from napkinmath.models.layers.embedding import TokenEmbedding
from napkinmath.models.layers.head import CausalLmHead
from napkinmath.models.layers.mlp import GatedMlp
from napkinmath.models.layers.norm import Norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from napkinmath.models.layers.positions import PositionedEmbedding


def dense_symbols(
    c: Config,
    *,
    kv_default: int | None = None,
    head_size_default: int = 0,
    ffn: str = "intermediate_size",
) -> dict[str, int]:
    """h, a, k, dh, f, v, L of a dense decoder, with divisibility checked."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", kv_default or heads)
    c.divides("num_attention_heads", "num_key_value_heads", heads, kv_heads)
    if "head_dim" not in c and not head_size_default:
        c.divides("hidden_size", "num_attention_heads", hidden, heads)
    head_size = c.size("head_dim", head_size_default or hidden // heads)
    return {
        "h": hidden,
        "a": heads,
        "k": kv_heads,
        "dh": head_size,
        "f": c.size(ffn),
        "v": c.size("vocab_size"),
        "L": c.size("num_hidden_layers"),
    }


def one_head_each(symbols: dict[str, int]) -> dict[str, int]:
    """The same sizes with a key/value head for every query head, whatever the config says."""
    return {**symbols, "k": symbols["a"]}


def attention_fields(
    c: Config, symbols: dict[str, int], *, bias: bool | None = None, output_bias: bool | None = None
) -> dict[str, Any]:
    """What most attentions read from their config: grouping, biases, dropout."""
    biased = c.flag("attention_bias") if bias is None else bias
    return {
        "grouped": symbols["k"] != symbols["a"],
        "bias": biased,
        "output_bias": biased if output_bias is None else output_bias,
        "dropout": c.probability("attention_dropout"),
    }


def decoder(
    c: Config,
    symbols: dict[str, int],
    layers: list[Part],
    family: str,
    *,
    embedding: TokenEmbedding | PositionedEmbedding | None = None,
    head: CausalLmHead | None = None,
    tied: bool = False,
    padded: bool = False,
    path: str = "model",
) -> ModelSpec:
    """Embedding, layers and head; neighbouring equal layers become one stage. `tied` and `padded`
    are the family's defaults."""
    embedding = embedding or TokenEmbedding()
    head = head or CausalLmHead()
    if c.flag("tie_word_embeddings", tied):
        head = head.replace(tied_to=f"{path}.{embedding.name}.weight")
    same = [list(run) for _, run in groupby(layers, key=id)]  # no stage for each of thousands
    stages = [
        Stage(part=run[0], count=len(run), path=f"{path}.layers", checkpointed=True) for run in same
    ]
    return c.spec(
        (
            Stage(part=embedding.replace(padded=pads(c, padded)), path=path),
            *runs(stages),
            Stage(part=head),
        ),
        symbols,
        family=family,
    )


# What Megatron-LM drops of attention and feed-forward (--hidden-dropout, which transformers' classes
# have not), as its launches are read.
MEGATRON_DROPOUT = "megatron_hidden_dropout"


def llama(c: Config) -> ModelSpec:
    """LlamaForCausalLM (transformers models/llama)."""
    symbols = dense_symbols(c)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias")),
        dropout=c.probability(MEGATRON_DROPOUT),
    )
    return decoder(c, symbols, [layer] * symbols["L"], "llama")


def internlm3(c: Config) -> ModelSpec:
    """InternLM3: Llama's layer with separate switches for the biases of q, k, v and of the output
    (its published modeling code)."""
    symbols = dense_symbols(c)
    fields = attention_fields(c, symbols, bias=c.flag("qkv_bias"), output_bias=c.flag("bias"))
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**fields),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("bias")),
    )
    return decoder(c, symbols, [layer] * symbols["L"], "internlm3")


def mistral(c: Config) -> ModelSpec:
    """MistralForCausalLM: every layer has the window, if there is one (transformers
    models/mistral)."""
    symbols = dense_symbols(c, kv_default=8)
    window = c.size("sliding_window", 0, low=0) if "sliding_window" in c.values else 4096
    layer = DecoderLayer(
        attention=GroupedQueryAttention(
            window=window, flash_repeats_before=(4, 48), **attention_fields(c, symbols, bias=False)
        ),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu")),
    )
    embedding = TokenEmbedding(full_mask=not window, windows=(window,) if window else ())
    return decoder(c, symbols, [layer] * symbols["L"], "mistral", embedding=embedding)


def sliding_stack(
    c: Config,
    symbols: dict[str, int],
    sliding: list[bool],
    window: int,
    layer_of: Callable[[int], Part],
    family: str,
    *,
    tied: bool = False,
    padded: bool = False,
    **parts: Any,
) -> ModelSpec:
    """A decoder in which some layers have a window: `layer_of(window)` makes a layer, 0 for a full
    one."""
    made = {flag: layer_of(window if flag else 0) for flag in set(sliding)}
    given = parts.pop("embedding", None)
    embedding = given if isinstance(given, TokenEmbedding) else TokenEmbedding()
    return decoder(
        c,
        symbols,
        [made[flag] for flag in sliding],
        family,
        embedding=embedding.replace(windows=(window,) if any(sliding) else ()),
        tied=tied,
        padded=padded,
        **parts,
    )


def ministral(c: Config) -> ModelSpec:
    """MinistralForCausalLM (transformers models/ministral)."""
    symbols = dense_symbols(c, kv_default=8)
    window = c.size("sliding_window", 0, low=0) if "sliding_window" in c.values else 4096
    mlp = GatedMlp(activation=c.activation("hidden_act", "silu"))
    fields = attention_fields(c, symbols, bias=False)
    return sliding_stack(
        c,
        symbols,
        c.sliding_layers(symbols["L"], [window > 0] * symbols["L"]),
        window,
        lambda w: DecoderLayer(attention=GroupedQueryAttention(window=w, **fields), mlp=mlp),
        "ministral",
    )


def qwen_window(c: Config, layers: int) -> tuple[list[bool], int]:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window`."""
    window = c.size("sliding_window", 4096, low=0) if c.flag("use_sliding_window") else 0
    first = c.size("max_window_layers", 28, low=0)
    return (
        c.sliding_layers(layers, [window > 0 and index >= first for index in range(layers)]),
        window,
    )


def qwen2(c: Config) -> ModelSpec:
    """Qwen2ForCausalLM: biases on q, k and v (transformers models/qwen2)."""
    symbols = dense_symbols(c, kv_default=None if "num_key_value_heads" in c.values else 32)
    sliding, window = qwen_window(c, symbols["L"])
    mlp = GatedMlp(activation=c.activation("hidden_act", "silu"))
    fields = attention_fields(c, symbols, bias=True, output_bias=False)
    return sliding_stack(
        c,
        symbols,
        sliding,
        window,
        lambda w: DecoderLayer(
            attention=GroupedQueryAttention(window=w, flash_repeats_before=(4, 48), **fields),
            mlp=mlp,
        ),
        "qwen2",
    )


def qwen3(c: Config) -> ModelSpec:
    """Qwen3ForCausalLM: a norm on each query and key head (transformers models/qwen3)."""
    symbols = dense_symbols(
        c, kv_default=None if "num_key_value_heads" in c.values else 32, head_size_default=128
    )
    sliding, window = qwen_window(c, symbols["L"])
    mlp = GatedMlp(activation=c.activation("hidden_act", "silu"))
    fields = attention_fields(c, symbols)
    return sliding_stack(
        c,
        symbols,
        sliding,
        window,
        lambda w: DecoderLayer(
            attention=GroupedQueryAttention(window=w, head_norm=Norm(), **fields), mlp=mlp
        ),
        "qwen3",
    )


def granite(c: Config) -> ModelSpec:
    """GraniteForCausalLM: embeddings, residuals, scores and logits each multiplied by a number
    (transformers models/granite)."""
    symbols = dense_symbols(c)
    layer = DecoderLayer(
        attention=GroupedQueryAttention(**attention_fields(c, symbols)),
        mlp=GatedMlp(activation=c.activation("hidden_act", "silu"), bias=c.flag("mlp_bias")),
        scaled=True,
    )
    return decoder(
        c,
        symbols,
        [layer] * symbols["L"],
        "granite",
        embedding=TokenEmbedding(scaled=True),
        head=CausalLmHead(scaled=True),
    )
