"""Architectures with a question mark: heads and layers that a table leaves out, from the sizes it
gives.

Heads are 128 wide, or what divides the hidden size nearest to that; layers are those that the
parameter count leaves after the vocabulary, in whole pipeline stages. Both move sizes and speed
little: attention's own FLOPs do not depend on the number of heads.
"""

from __future__ import annotations

import math
import re

from published.rows import Row, Unreadable

_HEAD_SIZE = 128
MANY_BILLIONS = 5000  # above it a column of billions holds millions, or the number itself
_EMBEDDING_NORM = r"(?i)\s*\bembed(?:ding)?[-_ ]?(?:ln|norm)\b"
_UNKNOWN = r"(?<![\w.])(L|a|h|kv|ffn)\s*\?"


def completed_arch(row: Row, assumed: dict[str, str]) -> str:
    """The architecture column without question marks, where what is missing follows from the
    rest."""
    arch = row["arch"].strip()
    if re.search(_EMBEDDING_NORM, arch):
        arch = re.sub(_EMBEDDING_NORM, "", arch)
        assumed["embedding norm"] = "the norm behind the embeddings left out: one of a model"
    arch = _own_code(row, arch)
    hidden = _number(arch, "h")
    if not re.search(_UNKNOWN, arch) or hidden is None:
        return arch
    if re.search(r"\bL\s*\?", arch):
        layers = _layers(row, arch, hidden)
        if layers:
            arch = re.sub(r"\bL\s*\?", f"L{layers}", arch)
            assumed["layers"] = "layers not stated: as many as the parameter count leaves"
    if re.search(r"\ba\s*\?", arch):
        ranks = re.search(r"\btp\s*[=:]?\s*(\d+)", row.words("sharding"))
        size = _head_size(hidden, int(ranks[1]) if ranks else 1)
        arch = re.sub(r"\ba\s*\?", f"a{hidden // size}", arch)
        assumed["heads"] = "heads not stated: about 128 wide"
    return re.sub(r"\s*\b(?:kv|ffn)\s*\?", "", arch)


# Hidden sizes of Llama and its like, by billions of parameters (arXiv 2302.13971 table 2, and
# smaller ones of its design).
_HIDDEN_SIZES = (
    (0.13, 768),
    (0.4, 1024),
    (1.1, 2048),
    (3.3, 3200),
    (6.7, 4096),
    (13.0, 5120),
    (32.5, 6656),
    (65.2, 8192),
    (175.0, 12288),
)
_USUAL_VOCABULARY = 32000
# (billions, layers, hidden size, heads) of GPT-3's models (arXiv 2005.14165 table 2.1).
_GPT3 = (
    (0.125, 12, 768, 12),
    (0.35, 24, 1024, 16),
    (0.76, 24, 1536, 16),
    (1.3, 24, 2048, 16),
    (2.7, 32, 2560, 32),
    (6.7, 32, 4096, 32),
    (13.0, 40, 5120, 40),
    (175.0, 96, 12288, 96),
)


def typical_arch(billions: float, name: str = "") -> str:
    """A decoder of Llama's design of so many parameters, for models that are known by their size
    alone; one of GPT-3's where the name says so, which pretraining frameworks run."""
    if re.match(r"gpt-?3\b", name.lower()):
        _, layers, hidden, heads = min(_GPT3, key=lambda known: abs(math.log(known[0] / billions)))
        return f"gpt2 fused-gelu L{layers} h{hidden} a{heads} ffn{4 * hidden} V50257"
    hidden = min(_HIDDEN_SIZES, key=lambda known: abs(math.log(known[0] / billions)))[1]
    width = -(-8 * hidden // 3 // 256) * 256
    layers = (billions * 1e9 - 2 * _USUAL_VOCABULARY * hidden) / (
        4 * hidden**2 + 3 * hidden * width
    )
    return (
        f"L{max(1, round(layers))} h{hidden} a{hidden // _head_size(hidden)} f{width}"
        f" v{_USUAL_VOCABULARY}"
    )


def billions_of(row: Row) -> float | None:
    """Parameters in billions: of their column, else as the model's name says ("Orca-2-7b",
    "(350M)"); None where neither does."""
    try:
        stated = row.number("params_b")
    except Unreadable:
        stated = None
    if stated:
        return stated if stated < MANY_BILLIONS else stated / 1e9 if stated > 1e6 else stated / 1e3
    found = re.search(
        r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*-?\s*(b|m)(?:illion)?\b", row["model"].lower()
    )
    return (
        float(found[1]) / (1 if found[2] == "b" else 1000)
        if found and float(found[1]) > 0
        else None
    )


def runs_own_code(arch: str) -> bool:
    """Whether the completed architecture is one that no class of transformers runs, whatever the
    model's name."""
    return "fused-gelu" in arch


def _own_code(row: Row, arch: str) -> str:
    """Decoders that a pretraining framework runs by code of its own, not transformers': GELU in one
    kernel, and MPT with flash attention."""
    if re.match(r"MPT\b", arch) and "learned-pos" in arch and "flash" in row.words("attention"):
        return re.sub(r"^MPT\b", "gpt2 no-dropout fused-gelu", arch)
    if (
        "pretrain" in row.words("method")
        and _number(arch, "ffn") == 4 * (_number(arch, "h") or 0)
        and not re.search(r"\b(kv|gated|llama)", arch)
    ):
        return f"{arch} fused-gelu"
    return arch


def _layers(row: Row, arch: str, hidden: int) -> int:
    billions = billions_of(row)
    if not billions:
        return 0
    vocabulary, width = _number(arch, "V") or 50_000, _number(arch, "ffn") or 4 * hidden
    each = 4 * hidden**2 + 2 * hidden * width
    stages = re.search(r"\bpp\s*[=:]?\s*(\d+)", row.words("sharding"))
    step = int(stages[1]) if stages else 1
    return max(1, round((billions * 1e9 - vocabulary * hidden) / each / step)) * step


def _head_size(hidden: int, ranks: int = 1) -> int:
    """About 128, of heads that tensor-parallel ranks can share."""
    return min(
        (size for size in range(32, 257) if hidden % size == 0 and hidden // size % ranks == 0),
        key=lambda size: abs(size - _HEAD_SIZE),
        default=hidden,
    )


def _number(arch: str, letter: str) -> int | None:
    found = re.search(rf"(?<![A-Za-z]){letter}\s*=?\s*([\d.]+)([kK]?)(?![A-Za-z])", arch)
    return int(float(found[1]) * (1000 if found[2] else 1)) if found else None
