"""Rows of another recorder of whole steps, as rows of this campaign.

Its rows hold a case's fields side by side (model, layers, method, checkpointing, attention, batch,
context, optimizer, autocast, train, dropout, quant, double_quant, reentrant), the allocator's
figures `before` and `loaded`, the phases of `step0` and `step1`, and the seconds of `whole_step`.
Its adapters sit on the query and value projections, rank 16; its loop is a plain one, without
clipping, whose variable keeps the outputs through the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath_profiler.measuring.environment import spread_notes
from napkinmath_profiler.measuring.measured_loop import TimeSpread

from campaign_parts.cases import CONFIGS
from campaign_parts.ledger import Row

OPTIMIZERS = {
    "foreach": "adamw-foreach",
    "fused": "adamw-fused",
    "for-loop": "adamw",
    "none": "sgd",
}
GPT2_TARGETS, TARGETS = "c_attn,c_proj", "q_proj,v_proj"
NAMING = (
    "method",
    "checkpointing",
    "attention",
    "batch",
    "context",
    "optimizer",
    "autocast",
    "train",
    "dropout",
    "quant",
    "double_quant",
    "reentrant",
)
QUANTIZED = ("quant", "double_quant")
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
TINY_GPT2 = {"n_embd": 64, "n_head": 4, "vocab_size": 256}
TINY_LAYERS, TINY_CONTEXT = 2, 64
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
    "zero_grad": "optimizer step",
}


def is_foreign(row: Row) -> bool:
    """Whether a row is one of those."""
    return "step0" in row or ("batch" in row and "context" in row and "options" not in row)


def case_name(case: Mapping[str, Any]) -> str:
    """What a case is called in our tables: every field that distinguishes cases."""
    words = [
        f"{key}={case[key]}"
        for key in NAMING
        if key in case and (key not in QUANTIZED or str(case["method"]).startswith("qlora"))
    ]
    return f"{case['model']}/L{case['layers']}/" + ",".join(words)


def translated(row: Row, capability: Sequence[int] = (9, 0)) -> Row:
    """The row of this campaign that says the same, measured on a device of that compute
    capability."""
    layers, model = row["layers"], row["model"]
    trial = bool(row.get("small"))
    found: Row = {
        "case": case_name(row),
        "model": model,
        "layers": layers,
        "options": flags_of(row),
        "trial": trial,
        "config": config_of(model, layers, small=trial),
        "compute_capability": list(capability),
    }
    if "oom" in row:
        return found | {"status": "out of memory", "reason": row["oom"]}
    if "error" in row or "step1" not in row:
        return found | {"status": "failed", "reason": row.get("error", "no second step")}
    phases = [phase for step in (row["step0"], row["step1"]) for phase in step]
    if not all("peak_allocated" in phase for phase in phases):
        return found | {"status": "failed", "reason": "a CPU keeps no figures of an allocator"}
    before = row.get("before", {})
    whole = row.get("whole_step", {})
    return found | {
        "status": "measured",
        "tokens": row["batch"] * found["options"]["ctx"],
        "tokens_per_s": row.get("tokens_per_s"),
        "memory": {
            "allocated": (
                max(phase["peak_allocated"] for phase in phases) - before.get("allocated", 0)
            ),
            "reserved": (
                max(phase["peak_reserved"] for phase in phases) - before.get("allocated", 0)
            ),  # what was cached before is taken first
            "device_used": max(phase["device_used"] for phase in phases),
        },
        "phases": {
            PHASES[p["phase"]]: {
                "median_s": p["seconds"],
                "peak_allocated": p["peak_allocated"],
                "peak_reserved": p["peak_reserved"],
            }
            for p in row["step1"]
            if p["phase"] in PHASES
        },
        "notes": spread_notes(
            TimeSpread(whole["median_s"], whole["p10_s"], whole["p90_s"], whole["runs"])
            if whole
            else None
        ),
        "step": (
            {
                "median_s": whole["median_s"],
                "low_s": whole["p10_s"],
                "high_s": whole["p90_s"],
                "samples": whole["runs"],
            }
            if whole
            else {}
        ),
    }


def flags_of(row: Row) -> dict[str, Any]:
    """The options of `estimate` that price the row's step."""
    method = str(row["method"])
    quantized = method.startswith("qlora")
    amp = bool(row["autocast"])
    flags: dict[str, Any] = {
        "stack": "hf-loop",
        "clip": False,
        "bs": row["batch"],
        "ctx": min(row["context"], TINY_CONTEXT) if row.get("small") else row["context"],
        "method": "qlora" if quantized else method,
        "precision": ("bf16-amp" if method == "full" else "bf16-autocast") if amp else "bf16",
        "checkpointing": "full" if row["checkpointing"] else "none",
        "attention": row["attention"],
        "optimizer": OPTIMIZERS[row["optimizer"]],
    }
    if row.get("reentrant"):
        flags["reentrant"] = True
    if not row.get("train", True):
        flags["eval"] = True
    if method != "full":
        flags |= {
            "rank": 16,
            "dropout": row.get("dropout", 0.0),
            "targets": GPT2_TARGETS if row["model"] == "gpt2-xl" else TARGETS,
        }
    if quantized:
        flags |= {
            "quant": row.get("quant", "nf4"),
            "double_quant": row.get("double_quant", True),
            "kbit": method == "qlora-kbit",
        }
    return flags


def config_of(model: str, layers: int, *, small: bool) -> dict[str, Any]:
    """The config that the recorder built."""
    key = "n_layer" if model == "gpt2-xl" else "num_hidden_layers"
    config = {**CONFIGS[model], key: layers}
    if small:  # that recorder's own tiny shapes
        config |= {**(TINY_GPT2 if model == "gpt2-xl" else TINY), key: min(layers, TINY_LAYERS)}
    if model == "gpt2-xl":
        config |= {
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
        }  # transformers' own defaults
    return config
