"""Which optimizer a row means, and what is kept in the host's memory, in the many ways that both
are written."""

from __future__ import annotations

import re

from napkinmath.base.errors import InputError
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.catalog.stacks import find_stack
from napkinmath.catalog.te_adam import te_name
from napkinmath.config.train_config import OffloadConfig

from published.era import Era
from published.rows import Row

_UNSTATED = (
    "",
    "adam",
    "adamw",
    "adamwtorch",
    "adamwhf",
    "default",
    "auto",
    "unknown",
    "notstated",
    "none",
    "na",
)
_NO = r"^(no(ne)?|off|false|0|disabled?|without|w/o|n/a|-|not used|no .*)$"
# Words that decide whatever stands beside them; the catalogue's names are tried after these.
_BY_WORD = (
    (r"galore.*8bit|8bit.*galore", "galore"),
    (r"galore", "galore"),
    (r"apollo", "apollo"),
    (r"anyprecision", "anyprecision-adamw"),
    (r"sgd.*momentum|momentum.*sgd|nesterov", "momentum"),
    (r"lomo", "lomo"),
    (r"adafactor", "adafactor"),
    (r"muon", "muon"),
    (r"lion.*8bit|8bit.*lion", "lion-8bit"),
    (r"^lion", "lion"),
    (r"^sgd$", "sgd"),
    (r"^paged$", "paged-adamw"),
)
# Megatron-Core's precision-aware optimizer, whose masters are the halves that bf16 weights lack.
_NARROW_MOMENTS = r"(?:bf16|bfloat16)[ -](?:adam )?(?:moments|optimizer states)|moments in bf16"
_LIBRARY_WORDS = ("torch", "hf", "bnb", "optimizer", "pytorch", "32bit", "states")


def optimizer_of(row: Row, era: Era, assumed: dict[str, str]) -> str:
    """The catalogue's name of the row's optimizer; the stack's AdamW, said as assumed, for one that
    is not in it."""
    method = row.words("method")
    text = re.sub(
        r"\(.*?\)|(optimizer)?[ _-]*in[_ -](bwd|backward)", " ", row.words("optimizer")
    ).strip()
    words = re.sub(r"[^a-z0-9]+", " ", re.sub(r"paged", " paged ", text)).split()
    joined = "".join(words)
    if find_stack(era.stack).engine.own_stages and re.search(
        _NARROW_MOMENTS, row.words("optimizer", "precision", "notes")
    ):
        return te_name("bf16", "bf16", "remainders")
    if joined in _UNSTATED:
        return _of_method(method, joined, era)
    if ("adam" in joined or joined in ("bitsandbytes", "bnb")) and re.search(
        r"8bit|int8|bit8|^(bitsandbytes|bnb)$", joined
    ):
        if "galore" in joined or "galore" in method:
            return "galore"
        if "paged" in words:
            return "paged-adamw-8bit"
        return "adamw-8bit" if re.search(r"bnb|bitsandbytes", joined) else era.eight_bit_optimizer
    if "paged" in words and "adam" in joined:
        return "paged-adamw"
    named = next((name for pattern, name in _BY_WORD if re.search(pattern, joined)), "")
    if named:
        return named
    try:
        return find_optimizer("-".join(w for w in words if w not in _LIBRARY_WORDS)).name
    except InputError:
        pass
    assumed["optimizer" if "adam" in joined else "unknown optimizer"] = (
        f"optimizer {row['optimizer']!r} read as the stack's AdamW"
    )
    return "adamw-fused" if re.search(r"fused|apex", joined) else "auto"


def _of_method(method: str, joined: str, era: Era) -> str:
    for name in ("galore", "apollo", "lomo"):
        if name in method:
            return name
    quantized = bool(re.search(r"q-?lora", method))
    if quantized and era.quantized_optimizer and joined != "adamwtorch":
        return era.quantized_optimizer
    return "auto" if joined else era.optimizer


def names_optimizer(row: Row) -> bool:
    """Whether a row's words put the optimizer into host memory."""
    if re.search(r"offload|cpu-?adam", row.words("optimizer")):
        return True
    words = r"optim|gradient|nvme|disk|zero|infinity|^(cpu|host|yes|true|on|all|full)$"
    return bool(re.search(words, row.words("offload").strip()))


def offload_of_row(row: Row, era: Era, *, full: bool, assumed: dict[str, str]) -> OffloadConfig:
    """What lies in the host's memory; `full` is training of all weights, whose update happens where
    they are kept."""
    text = row.words("offload").strip()
    none = not row.states("offload") or bool(re.search(_NO, text))
    if re.search(r"offload|cpu-?adam", row.words("optimizer")):
        text, none = f"{text} optimizer", False
    checkpoints = (
        bool(re.search(r"unsloth|offload", row.words("checkpointing"))) or "unsloth" in text
    )
    if none:
        return OffloadConfig(checkpoints=checkpoints)
    parameters = bool(re.search(r"param|weight|nvme|disk|infinity", text))
    wanted = OffloadConfig(
        activations="activation" in text,
        parameters=parameters,
        optimizer=names_optimizer(row) or (parameters and full),
        checkpoints=checkpoints,
        style=era.offload_style,
    )
    if wanted.activations or wanted.parameters or wanted.optimizer or wanted.checkpoints:
        return wanted
    if not re.search(r"cpu|host|yes|true|on\b|all|full", text):
        assumed["offload"] = f"offload {row['offload']!r} read as the optimizer's"
        return OffloadConfig(optimizer=True, style=era.offload_style)
    return OffloadConfig(parameters=True, optimizer=True, style=era.offload_style)
