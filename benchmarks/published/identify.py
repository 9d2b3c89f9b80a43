"""Which model and which GPU a row means, however they are spelled."""

from __future__ import annotations

import re

from napkinmath.catalog.arch_string import read_arch
from napkinmath.catalog.families import read_config
from napkinmath.catalog.gpus import find_hardware, load_gpus
from napkinmath.catalog.models import find_row
from napkinmath.errors import InputError
from napkinmath.hardware import Hardware
from napkinmath.lowering.choices import find_stack
from napkinmath.model_spec import ModelSpec
from napkinmath.units import GIB

from published.architecture import completed_arch, runs_own_code
from published.era import Era
from published.rows import Row, Unreadable
from published.targets import Linears

Key = tuple[str, str, str]
_specs: dict[Key, ModelSpec] = {}
_linears: dict[Key, Linears] = {}
# Names that tables use for models the catalogue has under another one of the same shapes.
_ALIASES = (
    (r"^phi-?3$", "phi-3-mini"), (r"qwen1half", "qwen1.5"), (r"stablelm[- ]alpha", "stablelm-base-alpha"), (r"dolly-v2-3b", "pythia-2.8b"), (r"dolly-v2-7b", "pythia-6.9b"),
    (r"dolly-v2-12b", "pythia-12b"), (r"openbuddy-(llama2|mistral|zephyr)", r"\1"), (r"^phi2-3b$", "phi-2"), (r"mistral-moe-7b", "mixtral-8x7b"), (r"^(alpaca|vicuna|guanaco|wizardlm)\b", "llama"),
    (r"^zephyr(-7b)?(-\w+)*$", "mistral-7b"), (r"^(vicuna|alpaca|guanaco)-(\d+b)(-v1\.[0-3])?$", r"llama-\2"), (r"^vicuna-(\d+b)-v1\.5$", r"llama-2-\1"),
)  # fmt: skip
# Endings that name a date, a training or a packing, never a shape.
_DECORATION = r"[-_ ](?:\d{4}|v\d+(?:\.\d+)*|\d+k|hf|chat|instruct|it|base|pt|sft|dpo|hq|ckpt|seq-cls|mlm|clm|bf16|fp16|fp8|nf4|[48]-?bit|gptq|awq|int[48]|bnb.*|deduped|distill.*|alpaca|gated)$"
_DEFAULT_GPU = ("A100", 80 * GIB)  # where the source names none


def model_of(row: Row, era: Era, assumed: dict[str, str]) -> tuple[ModelSpec, Key]:
    """The row's model under the stack's modelling code, and the key it is kept by."""
    key = (row["model"].strip(), completed_arch(row, assumed), find_stack(era.stack).modelling)
    if key not in _specs:
        _specs[key] = _read(*key)
    return _specs[key], key


def linears_of(key: Key, spec: ModelSpec) -> Linears:
    """The model's linears, recorded once."""
    if key not in _linears:
        _linears[key] = Linears(spec)
    return _linears[key]


def _read(name: str, arch: str, modelling: str) -> ModelSpec:
    """By name, with notes and sizes at its end dropped; else by the architecture's numbers."""
    for candidate in () if runs_own_code(arch) else spellings(name):
        found = find_row(candidate)
        if found is not None:
            return read_config(found["config"], name=found["name"], source=found["source"], modelling=modelling)
    if arch:
        return read_config(read_arch(arch), name=name or arch, source="the table's architecture column", modelling=modelling)
    raise Unreadable(f"model {name!r} is not in the catalog and its architecture is not given")


def spellings(name: str) -> list[str]:
    """The name as written; without brackets, or with their content; "3 B" as one word or left out; without decoration; the catalogue's own name."""
    plain = re.sub(r"\(.*?\)", " ", name).strip()
    opened = re.sub(r"[()\[\]]", " ", name)
    joined = re.sub(r"\s*([\d.]+)\s*[-_]?\s*(?:([bB])(?:illion|n)?|([mM])(?:illion|n)?)\b", r"-\1\2\3", opened)
    size = r"\s+([\d.]+)\s*([bBmM])$"
    written = [name, plain, re.sub(size, r"-\1\2", plain), joined, opened]
    written += [re.sub(r"[\s_]+", "-", text.strip()) for text in tuple(written)]
    for text in tuple(written):
        shorter = text.strip()
        while (cut := re.sub(_DECORATION, "", shorter, flags=re.IGNORECASE)) != shorter and cut:
            shorter = cut
            written.append(cut)
    written.append(re.sub(size, "", plain))
    for text in tuple(written):
        for pattern, other in _ALIASES:
            lowered = text.strip().lower()
            if re.search(pattern, lowered):
                written += [re.sub(pattern, other, lowered.replace(" ", "-")), re.sub(pattern, other, lowered)]
    tidy = (re.sub(r"-{2,}", "-", text.strip(" -_")) for text in written)
    return [text for text in dict.fromkeys(tidy) if text]


def hardware_of(row: Row, era: Era, assumed: dict[str, str]) -> Hardware:
    """The row's GPU; where none is named an A100, whose memory the row may still say."""
    memory = row.number("gpu_mem_gb")
    text = re.sub(r"^\s*\d+\s*(?:x|\*|\u00d7)\s*", "", row["gpu"].strip(), flags=re.IGNORECASE)
    if not text or text.lower() in ("-", "?", "unknown", "n/a", "not stated", "gpu"):
        assumed["gpu"] = f"GPU {_DEFAULT_GPU[0]}: not named"
        found = find_hardware(_DEFAULT_GPU[0], vram=int(memory * GIB) if memory else _DEFAULT_GPU[1])
        return found.replace(lazy_modules=era.lazy_modules)
    for candidate in _gpu_spellings(text, memory):
        try:
            return find_hardware(candidate).replace(lazy_modules=era.lazy_modules)
        except InputError:
            continue
    if memory:
        assumed["gpu"] = f"GPU {row['gpu']!r}: not in the catalog, its memory alone is used"
        return find_hardware(vram=int(memory * GIB))
    raise Unreadable(f"GPU {row['gpu']!r} is not in the catalog")


def _gpu_spellings(text: str, memory: float | None) -> list[str]:
    """Prefixes of the words, each with the memory first, then any catalogued name that occurs in the text, longest first."""
    opened = re.sub(r"[()\[\],;/_]", " ", text)
    found: list[str] = []
    for words in (re.sub(r"\(.*?\)", " ", text).split(), opened.split()):
        for end in range(len(words), 0, -1):
            for start in range(end):
                candidate = " ".join(words[start:end])
                if memory:
                    found += [f"{candidate}-{int(memory)}", f"{candidate}-{int(memory)}GB"]
                found.append(candidate)
    size = re.search(r"(\d+)\s*(?:gib|gb|g)\b", text.lower())
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    for gpu in sorted(load_gpus(), key=lambda g: -len(g.name)):
        for name in (gpu.name, *gpu.aliases):
            short = re.sub(r"[^a-z0-9]", "", name.lower())
            if len(short) >= 3 and short in plain:
                found += [f"{name}-{size[1]}"] if size else []
                found.append(name)
    return list(dict.fromkeys(found))
