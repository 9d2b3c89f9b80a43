"""Whether the fields of public training files are read right: the raw keys, walked without any of
the estimator's readers, next to what the readers make of them.

    python benchmarks/accuracy/trainer_fields.py FOLDER [--files 400] [--json OUT] [--why]

FOLDER holds the checkouts of trainer_files.py. The table below has, for each tool, where its own
documentation puts a field. A field is compared where the file gives it as plain text; files that
are refused are left out. `--why` prints every field that differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "estimator"), str(Path(__file__).resolve().parent)]
SEED = 15
# tool -> field -> dotted keys, the first that is there counts
FIELDS: dict[str, dict[str, str]] = {
    "axolotl": {
        "model": "base_model",
        "micro-batch": "micro_batch_size",
        "length": "sequence_len",
        "accumulation": "gradient_accumulation_steps",
        "rank": "lora_r",
        "4 bits": "load_in_4bit",
        "8 bits": "load_in_8bit",
        "optimizer": "optimizer",
        "checkpointing": "gradient_checkpointing",
    },
    "LLaMA-Factory": {
        "model": "model_name_or_path model",
        "micro-batch": "per_device_train_batch_size micro_batch_size",
        "length": "cutoff_len",
        "accumulation": "gradient_accumulation_steps",
        "rank": "lora_rank peft_config.r",
        "optimizer": "optim",
    },
    "torchtune": {
        "micro-batch": "batch_size",
        "length": "tokenizer.max_seq_len",
        "accumulation": "gradient_accumulation_steps",
        "rank": "model.lora_rank",
        "precision": "dtype",
        "checkpointing": "enable_activation_checkpointing",
    },
    "alignment-handbook": {
        "model": "model_name_or_path",
        "micro-batch": "per_device_train_batch_size",
        "length": "max_length max_seq_length",
        "accumulation": "gradient_accumulation_steps",
        "rank": "lora_r",
        "4 bits": "load_in_4bit",
        "precision": "torch_dtype dtype",
        "optimizer": "optim",
        "checkpointing": "gradient_checkpointing",
    },
    "litgpt": {
        "micro-batch": "train.micro_batch_size",
        "length": "train.max_seq_length",
        "rank": "lora_r",
        "precision": "precision",
        "GPUs": "devices",
    },
    "oumi": {
        "model": "model.model_name",
        "micro-batch": "training.per_device_train_batch_size",
        "length": "model.model_max_length",
        "accumulation": "training.gradient_accumulation_steps",
        "rank": "peft.lora_r",
        "4 bits": "peft.q_lora",
        "precision": "model.torch_dtype_str",
        "optimizer": "training.optimizer",
        "checkpointing": "training.enable_gradient_checkpointing",
    },
    "NeMo Automodel": {
        "model": "model.pretrained_model_name_or_path",
        "rank": "peft.dim",
        "checkpointing": "distributed.activation_checkpointing",
    },
    "open-instruct": {
        "model": "model_name_or_path",
        "micro-batch": "per_device_train_batch_size",
        "length": "max_seq_length",
        "accumulation": "gradient_accumulation_steps",
        "rank": "lora_rank",
        "4 bits": "use_qlora",
        "checkpointing": "gradient_checkpointing",
    },
    "OLMo": {
        "micro-batch": "device_train_microbatch_size",
        "length": "model.max_sequence_length",
        "precision": "precision",
        "optimizer": "optimizer.name",
        "checkpointing": "activation_checkpointing",
    },
    "llm-foundry": {
        "model": "model.pretrained_model_name_or_path",
        "micro-batch": "device_train_microbatch_size",
        "rank": "model.peft_config.r",
        "precision": "precision",
        "checkpointing": "fsdp_config.activation_checkpointing",
    },
    "nanotron": {
        "micro-batch": "tokens.micro_batch_size",
        "length": "tokens.sequence_length",
        "accumulation": "tokens.batch_accumulation_per_replica",
        "precision": "model.dtype",
    },
    "Megatron-LM": {
        "micro-batch": "MODEL_ARGS.--micro-batch-size",
        "length": "MODEL_ARGS.--seq-length",
        "checkpointing": "MODEL_ARGS.--recompute-granularity",
        "precision": "MODEL_ARGS.--bf16",
    },
}
_OURS = {
    "model": "model",
    "micro-batch": "bs",
    "length": "ctx",
    "accumulation": "grad_accum",
    "rank": "rank",
    "GPUs": "gpus",
}
_ADAPTED = ("rank", "4 bits", "8 bits")


def at(content: Any, key: str) -> Any:
    """The value of a dotted key; None where a part of it is absent."""
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def raw_fields(tool: str, path: Path) -> dict[str, Any]:
    """Fields as the file's own keys give them; what is computed or absent is left out."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for field, keys in FIELDS[tool].items():
        value = next((v for key in keys.split() if (v := at(loaded, key)) is not None), None)
        if value is not None and not (isinstance(value, str) and ("$" in value or value == "auto")):
            found[field] = value
    return found


def agrees(field: str, raw: Any, options: dict[str, object]) -> bool:
    """Whether what a reader made of a file says the same as its key."""
    ours = options.get(_OURS.get(field, field))
    if field == "model":
        last = str(raw).rstrip("/").rpartition("/")[2].lower()
        return str(ours).rstrip("/").rpartition("/")[2].lower() == last
    if field in ("4 bits", "8 bits"):
        quant = str(options.get("quant", ""))
        is_four = bool(quant) and quant != "int8"
        return bool(raw) == (is_four if field == "4 bits" else quant == "int8")
    if field == "precision":
        return _precision(raw, str(options.get("precision")))
    if field == "optimizer":
        return _optimizer(str(raw).lower(), str(options.get("optimizer", "adamw")).lower())
    if field == "checkpointing":
        off = options.get("checkpointing") in (None, "none", False)
        if str(raw) == "selective":  # Megatron's is what a fused attention kernel does by itself
            return off or options["checkpointing"] == "selective"
        return off == (str(raw).lower() in ("false", "none"))
    if field == "GPUs":
        return str(ours or 1) == str(raw)
    return str(ours) == str(raw)


def _precision(raw: Any, ours: str) -> bool:
    word = "bf16" if raw is True else str(raw).lower()
    for kind, names in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16", "float16", "16-"))):
        if any(name in word for name in names) and not (kind == "fp16" and "bfloat16" in word):
            return kind in ours
    return "fp32" in ours or "tf32" in ours or "amp" in ours or "autocast" in ours


def _optimizer(raw: str, ours: str) -> bool:
    """The algorithm, the width of its states and paging; the library's spelling aside."""
    kinds = ("adamw", "lion", "muon", "adafactor", "sgd", "galore", "apollo", "adam", "soap")
    algorithm = next((kind for kind in kinds if kind in raw), raw)
    marks = (algorithm, "8bit" if "8bit" in raw else "", "paged" if "paged" in raw else "")
    plain = ours.replace("_", "").replace("-", "")
    return all(mark in plain for mark in marks)


def compared(tool: str, path: Path, flags: dict[str, object]) -> dict[str, tuple[Any, Any, bool]]:
    """Field -> (raw, ours, whether they agree); empty for a file that is refused."""
    from napkinmath.base.errors import InputError
    from napkinmath.inputs.job_file import with_job_file

    try:
        options = with_job_file({**flags, "job": str(path)}, [])
    except InputError:
        return {}
    raw = raw_fields(tool, path)
    if "completion" in options:  # prompts and answers of rollouts have lengths of their own
        raw.pop("length", None)
    if options.get("method", "full") == "full":
        raw = {field: value for field, value in raw.items() if field not in _ADAPTED}
    given = {field for field in raw if _OURS.get(field, field) in flags}
    return {
        field: (value, options.get(_OURS.get(field, field)), agrees(field, value, options))
        for field, value in raw.items()
        if field not in given
    }


def main() -> int:
    from trainer_files import REPOSITORIES, files_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--why", action="store_true")
    given = parser.parse_args()
    rows = json.loads(REPOSITORIES.read_text())["repositories"]
    files = [
        (row, path)
        for row in rows
        if row["tool"] in FIELDS
        for path in files_of(row, given.folder)
        if path.suffix in (".yaml", ".yml")
    ]
    random.Random(SEED).shuffle(files)
    tools: dict[str, Counter[str]] = {}
    for row, path in files:
        if sum(counts["files"] for counts in tools.values()) >= given.files:
            break
        found = compared(row["tool"], path, row.get("flags", {}))
        if not found:
            continue
        counts = tools.setdefault(row["tool"], Counter())
        counts.update(files=1, fields=len(found))
        for field, (raw, ours, same) in found.items():
            counts["differ"] += not same
            if not same and given.why:
                place = path.relative_to(given.folder)
                print(f"{place}\n    {field}: the file says {raw!r}, read as {ours!r}")
    print("| tool | files | fields | differ |\n|---|---|---|---|")
    for tool, counts in sorted(tools.items()):
        print(f"| {tool} | {counts['files']} | {counts['fields']} | {counts['differ']} |")
    whole = sum(tools.values(), Counter[str]())
    share = whole["differ"] / max(1, whole["fields"])
    print(f"| all | {whole['files']} | {whole['fields']} | {whole['differ']} ({share:.2%}) |")
    if given.json is not None:
        table = {tool: dict(counts) for tool, counts in sorted(tools.items())}
        text = json.dumps({"seed": SEED, "share": share, "tools": table}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
