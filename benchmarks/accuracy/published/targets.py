"""Which linears of a model an adapter sits on, whatever the source calls them.

Every library names the same projections otherwise (q_proj, query, c_attn, W_pack, Wqkv). A name
that the model itself has is taken as it is; any other is read as the projections it stands for and
found again in the model.
"""

from __future__ import annotations

import re

from napkinmath.config.train_config import TrainConfig
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.choices import resolve
from napkinmath.lowering.record import record_runs

from published.rows import Unreadable

QKV = frozenset({"q", "k", "v"})
MLP = frozenset({"gate", "up", "down"})
_ROLES: dict[str, frozenset[str]] = {
    **{name: frozenset({"q"}) for name in ("q", "query", "q_proj", "wq", "to_q", "q_lin")},
    **{name: frozenset({"k"}) for name in ("k", "key", "k_proj", "wk", "to_k", "k_lin")},
    **{name: frozenset({"v"}) for name in ("v", "value", "v_proj", "wv", "to_v", "v_lin")},
    **{
        name: frozenset({"o"})
        for name in ("o", "output", "projection", "o_proj", "out_proj", "wo", "out_lin")
    },
    **{
        name: QKV
        for name in (
            "qkv",
            "c_attn",
            "query_key_value",
            "w_pack",
            "wqkv",
            "qkv_proj",
            "attn_qkv",
            "in_proj",
        )
    },
    **{name: frozenset({"gate"}) for name in ("gate", "gate_proj", "w2_gate")},
    **{
        name: frozenset({"up"})
        for name in ("up", "up_proj", "c_fc", "fc1", "fc_in", "lin1", "dense_h_to_4h")
    },
    **{
        name: frozenset({"down"})
        for name in ("down", "down_proj", "fc2", "fc_out", "lin2", "dense_4h_to_h")
    },
    **{name: frozenset({"gate", "up"}) for name in ("gate_up_proj", "gate_up", "w1,w2")},
    **{name: frozenset({"head"}) for name in ("head", "lm_head", "embed_out", "output_layer")},
    "w1": frozenset({"gate", "up"}),
    "w2": frozenset({"gate", "up", "down"}),
    "w3": frozenset({"up"}),
    "c_proj": frozenset({"o", "down"}),
    "dense": frozenset({"o"}),
    "qv": frozenset({"q", "v"}),
    "qk": frozenset({"q", "k"}),
    "kv": frozenset({"k", "v"}),
    "qo": frozenset({"q", "o"}),
    "qkvo": QKV | {"o"},
    "self_attn": QKV | {"o"},
    "self_attention": QKV | {"o"},
    "attn-only": QKV | {"o"},
    "attention-only": QKV | {"o"},
    "feedforward": MLP,
    "feed-forward": MLP,
    "ff": MLP,
    "mlp": MLP,
    "ffn": MLP,
    "feed_forward": MLP,
    "attn": QKV | {"o"},
    "attention": QKV | {"o"},
    "attn_proj": frozenset({"o"}),
}
# litgpt switches adapters on by projection, whatever the linears of an architecture are.
_LITGPT = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "o": ("attn.proj",),
    "gate": ("mlp.fc_1",),
    "up": ("mlp.fc_2", "mlp.fc"),
    "down": ("mlp.proj",),
    "head": ("lm_head",),
}
_WHOLE = ("all-linear", "all linear", "all_linear", "all linears", "all")


class Linears:
    """The linears of a model: leaf name -> the projections it holds, and the names of embeddings
    and head."""

    def __init__(self, spec: ModelSpec) -> None:
        self.roles: dict[str, frozenset[str]] = {}
        self.embeddings: list[str] = []
        self.heads: list[str] = []
        runs = record_runs(spec, resolve(spec, TrainConfig(), None)).runs
        for run in runs:
            for weight in run.block.weights:
                leaf = weight.path.split(".")[-2] if "." in weight.path else weight.path
                if weight.kind == "embedding" and not self.embeddings:
                    self.embeddings.append(leaf)
                elif weight.kind == "head":
                    self.heads.append(leaf)
                    self.roles[leaf] = frozenset({"head"})
                elif weight.kind in ("linear", "experts"):
                    self.roles[leaf] = self.roles.get(leaf, frozenset()) | _roles_of_leaf(
                        weight.path, leaf
                    )


def _roles_of_leaf(path: str, leaf: str) -> frozenset[str]:
    roles = _ROLES.get(leaf.lower(), frozenset())
    if leaf.lower() in ("c_proj", "dense", "w2"):
        inside_mlp = any(
            part in path.lower() for part in (".mlp.", "feed_forward", "intermediate", ".ffn.")
        )
        return frozenset({"down"}) if inside_mlp else frozenset({"o"})
    return roles


def adapter_targets(text: str, linears: Linears, family: str = "") -> tuple[str, ...]:
    """Leaf names of the linears that the cell `lora_targets` means; raises Unreadable where none is
    found."""
    asked = text.strip()
    if (
        not asked
        or asked.lower() in _WHOLE
        or re.match(
            r"(all|every)[- _]?(possible |target )?(lin|layer|module|proj|trainable)|linears?$",
            asked.lower(),
        )
    ):
        return ("all-linear",)
    if asked.lower().startswith("default"):
        asked = "qkv"
    names = [n for n in re.split(r"[,;/\s+&|]+", re.sub(r"[()\[\]{}\"']", " ", asked)) if n]
    found: dict[str, None] = {}
    if family == "litgpt":
        roles = sorted({role for name in names for role in _ROLES.get(name.lower(), frozenset())})
        found.update(dict.fromkeys(target for role in roles for target in _LITGPT[role]))
        names = []
    for name in names:
        leaves = [leaf for leaf in linears.roles if leaf.lower() == name.lower()]
        if not leaves:
            wanted = _ROLES.get(name.lower(), frozenset())
            leaves = [leaf for leaf, roles in linears.roles.items() if roles & wanted]
        found.update(dict.fromkeys(leaves))
    if not found:
        raise Unreadable(
            f"lora_targets {text!r} name no linear of the model, which has"
            f" {', '.join(sorted(linears.roles))}"
        )
    return tuple(found)
