"""Bare numbers as a model: "L32 h4096 a32 kv8 f14336 v128256" becomes the config of the nearest
family.

Letters are those of the formulas: L layers, h hidden, a heads, kv (or k) key-value heads, dh head
size, f (or ffn) FFN width, v vocabulary. Words add what numbers do not say: tied, gated, gelu,
fused-gelu (one kernel), no-dropout, mqa, bias, learned-pos, encoder, moe8x2, or a family's name.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.base.units import parse_count, round_up
from napkinmath.models.families.config import MAX_LAYERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXAMPLE = "L32 h4096 a32 kv8 f14336 v128256"
_KEYS = {
    "l": "L",
    "h": "h",
    "a": "a",
    "kv": "k",
    "k": "k",
    "dh": "dh",
    "f": "f",
    "ffn": "f",
    "v": "v",
    "p": "p",
}
_NAMES = {
    "L": "layers",
    "h": "hidden size",
    "a": "heads",
    "k": "key-value heads",
    "dh": "head size",
    "f": "FFN width",
    "v": "vocabulary",
    "p": "positions",
}
_FLAGS = {
    "tied": "tied",
    "untied": "untied",
    "gated": "gated",
    "swiglu": "gated",
    "silu": "gated",
    "geglu": "geglu",
    "gelu": "gelu",
    "relu": "relu",
    "mqa": "mqa",
    "mha": "mha",
    "gqa": "gqa",
    "learned-pos": "learned-pos",
    "learned_pos": "learned-pos",
    "alibi": "alibi",
    "rope": "rope",
    "encoder": "encoder",
    "decoder": "decoder",
    "bias": "bias",
    "no-bias": "no-bias",
    "no-dropout": "no-dropout",
    "fused-gelu": "fused-gelu",
}
_LARGEST = 1 << 31


class Arch:
    """An architecture's numbers and words as they were read, and the ones taken for granted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.numbers: dict[str, int] = {}
        self.flags: set[str] = set()
        self.family = ""
        self.experts: tuple[int, int] = (0, 0)
        self.notes: list[str] = []
        self.positions = 0

    def require(self, key: str) -> int:
        """A number that has no sensible default."""
        if key not in self.numbers:
            raise InputError(
                f"--arch {shown(self.text)} lacks {key} ({_NAMES[key]}); write e.g. {EXAMPLE}"
            )
        return self.numbers[key]

    def assume(self, key: str, value: int, why: str) -> int:
        """A number, or its default with a note."""
        if key in self.numbers:
            return self.numbers[key]
        self.notes.append(f"--arch: {key} ({_NAMES[key]}) not given, taken as {value} ({why})")
        return value

    def one_of(self, *flags: str) -> str:
        """The flag among these that was given, or an empty string; two of them contradict each
        other."""
        found = [flag for flag in flags if flag in self.flags]
        if len(found) > 1:
            raise InputError(
                f"--arch {shown(self.text)} says {found[0]} and {found[1]}; keep one of them"
            )
        return found[0] if found else ""


def read_arch(text: str, notes: list[str] | None = None, *, positions: int = 0) -> dict[str, Any]:
    """The config that an architecture string describes; `notes` receives what was assumed.

    `positions` is the length of a learned position table where `p` is not given: at least 2048 (512
    for an encoder).
    """
    arch = parse_arch(text)
    arch.positions = positions
    _check_heads(arch)
    config = _layout(arch)(arch)
    if notes is not None:
        notes.extend(arch.notes)
    return config


def parse_arch(text: str) -> Arch:
    """The words of an architecture string, each a number with its letter or a known flag."""
    arch = Arch(text)
    for word in _without_remarks(arch).replace(",", " ").replace("=", "").split():
        letters = word[: next((i for i, c in enumerate(word) if not c.isalpha()), len(word))]
        number = word[len(letters) :]
        lower = word.lower()
        if lower in _FLAGS:
            arch.flags.add(_FLAGS[lower])
        elif letters.lower() == "moe" and number:
            arch.experts = _experts(word, number)
        elif letters.lower() in _KEYS and number:
            _add_number(arch, _KEYS[letters.lower()], word, number)
        elif not arch.family and _is_family(lower):
            arch.family = lower.replace("-", "_")
        else:
            known = [*sorted(set(_FLAGS)), "moe8x2"]
            raise InputError(
                f"--arch {shown(text)}: {shown(word)} is not understood{suggest(lower, known)};"
                f" write e.g. {EXAMPLE} tied"
            )
    return arch


def _without_remarks(arch: Arch) -> str:
    text = arch.text
    while "(" in text and ")" in text[text.index("(") :]:
        start = text.index("(")
        end = text.index(")", start) + 1
        arch.notes.append(f"--arch: remark {shown(text[start:end])} ignored")
        text = text[:start] + " " + text[end:]
    return text


def _add_number(arch: Arch, key: str, word: str, number: str) -> None:
    if key in arch.numbers:
        raise InputError(
            f"--arch {shown(arch.text)} gives {key} ({_NAMES[key]}) twice, again with"
            f" {shown(word)}; keep one"
        )
    if key == "v" and number.lower().endswith(
        "k"
    ):  # vocabularies are quoted in thousands, sizes in 1024s
        arch.numbers[key] = (
            parse_count(number[:-1], what=f"--arch {word}:", high=_LARGEST // 1000) * 1000
        )
    else:
        arch.numbers[key] = parse_count(
            number, what=f"--arch {word}:", high=MAX_LAYERS if key == "L" else _LARGEST
        )


def _experts(word: str, number: str) -> tuple[int, int]:
    experts, _, active = number.lower().partition("x")
    count = parse_count(experts, what=f"--arch {word}:", high=1 << 16)
    return count, parse_count(active or "2", what=f"--arch {word}:", high=count)


def _is_family(word: str) -> bool:
    return word.replace("-", "_") in ("llama", "mpt", "gpt", "gpt2", "bert", "mixtral")


def _check_heads(arch: Arch) -> None:
    hidden, heads = arch.require("h"), arch.numbers.get("a")
    arch.require("L")
    if heads is None:
        size = 128 if hidden >= 2048 and hidden % 128 == 0 else 64
        if hidden % size:
            raise InputError(
                f"--arch {shown(arch.text)} lacks a (heads) and h{hidden} is not a multiple of 64;"
                f" write e.g. a{max(1, hidden // 64)}"
            )
        heads = arch.numbers["a"] = arch.assume("a", hidden // size, f"head size {size}")
    if "dh" not in arch.numbers and hidden % heads:
        raise InputError(
            f"--arch {shown(arch.text)}: h{hidden} is not divisible by a{heads}; change one, or"
            " give the head size as dh128"
        )
    if arch.one_of("mqa", "mha", "gqa") == "mqa" and arch.numbers.setdefault("k", 1) != 1:
        raise InputError(
            f"--arch {shown(arch.text)} says mqa and kv{arch.numbers['k']}; multi-query attention"
            " has kv1"
        )
    if heads % arch.numbers.get("k", heads):
        raise InputError(
            f"--arch {shown(arch.text)}: a{heads} is not divisible by kv{arch.numbers['k']}; change"
            " one of them"
        )


def _layout(arch: Arch) -> Callable[[Arch], dict[str, Any]]:
    """The config of which family has this shape: what was named, else what the words and the FFN
    width imply."""
    arch.one_of("tied", "untied")
    arch.one_of("encoder", "decoder")
    arch.one_of("gated", "gelu", "relu")
    arch.one_of("learned-pos", "alibi", "rope")
    if arch.family in ("mpt",) or "alibi" in arch.flags:
        return _mpt
    if arch.family == "bert" or "encoder" in arch.flags:
        return _bert
    if arch.experts[0] or arch.family == "mixtral":
        return _mixtral
    ungated = (
        arch.one_of("gelu", "relu") or "learned-pos" in arch.flags or arch.family in ("gpt", "gpt2")
    )
    if (
        not ungated
        and "gated" not in arch.flags
        and arch.family != "llama"
        and _four_times_hidden(arch)
    ):
        arch.notes.append(
            "--arch: f is 4 h without grouped heads, taken as a GPT-2 layer (ungated GELU, learned"
            " positions, biases); add 'gated' for a Llama layer"
        )
        ungated = "gelu"
    if not ungated:
        return _llama
    return _gpt_bigcode if arch.numbers.get("k") == 1 else _gpt2


def _four_times_hidden(arch: Arch) -> bool:
    heads = arch.numbers["a"]
    return arch.numbers.get("f") == 4 * arch.numbers["h"] and arch.numbers.get("k", heads) in (
        1,
        heads,
    )


def _common(arch: Arch, model_type: str, *, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": arch.assume("v", vocabulary, "as in the family"),
    }


def _llama(arch: Arch) -> dict[str, Any]:
    hidden, heads = arch.require("h"), arch.numbers["a"]
    config = {
        **_common(arch, "llama", vocabulary=32000),
        "num_hidden_layers": arch.require("L"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": arch.numbers.get("k", heads),
        "intermediate_size": arch.assume(
            "f", round_up(hidden * 8 // 3, 256), "8/3 h rounded up to 256"
        ),
        "tie_word_embeddings": "tied" in arch.flags,
        "attention_bias": "bias" in arch.flags,
        "mlp_bias": "bias" in arch.flags,
        "hidden_act": "gelu" if "geglu" in arch.flags else "silu",
    }
    if "dh" in arch.numbers:
        config["head_dim"] = arch.numbers["dh"]
    return config


def _mixtral(arch: Arch) -> dict[str, Any]:
    experts, active = arch.experts if arch.experts[0] else (8, 2)
    config = _llama(arch)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {
        **config,
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": active,
    }


def _gpt2(arch: Arch) -> dict[str, Any]:
    hidden, heads = arch.require("h"), arch.numbers["a"]
    if arch.numbers.get("k", heads) != heads:
        raise InputError(
            f"--arch {shown(arch.text)}: kv{arch.numbers['k']} with an ungated GPT layer is not"
            " known; use kv1 (mqa), or 'gated' for a Llama layer"
        )
    _refuse_head_size(arch)
    return {
        **_common(arch, "gpt2", vocabulary=50304),
        "n_layer": arch.require("L"),
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": arch.assume("f", 4 * hidden, "4 h"),
        "n_positions": arch.numbers.get("p", max(2048, arch.positions)),
        "activation_function": (
            "relu" if "relu" in arch.flags else "gelu" if "fused-gelu" in arch.flags else "gelu_new"
        ),
        **(
            {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            if "no-dropout" in arch.flags
            else {}
        ),
        "tie_word_embeddings": "untied" not in arch.flags,
    }


def _gpt_bigcode(arch: Arch) -> dict[str, Any]:
    return {**_gpt2_like(arch), "model_type": "gpt_bigcode", "multi_query": True}


def _gpt2_like(arch: Arch) -> dict[str, Any]:
    heads_only = Arch(arch.text)
    heads_only.numbers = {key: value for key, value in arch.numbers.items() if key != "k"}
    heads_only.flags, heads_only.notes, heads_only.positions = (
        arch.flags,
        arch.notes,
        arch.positions,
    )
    return _gpt2(heads_only)


def _mpt(arch: Arch) -> dict[str, Any]:
    hidden = arch.require("h")
    _refuse_head_size(arch)
    width = arch.assume("f", 4 * hidden, "4 h")
    if width % hidden:
        raise InputError(
            f"--arch {shown(arch.text)}: f{width} is not a multiple of h{hidden}, as MPT has it;"
            f" use f{4 * hidden}"
        )
    return {
        **_common(arch, "mpt", vocabulary=50368),
        "n_layers": arch.require("L"),
        "d_model": hidden,
        "n_heads": arch.numbers["a"],
        "expansion_ratio": width // hidden,
        "max_seq_len": arch.numbers.get("p", max(2048, arch.positions)),
        "learned_pos_emb": "learned-pos" in arch.flags,
        "attn_config": {"alibi": "learned-pos" not in arch.flags},
        "tie_word_embeddings": "untied" not in arch.flags,
    }


def _bert(arch: Arch) -> dict[str, Any]:
    hidden = arch.require("h")
    _refuse_head_size(arch)
    return {
        **_common(arch, "bert", vocabulary=30522),
        "architectures": ["BertForSequenceClassification"],
        "num_hidden_layers": arch.require("L"),
        "hidden_size": hidden,
        "num_attention_heads": arch.numbers["a"],
        "intermediate_size": arch.assume("f", 4 * hidden, "4 h"),
        "max_position_embeddings": arch.numbers.get("p", max(512, arch.positions)),
        "hidden_act": "relu" if "relu" in arch.flags else "gelu",
    }


def _refuse_head_size(arch: Arch) -> None:
    if "dh" in arch.numbers and arch.numbers["dh"] * arch.numbers["a"] != arch.numbers["h"]:
        raise InputError(
            f"--arch {shown(arch.text)}: dh{arch.numbers['dh']} times a{arch.numbers['a']} is not"
            f" h{arch.numbers['h']}; only Llama-like layers have a free head size"
        )
