"""Prompt and prefix tuning: trained vectors in front of the embeddings, or of every layer's keys
and values.

Prompt: V trained embeddings are looked up for every sequence and put before its own, so that all
layers run over V tokens more. Prefix: one trained row a virtual token holds its keys and values of
all layers; each layer puts them before its own, so that attention reads V more and the rest runs as
before. Source: peft 0.21 peft_model.py PeftModelForCausalLM.forward, PeftModel.get_prompt,
tuners/prompt_tuning/model.py PromptEmbedding, tuners/prefix_tuning/model.py PrefixEncoder (no
projection, its default).
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, INT64
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size, symbol
from napkinmath.config.train_config import AdapterConfig, AdapterKind, RecomputeKind, TrainConfig
from napkinmath.ir.ledger import ALLOC, Gradient, Value
from napkinmath.ir.model_spec import DECODER_TOKENS, ENCODER_TOKENS
from napkinmath.lowering.adapters import lora_weight
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.index import concatenate, constant, embedding, slice_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.tape import Tape

PREFIX = "prefix"


def settle_virtual_tokens(
    spec: ModelSpec, config: TrainConfig, adapter: AdapterConfig
) -> TrainConfig:
    """The configuration with a prompt's tokens counted in; InputError for models and settings that
    the library or the record lacks."""
    encodes = adapter.kind is AdapterKind.PROMPT
    encodes = encodes and spec.stages[0].part.virtual_tokens == ENCODER_TOKENS
    if not encodes and not _all_before_decoder(spec):
        raise InputError(
            f"{adapter.kind.value} tuning is priced for decoders alone whose attention has plain"
            f" heads, not for {spec.family}; use --lora"
        )
    length, batch = config.sequence_length, config.batch
    if adapter.kind is AdapterKind.PREFIX:
        _refuse_checkpointing(config)
        return config
    if encodes and not batch.target_length:  # the prompt lengthens what the encoder reads alone
        batch = batch.replace(target_length=length)
    virtual = adapter.num_virtual_tokens
    batch = batch.replace(lengths=tuple(own + virtual for own in batch.lengths))
    return config.replace(sequence_length=length + virtual, batch=batch)


def _refuse_checkpointing(config: TrainConfig) -> None:
    if config.recompute.kind is not RecomputeKind.NONE and config.training_mode:
        raise InputError(
            "prefix tuning does not work with gradient checkpointing (peft refuses it); add"
            " --checkpointing none"
        )


def _all_before_decoder(spec: ModelSpec) -> bool:
    """Whether embeddings and layers are those of a decoder alone whose attention has plain
    heads."""
    parts = [stage.part for stage in spec.stages if stage.checkpointed]
    return all(part.virtual_tokens == DECODER_TOKENS for part in (spec.stages[0].part, *parts))


def with_virtual_tokens(t: Tape, x: Value, shared: dict[str, Value]) -> Value:
    """The embeddings with a prompt's before them; a prefix is published for the layers to read."""
    count = t.policy.virtual_tokens(AdapterKind.PROMPT)
    if count:
        *batch, length, width = x.axes
        found = _looked_up(t, (*batch, count), width)
        with t.scope() as frame:
            frame.local(x, shared["labels"])
            longer = (*batch, length + count)
            shared["labels"] = constant(t, "labels with virtual tokens", longer, INT64)
            return concatenate(t, (cast(t, found, x.dtype), x), (*batch, symbol("s"), width))
    count = t.policy.virtual_tokens(AdapterKind.PREFIX)
    if count:
        k, dh, layers = symbol("k"), symbol("dh"), symbol("L")
        looked = _looked_up(t, (x.axes[0], count), 2 * layers * k * dh)
        found = cast(t, looked, t.policy.loaded_dtype)
        split = t.view(found, (x.axes[0], count, 2 * layers, k, dh))
        # the cache copies each layer's part
        shared[PREFIX] = copy(t, split, name="prefix by layer")
    return x


def with_encoder_prompt(t: Tape, x: Value) -> Value:
    """An encoder's embeddings behind a prompt's; its table has as many rows for the decoder, which
    are looked up and left (T5)."""
    count = t.policy.virtual_tokens(AdapterKind.PROMPT)
    if not count:
        return x
    rows, _, width = x.axes
    found = cast(t, _looked_up(t, (rows, 2 * count), width), x.dtype)
    return concatenate(t, (slice_of(t, found, (rows, count, width)), x), (rows, symbol("s"), width))


def _looked_up(t: Tape, axes: tuple[Size, ...], width: Size) -> Value:
    with t.scope("prompt_encoder"):
        ids = constant(t, "virtual token ids", axes, INT64)
        table = lora_weight(t, "embedding.weight", (axes[-1], width))
        assert table.weight is not None
        return embedding(t, ids, "embedding", axes[-1], width, weight=table.weight)


def with_prefix(t: Tape, key: Value, value: Value, prefix: Value) -> tuple[Value, Value]:
    """Keys and values of axes (b, heads, s, dh) behind the layer's part of the prefix; the
    key/value cache holds both to the end."""
    rows, heads, length, size = key.axes
    count = t.policy.virtual_tokens(AdapterKind.PREFIX)
    parts = tuple(
        Value(prefix.tensor, (rows, heads, count, size), prefix.dtype, prefix.requires_grad)
        for _ in range(2)
    )
    gradient = t.gradient_of(prefix)
    t.append(
        "prefix of the layer",
        (prefix,),
        parts,
        forward=(),
        backward=((ALLOC, gradient),),
        gradients=(Gradient(prefix, gradient),),
    )
    joined: list[Value] = []
    for part, own in zip(parts, (key, value), strict=True):
        joined.append(
            concatenate(
                t,
                (cast(t, part, own.dtype) if own.dtype is FP32 else part, own),
                (rows, heads, length + count, size),
            )
        )
        t.outliving.append(joined[-1].tensor)
    return joined[0], joined[1]
