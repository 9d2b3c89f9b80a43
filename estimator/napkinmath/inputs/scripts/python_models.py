"""What a script does to a model once it is loaded: its methods, the functions that it is given to,
attributes that are set on it.

Sources: transformers 5.23 modeling_utils.py resize_token_embeddings, set_attn_implementation,
gradient_checkpointing_enable, integrations/peft.py add_adapter; torch 2.9 __init__.py compile,
nn/modules/module.py compile; peft 0.21 tuners/tuners_utils.py merge_and_unload; liger-kernel 0.6
transformers/auto_model.py.
"""

from __future__ import annotations

from napkinmath.inputs.scripts.python_values import Made, Unknown, mapping_of, unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from typing import Any

_KINDS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
# Sizes of a model, by the names that transformers' configs have for them.
_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "n_layer"),
    *("num_key_value_heads", "vocab_size", "head_dim", "n_embd", "n_head", "d_model", "num_layers"),
    *("num_experts", "num_local_experts", "moe_intermediate_size"),
)
# Functions that a model is given to -> the key that says so. Those in _IN_PLACE change the model
# itself, the others give it back in a wrapper.
_IN_PLACE = {
    "quantize_": "quantized_in_code",
    "convert_to_float8_training": "float8_in_code",
    "apply_activation_checkpointing": "checkpointed_in_code",
    "fully_shard": "sharded_in_code",
}
_WRAPPERS = {
    "FullyShardedDataParallel": "sharded_in_code",
    "FSDP": "sharded_in_code",
    "DataParallel": "replicated_in_code",
    "DistributedDataParallel": "ddp_in_code",
    "DDP": "ddp_in_code",
    "dispatch_model": "placed_in_code",
    "cpu_offload": "placed_in_code",
}
# Arguments of torch.compile -> the Trainer's keys that are passed on to it.
_COMPILER = {"mode": "torch_compile_mode", "backend": "torch_compile_backend"}
_USUAL_COMPILER = ("default", "inductor", None)
_OWN_HEADS = ("lm_head", "embed_out", "score", "classifier")


def is_new_model(value: Any) -> bool:
    """Whether a value comes from a call of a model's class itself, `LlamaForCausalLM(config)`, so
    that no checkpoint says its sizes."""
    name = value.source.partition("(")[0].rpartition(".")[2] if isinstance(value, Unknown) else ""
    is_head = "ForCausalLM" in name or "ForConditional" in name or name.endswith("LMHeadModel")
    return is_head and not name.startswith(("Peft", "Auto"))


def own_size(model: Made) -> str:
    """The first size that a script gives a model or its config in place of the published one; ''
    for none."""
    config = model.keys.get("config")
    given = {**(config.keys if isinstance(config, Made) else {}), **model.keys}
    return next((key for key in given if key in _SIZES), "")


def on_model(
    model: Made, name: str, given: list[Any], named: dict[str, Any], node: ast.Call
) -> Any:
    """What a model's method gives: mostly the model."""
    line = node.lineno
    if name == "gradient_checkpointing_enable":
        model.set("gradient_checkpointing", True, line)
        _set_keywords(model, given[0] if given else None, named, line)
    elif name == "gradient_checkpointing_disable":
        model.set("gradient_checkpointing", False, line)
    elif name == "add_adapter":
        _add_adapter(model, given, named, line)
    elif name in ("merge_and_unload", "unload"):
        found = model.copied()
        found.keys.pop("peft", None)
        found.keys.pop("second_adapter", None)
        return found
    elif name in _KINDS or name == "to":
        told = [named.get("dtype"), *given]
        kind = _KINDS.get(name) or next((one for one in told if one in _KINDS.values()), None)
        if kind is not None:
            model.keys.pop("torch_dtype", None)
            model.set("dtype", kind, line)
    elif name == "resize_token_embeddings":
        _resize(model, given, named, line)
    elif name == "compile":
        _compile(model, named, line)
    elif name == "set_attn_implementation":
        model.set("attn_implementation", given[0] if given else unknown(node), line)
    elif name in ("generate", "state_dict", "parameters", "named_parameters", "get_nb_trainable"):
        return unknown(node)
    return model


def given_to(name: str, passed: list[Made], named: dict[str, Any], node: ast.Call) -> Made | None:
    """The model after a function of this name that it is given to; None for another function, and
    for one that is given no model."""
    model = next((one for one in passed if one.kind == "model"), None)
    last = name.rpartition(".")[2]
    if model is None:
        return None
    if name == "torch.compile":
        found = model.copied()
        _compile(found, named, node.lineno)
        return found
    if last in _IN_PLACE:
        model.set(_IN_PLACE[last], True, node.lineno)
        return model
    if last in _WRAPPERS:
        found = model.copied()
        found.set(_WRAPPERS[last], True, node.lineno)
        return found
    return None


def set_on(owner: Made, name: str, value: object, line: int) -> None:
    """Sets an attribute of something made; of a model's config what the model reads when it runs
    (transformers 5.23 modeling_utils.py get_correct_attn_implementation, its layers' forward)."""
    if owner.model is not None:
        if name == "_attn_implementation":
            owner.model.set("attn_implementation", value, line)
    elif owner.kind == "model" and name in _OWN_HEADS:
        owner.set("head_in_code", True, line)
    else:
        owner.set(name, value, line)


def keep_model(trainer: Made) -> None:
    """A trainer's model as it is when training starts: what follows is not of the training."""
    model = trainer.keys.get("model")
    if isinstance(model, Made):
        trainer.keys["model"] = model.copied()


def _set_keywords(model: Made, first: Any, named: dict[str, Any], line: int) -> None:
    keywords = mapping_of(named.get("gradient_checkpointing_kwargs", first))
    if keywords:
        model.set("gradient_checkpointing_kwargs", keywords, line)


def _add_adapter(model: Made, given: list[Any], named: dict[str, Any], line: int) -> None:
    """transformers' add_adapter(config, name), or that of a PeftModel, (name, config)."""
    words = [one for one in (*given, *named.values()) if isinstance(one, Made)]
    config = next((one for one in words if one.kind == "adapter"), None)
    if model.keys.get("peft") is not None:
        model.set("second_adapter", True, line)
    else:
        other = given[0] if given else named.get("adapter_config")
        model.set("peft", other if config is None else config, line)


def _resize(model: Made, given: list[Any], named: dict[str, Any], line: int) -> None:
    """Embeddings of another number of rows: one that the text says, or that of a tokenizer."""
    size = given[0] if given else named.get("new_num_tokens")
    multiple = given[1] if len(given) > 1 else named.get("pad_to_multiple_of")
    model.keys.pop("tokenizer_vocabulary", None)
    model.keys.pop("resized_vocabulary", None)
    if type(size) is int:
        model.set("resized_vocabulary", size, line)
    elif size is not None:
        by_length = isinstance(size, Unknown) and size.source.startswith("len(")
        model.set("tokenizer_vocabulary", "length" if by_length else "computed", line)
    if type(multiple) is int and multiple > 0:
        model.set("vocabulary_multiple", multiple, line)


def _compile(model: Made, named: dict[str, Any], line: int) -> None:
    model.set("torch_compile", True, line)
    for word, key in _COMPILER.items():
        if word in named and named[word] not in _USUAL_COMPILER:
            model.set(key, named[word], line)
