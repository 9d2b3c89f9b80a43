"""Whether a name that an adapter's targets give is that of a module: the end of its path, or, as
PEFT takes a single string, a pattern of the whole path (peft tuners/tuners_utils.py
check_target_module_exists)."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown

_PATTERN = frozenset("\\[](){}|^$*+?")
_LISTS = (".layers.", ".blocks.", ".h.", ".block.")
_TEXT = "language_model"
# What transformers 4 called projections of encoders of images (models/vit ViTSelfAttention).
_OF_4 = {part: f"attention.{part[0]}_proj" for part in ("query", "key", "value")}
# What Megatron-core calls linears, by the ends of the paths that transformers' classes give them:
# queries, keys and values are one there, gate and up too (Megatron-LM
# core/models/gpt/gpt_layer_specs.py, core/transformer/multi_latent_attention.py).
_OF_MEGATRON = {
    "linear_qkv": (
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"),
        *(f"self_attn.{name}" for name in ("query", "key", "value")),
    ),
    "linear_proj": (
        "o_proj",
        "attn.c_proj",
        "attention.dense",
        "self_attention.dense",
        "attn.out_proj",
    ),
    "linear_fc1": (
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "fc1",
        "c_fc",
        "dense_h_to_4h",
        "w1",
        "w3",
    ),
    "linear_fc2": ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h", "w2"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
_ENDS = ("0", "9999")  # the first layer, and one that no model has


def is_parameter(name: str) -> bool:
    """Whether a target is a parameter of experts or of their router, by its own name (PEFT's
    `target_parameters`), and no module's."""
    return "experts." in name or name.endswith(".weight")


def is_named(path: str, name: str) -> bool:
    """Whether `name` means the module at `path`, whose layer is written `*` or left out."""
    ends = _OF_MEGATRON.get(name.rpartition(".")[2], (name, _OF_4.get(name, name)))
    if path == name or path.endswith(tuple(f".{end}" for end in ends)):
        return True
    if _PATTERN.isdisjoint(name):
        return False
    if _TEXT in name and path.startswith("model.layers."):  # one that sees pictures, without them
        path = path.replace("model.", f"model.{_TEXT}.", 1)
    if not path.startswith(f"model.{_TEXT}."):
        return _matches(path, name)
    return any([_matches(known, name) for known in (path, _before_renaming(path))])


def _before_renaming(path: str) -> str:
    """The path of a joint model's text in classes that hold a whole model for text instead
    (transformers 4.51 models/llava, and models/voxtral of 5.14)."""
    return path.replace(f"model.{_TEXT}.", f"{_TEXT}.model.", 1)


def _matches(path: str, pattern: str) -> bool:
    import re

    try:
        found = {bool(re.fullmatch(pattern, _numbered(path, number))) for number in _ENDS}
    except re.error as error:
        raise InputError(
            f"--targets {shown(pattern)} is no pattern: {error}; write e.g. q_proj,v_proj"
        ) from None
    if len(found) > 1:
        raise InputError(
            f"--targets {shown(pattern)} names some layers of {path.partition('*')[0]} and not"
            " others, which is not modelled; name modules of all layers"
        )
    return found.pop()


def _numbered(path: str, number: str) -> str:
    """The path in one layer."""
    if ".*" in path:
        return path.replace("*", number)
    for mark in _LISTS:
        before, found, after = path.partition(mark)
        if found and not after[:1].isdecimal():
            return f"{before}{mark}{number}.{after}"
    return path
