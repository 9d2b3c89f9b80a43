"""Which model and which GPU a row means, however they are spelled."""

from __future__ import annotations

import re

from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB
from napkinmath.catalog.gpus import find_hardware, load_gpus
from napkinmath.catalog.models import find_row
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.hardware import Gpu, Hardware
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.arch_string import read_arch
from napkinmath.models.families import read_config
from napkinmath.models.tasks import SEQUENCE

from published.architecture import billions_of, completed_arch, runs_own_code, typical_arch
from published.era import Era
from published.rows import Row, Unreadable
from published.targets import Linears
from published.tokenizers import resized_vocabulary

Key = tuple[str, str, str, bool]
_specs: dict[Key, ModelSpec] = {}
_linears: dict[Key, Linears] = {}
# Names that tables use for models the catalogue has under another one of the same shapes.
_ALIASES = (
    (r"^phi-?3$", "phi-3-mini"),
    (r"qwen1half", "qwen1.5"),
    (r"stablelm[- ]alpha", "stablelm-base-alpha"),
    (r"dolly-v2-3b", "pythia-2.8b"),
    (r"dolly-v2-7b", "pythia-6.9b"),
    (r"dolly-v2-12b", "pythia-12b"),
    (r"openbuddy-(llama2|mistral|zephyr)", r"\1"),
    (r"^phi2-3b$", "phi-2"),
    (r"mistral-moe-7b", "mixtral-8x7b"),
    (r"^(alpaca|vicuna|guanaco|wizardlm)\b", "llama"),
    (r"^zephyr(-7b)?(-\w+)*$", "mistral-7b"),
    (r"^(vicuna|alpaca|guanaco)-(\d+b)(-v1\.[0-3])?$", r"llama-\2"),
    (r"^vicuna-(\d+b)-v1\.5$", r"llama-2-\1"),
)
# Endings that name a date, a training or a packing, never a shape.
_DECORATION = r"[-_ ](?:\d{4}|v\d+(?:\.\d+)*|\d+k|hf|chat|instruct|it|base|pt|sft|dpo|hq|ckpt|seq-cls|mlm|clm|bf16|fp16|fp8|nf4|[48]-?bit|gptq|awq|int[48]|bnb.*|deduped|distill.*|alpaca|gated)$"
# Names of mixtures of experts: "MoE-7B-A1B", "8x22B". A dense model of their size is another one.
_MIXTURE = r"\bmoe\b|\bmixture\b|\b\d+x\d+b\b|[-_]a\d+(?:\.\d+)?[bm]\b"
# Machines of clouds by the GPU they hold (the providers' lists of instance types).
_INSTANCES = (
    (r"\bg4dn|\bcolab\b|\bkaggle\b", "T4"),
    (r"\bg5\.|\bg5\b", "A10G"),
    (r"\bg6e", "L40S"),
    (r"\bg6\b|\bg6\.", "L4"),
    (r"\bp4de|a2-ultragpu", "A100-80GB"),
    (r"\bp4d\b|\bp4d\.|a2-highgpu", "A100-40GB"),
    (r"\bp5\b|\bp5\.|a3-highgpu", "H100"),
    (r"\bp3dn", "V100-32GB"),
    (r"\bp3\b|\bp3\.", "V100-16GB"),
    (r"\bp5en?\b", "H200"),
)
_NO_GPU = (
    r"^(-|\?|unknown|n/?a|not (stated|named|given)|(a |single |one |consumer |free )*(nvidia |cuda"
    r" )?gpu.?|cuda|nvidia)$"
)
_OTHER_MEMORY = 0.15  # a GPU of the same name and so different a memory is another variant of it
_DEFAULT_GPU = ("A100", 80 * GIB)  # where the source names none


def model_of(row: Row, era: Era, assumed: dict[str, str]) -> tuple[ModelSpec, Key]:
    """The row's model under the stack's modelling code, and the key it is kept by."""
    key = (
        row["model"].strip(),
        completed_arch(row, assumed),
        find_stack(era.stack).model.library,
        era.adds_tokens,
    )
    if key not in _specs:
        try:
            _specs[key] = _read(*key)
        except (Unreadable, InputError) as error:
            billions = billions_of(row)
            if not billions:
                raise
            if re.search(_MIXTURE, row["model"], re.IGNORECASE):
                raise Unreadable(
                    f"model {row['model']!r} is a mixture of experts whose sizes the source does not"
                    " give"
                ) from error
            assumed["model"] = (
                f"a decoder of Llama's design with {billions:g} billion parameters: {error}"
            )
            return _typical(billions, key[2], row["model"])
    return _specs[key], key


def _typical(billions: float, modelling: str, name: str) -> tuple[ModelSpec, Key]:
    key = (f"{billions:g}B", typical_arch(billions, name), modelling, False)
    if key not in _specs:
        _specs[key] = read_config(
            read_arch(key[1]),
            name=key[0],
            source="the number of parameters alone",
            modelling=modelling,
        )
    return _specs[key], key


def linears_of(key: Key, spec: ModelSpec) -> Linears:
    """The model's linears, recorded once."""
    if key not in _linears:
        _linears[key] = Linears(spec)
    return _linears[key]


def _read(name: str, arch: str, modelling: str, adds_tokens: bool) -> ModelSpec:
    """By name, with notes and sizes at its end dropped; else by the architecture's numbers; raises
    Unreadable."""
    rows = resized_vocabulary(name) if adds_tokens else None
    resized = {} if rows is None else {"vocab_size": rows}
    task = SEQUENCE if "seq-cls" in name.lower() else ""
    for candidate in () if runs_own_code(arch) else spellings(name):
        found = find_row(candidate)
        if found is not None:
            return read_config(
                {**found["config"], **resized},
                name=found["name"],
                source=found["source"],
                modelling=modelling,
                task=task,
            )
    if arch:
        return read_config(
            {**read_arch(arch), **resized},
            name=name or arch,
            source="the table's architecture column",
            modelling=modelling,
        )
    for candidate in parts_with_size(name):
        found = find_row(candidate)
        if found is not None:
            return read_config(
                found["config"], name=found["name"], source=found["source"], modelling=modelling
            )
    raise Unreadable(f"model {name!r} is not in the catalog and its architecture is not given")


def parts_with_size(name: str) -> list[str]:
    """Runs of the name's words that hold a size, longest first: a fine-tuned model's name often
    carries that of its base."""
    words = [w for w in re.split(r"[-_/\s()]+", name) if w]
    spans = [
        (start, end) for start in range(len(words)) for end in range(start + 2, len(words) + 1)
    ]
    runs = [
        "-".join(words[start:end])
        for start, end in sorted(spans, key=lambda span: span[0] - span[1])
    ]
    return [run for run in runs if re.search(r"\d[bm]\b", run.lower())]


def spellings(name: str) -> list[str]:
    """The name as written; without brackets, or with their content; "3 B" as one word or left out;
    without decoration; the catalogue's own name."""
    plain = re.sub(r"\(.*?\)", " ", name).strip()
    opened = re.sub(r"[()\[\]]", " ", name)
    joined = re.sub(
        r"\s*([\d.]+)\s*[-_]?\s*(?:([bB])(?:illion|n)?|([mM])(?:illion|n)?)\b", r"-\1\2\3", opened
    )
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
                written += [
                    re.sub(pattern, other, lowered.replace(" ", "-")),
                    re.sub(pattern, other, lowered),
                ]
    tidy = (re.sub(r"-{2,}", "-", text.strip(" -_")) for text in written)
    return [text for text in dict.fromkeys(tidy) if text]


def hardware_of(row: Row, era: Era, assumed: dict[str, str]) -> Hardware:
    """The row's GPU; where none is named an A100, whose memory the row may still say."""
    memory = gpu_memory(row)
    text = re.sub(r"^\s*\d+\s*(?:x|\*|\u00d7)\s*", "", row["gpu"].strip(), flags=re.IGNORECASE)
    if not row.states("gpu") or re.search(_NO_GPU, text.lower()):
        assumed["gpu"] = f"GPU {_DEFAULT_GPU[0]}: not named"
        found = find_hardware(
            _DEFAULT_GPU[0], vram=int(memory * GIB) if memory else _DEFAULT_GPU[1]
        )
        return found.replace(lazy_modules=era.lazy_modules)
    rented = [gpu for pattern, gpu in _INSTANCES if re.search(pattern, text.lower())]
    for candidate in (*_gpu_spellings(text, memory), *rented):
        try:
            found = find_hardware(candidate)
        except InputError:
            continue
        if memory and abs(memory * GIB / found.gpu.nominal_bytes - 1) > _OTHER_MEMORY:
            found = find_hardware(candidate, vram=int(memory * GIB))
        found = found.replace(gpu=_held_to(found.gpu, text, assumed))
        if _is_bare(text) and slower_form(found.gpu, any_memory=memory is None):
            assumed["form"] = f"{found.gpu.name}: the name is that of slower cards too"
        return found.replace(lazy_modules=era.lazy_modules)
    if memory:
        assumed["gpu"] = f"GPU {row['gpu']!r}: not in the catalog, its memory alone is used"
        return find_hardware(vram=int(memory * GIB))
    assumed["gpu"] = (
        f"GPU {row['gpu']!r}: not in the catalog, a context as on {_DEFAULT_GPU[0]}, no speed"
    )
    return find_hardware(vram=_DEFAULT_GPU[1])


def _is_bare(text: str) -> bool:
    """Whether a GPU's cell is its family's name alone, with its memory at most."""
    return bool(re.fullmatch(r"(nvidia )?[a-z]+\d+\s*-?(\(?\d+ ?gi?b?\)?)?", text.lower()))


def slower_form(gpu: Gpu, *, any_memory: bool = False) -> float:
    """How much longer the slowest card of the same family takes, as a share: clocks follow the power
    by the exponent 0.55 (napkinmath.timing.attainable), streams the memory's bandwidth. `any_memory`:
    the row names none, so that an A100 may have 40 GB."""
    family = gpu.name.split("-")[0]
    kin = [
        other
        for other in load_gpus()
        if other.name.split("-")[0] == family
        and (any_memory or abs(other.nominal_bytes / gpu.nominal_bytes - 1) <= _OTHER_MEMORY)
    ]
    if not kin:
        return 0.0
    clock = (gpu.tdp_w / min(other.tdp_w for other in kin)) ** 0.55
    stream = gpu.bandwidth_bytes_per_s / min(other.bandwidth_bytes_per_s for other in kin)
    return max(clock, stream) - 1


def _held_to(gpu: Gpu, text: str, assumed: dict[str, str]) -> Gpu:
    """The GPU with the watts that its cell names; a limit without watts is a doubt."""
    said = re.search(r"(\d{2,4}) ?w\b", text.lower())
    if said and float(said[1]) < gpu.tdp_w:
        return gpu.replace(power_limit_w=float(said[1]))
    if not said and re.search(r"power[- ](limited|capped)", text.lower()):
        assumed["power"] = f"{gpu.tdp_w:g} W: it is limited, the table does not say to how much"
    return gpu


def gpu_memory(row: Row) -> float | None:
    """GB of the GPU: of its own column, else as its name says ("A100 (40G)"); None where neither
    does."""
    try:
        stated = row.number("gpu_mem_gb")
    except Unreadable:
        stated = None
    if stated:
        return stated / 1024 if stated > 2048 else stated
    size = re.search(r"(?<![a-z\d.])(\d{1,3})\s*-?(?:gib|gb|g)\b", row["gpu"].lower())
    return float(size[1]) if size else None


def _gpu_spellings(text: str, memory: float | None) -> list[str]:
    """Prefixes of the words, each with the memory first, then any catalogued name that occurs in
    the text, longest first."""
    opened = re.sub(r"[()\[\],;/_]", " ", text)
    form = re.sub(r"\b\d{1,3}\s*-?(?:gib|gb|g)\b", " ", opened, flags=re.IGNORECASE)
    found: list[str] = []
    for words in (form.split(), re.sub(r"\(.*?\)", " ", text).split(), opened.split()):
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
