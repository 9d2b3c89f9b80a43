"""From a row to what is priced: model, training configuration, stack, GPU, and how figures of the row are to be compared."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from napkinmath.catalog.arch_string import read_arch
from napkinmath.catalog.families import read_config
from napkinmath.catalog.gpus import find_hardware
from napkinmath.catalog.models import find_row
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.errors import InputError
from napkinmath.hardware import Hardware
from napkinmath.lowering.choices import find_stack
from napkinmath.model_spec import ModelSpec
from napkinmath.train_config import (
    AdapterConfig,
    AdapterKind,
    Attention,
    Batch,
    Loss,
    OffloadConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.units import GIB

from published.rows import Row, Unreadable
from published.sources import Era, era_of
from published.targets import Linears, adapter_targets

Key = tuple[str, str, str]
_specs: dict[Key, ModelSpec] = {}
_linears: dict[Key, Linears] = {}
# Names that tables use for models the catalogue has under another one of the same shapes.
_ALIASES = (
    (r"^phi-?3$", "phi-3-mini"), (r"qwen1half", "qwen1.5"), (r"stablelm[- ]alpha", "stablelm-base-alpha"), (r"dolly-v2-3b", "pythia-2.8b"), (r"dolly-v2-7b", "pythia-6.9b"),
    (r"dolly-v2-12b", "pythia-12b"), (r"openbuddy-(llama2|mistral|zephyr)", r"\1"), (r"^phi2-3b$", "phi-2"), (r"mistral-moe-7b", "mixtral-8x7b"),
)  # fmt: skip
_DEFAULT_GPU = ("A100", 80 * GIB)  # where the source names none; only the context (about 0.5 GiB) depends on it


@dataclass(frozen=True)
class Job:
    """A row understood: everything that `estimate` needs, and what was assumed on the way."""

    row: Row
    spec: ModelSpec
    config: TrainConfig
    hardware: Hardware
    era: Era
    assumed: tuple[str, ...] = field(default=())


def understand(row: Row) -> Job:
    """The job of a row; raises Unreadable with the reason where it cannot be expressed."""
    try:
        return _understand(row)
    except InputError as error:
        raise Unreadable(str(error)) from error


def _understand(row: Row) -> Job:
    if row.whole("n_gpus", 1) > 1:
        raise Unreadable(f"{row['n_gpus']} GPUs ({row['sharding'] or 'sharding not stated'}): a step on one GPU is priced")
    era = era_of(row)
    spec, key = _model(row, era)
    assumed: list[str] = []
    method = row.words("method")
    config = TrainConfig(
        micro_batch_size=row.whole("micro_batch", 1), sequence_length=_sequence(row, era, assumed), gradient_accumulation_steps=_accumulation(row),
        precision=_precision(row, era), adapter=_adapter(row, key, spec, method, era), quantization=_quantization(row, method, era), recompute=_recompute(row, assumed),
        offload=_offload(row, era), optimizer=_optimizer(row, era, method), optimizer_in_backward="in_bwd" in row.words("optimizer") or "in_backward" in row.words("optimizer"),
        attention=_attention(row), loss=_loss(row), compile=row.words("compile").strip() in ("yes", "true"), stack=era.stack,
        batch=_batch(row), clip_gradients=era.clips,
    )  # fmt: skip
    if config.batch.lengths:
        config = config.replace(
            batch=config.batch.replace(lengths=shorter_than(config.sequence_length, config.batch.lengths, era, assumed))
        )
    return Job(row, spec, config, _hardware(row, era, assumed), era, tuple(assumed))


# ---------------------------------------------------------------- model


def _model(row: Row, era: Era) -> tuple[ModelSpec, Key]:
    key = (row["model"].strip(), row["arch"].strip(), find_stack(era.stack).modelling)
    if key not in _specs:
        _specs[key] = _read(*key)
    return _specs[key], key


def _read(name: str, arch: str, modelling: str) -> ModelSpec:
    """By name, with notes and sizes at its end dropped; else by the architecture's numbers."""
    for candidate in _candidates(name):
        found = find_row(candidate)
        if found is not None:
            return read_config(found["config"], name=found["name"], source=found["source"], modelling=modelling)
    if arch:
        return read_config(read_arch(arch), name=name or arch, source="the table's architecture column", modelling=modelling)
    raise Unreadable(f"model {name!r} is not in the catalog and its architecture is not given")


def _candidates(name: str) -> list[str]:
    """The name as written, without brackets, with "3 B" as one word or left out, and under the catalogue's own names."""
    plain = re.sub(r"\(.*?\)", " ", name).strip()
    size = r"\s+([\d.]+)\s*([bBmM])$"
    written = [name, plain, re.sub(size, r"-\1\2", plain), re.sub(size, "", plain)]
    for text in tuple(written):
        for pattern, other in _ALIASES:
            if re.search(pattern, text.lower()):
                written.append(re.sub(pattern, other, text.lower().replace(" ", "-")))
                written.append(re.sub(pattern, other, text.lower()))
    return [text for text in dict.fromkeys(written) if text.strip()]


def linears_of(key: Key, spec: ModelSpec) -> Linears:
    """The model's linears, recorded once."""
    if key not in _linears:
        _linears[key] = Linears(spec)
    return _linears[key]


# ---------------------------------------------------------------- method


# Words of the method column beside LoRA; the first that occurs decides.
_KINDS = (
    ("dora", AdapterKind.DORA),
    ("ia3", AdapterKind.IA3),
    ("prefix", AdapterKind.PREFIX),
    ("prompt", AdapterKind.PROMPT),
    ("lora", AdapterKind.LORA),
)
_NOT_LORA = (
    "longlora",
    "adalora",
    "vera",
    "fourierft",
    "boft",
    "oft",
    "loha",
    "lokr",
    "lora fa",
    "lora-fa",
    "adapter",
    "llamapro",
    "lisa",
    "galore",
    "vblora",
    "randlora",
)


def _adapter(row: Row, key: Key, spec: ModelSpec, method: str, era: Era) -> AdapterConfig | None:
    if any(re.search(rf"\b{re.escape(word)}", method) for word in _NOT_LORA):
        raise Unreadable(f"method {row['method']!r} of the table is not read")
    kind = next((kind for word, kind in _KINDS if word in method), None)
    if kind is None:
        return None
    if kind in (AdapterKind.PREFIX, AdapterKind.PROMPT):
        return AdapterConfig(kind=kind)
    linears = linears_of(key, spec)
    trained: tuple[str, ...] = ()
    if "emb" in method or "lm_head" in method:
        trained = (*linears.embeddings, *linears.heads)
    return AdapterConfig(
        kind=kind, rank=row.whole("lora_rank", era.default_rank), targets=adapter_targets(row["lora_targets"], linears, spec.family), dropout=era.dropout(row), dtype=era.adapter_dtype,
        rank_stabilized="rslora" in method, trained_modules=trained,
    )  # fmt: skip


def _quantization(row: Row, method: str, era: Era) -> QuantizationConfig | None:
    text = row.words("precision")
    if "qlora" not in method and not any(word in text for word in ("nf4", "fp4", "int4", "int8", "gptq", "awq", "4bit", "4-bit")):
        return None
    if not any(word in method for word, _ in _KINDS):
        return None
    double = True if "dq" in text or "double" in text else era.double_quant
    bits = "int8" if "int8" in text or "8bit" in text or "8-bit" in text else "int4"
    if "gptq" in text:
        return QuantizationConfig(
            format=f"gptq-{bits}", double_quant=False, kbit_preparation=era.kbit_preparation(row), keep=era.unquantized
        )
    if "awq" in text:
        return QuantizationConfig(format="awq-int4", double_quant=False, kbit_preparation=era.kbit_preparation(row), keep=era.unquantized)
    if bits == "int8":
        return QuantizationConfig(format="int8", double_quant=False, kbit_preparation=era.kbit_preparation(row), keep=era.unquantized)
    return QuantizationConfig(
        format="fp4" if "fp4" in text and "nf4" not in text else "nf4",
        double_quant=double,
        kbit_preparation=era.kbit_preparation(row),
        keep=era.unquantized,
    )


def _precision(row: Row, era: Era) -> Precision:
    text = row.words("precision")
    half = (
        "fp16"
        if re.search(r"fp16|float16(?!.*bfloat)", text.replace("bfloat16", "bf16")) and "bf16" not in text.partition("/")[2]
        else "bf16"
    )
    if "float8" in text or "fp8" in text:
        return Precision.FP8
    if "no amp" in text or "-true" in text or "pure" in text:
        return Precision.FP16 if half == "fp16" else Precision.BF16
    if "amp" in text or "mixed" in text or " mp" in text:
        stored_half = any(word in text for word in ("float16 +", "base", "bf16 weights", "fp16 weights"))
        if half == "fp16":
            return Precision.FP16_AUTOCAST if stored_half else Precision.FP16_AMP
        return Precision.BF16_AUTOCAST if stored_half else Precision.BF16_AMP
    if "fp32" in text or "float32" in text or "tf32" in text:
        return Precision.TF32 if "tf32" in text else Precision.FP32
    if era.autocast:
        return Precision.FP16_AUTOCAST if half == "fp16" else Precision.BF16_AUTOCAST
    return Precision.FP16 if half == "fp16" else Precision.BF16


# ---------------------------------------------------------------- step

_NO = ("no", "none", "off", "false", "0", "-")


def _sequence(row: Row, era: Era, assumed: list[str]) -> int:
    if row["seq_len"].strip():
        return row.whole("seq_len")
    if era.sequence_length:
        assumed.append(f"sequence length {era.sequence_length}: {era.sequence_reason}")
        return era.sequence_length
    raise Unreadable("seq_len is not given")


def _batch(row: Row) -> Batch:
    """Packed, or padded with the lengths that "mean A +- B tokens" in the notes describes."""
    if row.words("packed").startswith("yes"):
        return Batch(packing=True)
    found = re.search(r"mean\s+([\d.]+)\s*(?:\+-|±)\s*([\d.]+)\s+tokens", row.words("notes"))
    return Batch(lengths=sample_lengths(float(found[1]), float(found[2]))) if found else Batch()


def sample_lengths(mean: float, deviation: float, count: int = 400) -> tuple[int, ...]:
    """A sample of a gamma distribution of that mean and deviation, whose shape token counts of documents roughly have."""
    from random import Random

    draw = Random(0)
    shape = (mean / deviation) ** 2
    return tuple(max(1, round(draw.gammavariate(shape, mean / shape))) for _ in range(count))


def shorter_than(limit: int, lengths: tuple[int, ...], era: Era, assumed: list[str]) -> tuple[int, ...]:
    """The lengths that a limit leaves: longer samples are left out, or cut to it."""
    if era.drops_long_samples:
        assumed.append("samples longer than the limit left out, the others padded to the batch's longest")
        return tuple(n for n in lengths if n <= limit) or (limit,)
    return tuple(min(n, limit) for n in lengths)


def _accumulation(row: Row) -> int:
    return row.whole("grad_accum", 1)


def _recompute(row: Row, assumed: list[str]) -> RecomputeConfig:
    text = row.words("checkpointing")
    if not text.strip():
        assumed.append("no checkpointing: not stated")
        return RecomputeConfig()
    if text.startswith("none") or text.strip() in _NO:
        return RecomputeConfig()
    return RecomputeConfig(kind=RecomputeKind.SELECTIVE if "selective" in text else RecomputeKind.FULL)


def _offload(row: Row, era: Era) -> OffloadConfig:
    text = row.words("offload")
    if "offload" in row.words("optimizer"):
        text = f"{text} optimizer"
    wanted = OffloadConfig(activations="activation" in text, parameters="param" in text, optimizer="optim" in text, style=era.offload_style)
    if wanted.activations or wanted.parameters or wanted.optimizer or not text.strip() or text.strip() in _NO:
        return wanted
    raise Unreadable(f"offload {row['offload']!r} is not read")


def _optimizer(row: Row, era: Era, method: str) -> str:
    text = re.sub(r"\(.*?\)|optimizer_in_bwd|optimizer_in_backward", " ", row.words("optimizer")).strip()
    words = re.sub(r"[^a-z0-9]+", " ", re.sub(r"paged", " paged ", text)).split()
    joined = "".join(words)
    if joined in ("", "adam", "adamw", "adamwtorch", "adamwhf"):
        return era.quantized_optimizer if "qlora" in method and era.quantized_optimizer and joined != "adamwtorch" else "auto"
    if "adam" in joined and "8bit" in joined:
        return (
            "paged-adamw-8bit"
            if "paged" in words
            else "adamw-8bit"
            if "bnb" in words or "bitsandbytes" in words
            else era.eight_bit_optimizer
        )
    if "paged" in words and "adam" in joined:
        return "paged-adamw"
    return find_optimizer("-".join(w for w in words if w not in ("torch", "hf", "bnb", "optimizer"))).name


def _attention(row: Row) -> Attention:
    text = row.words("attention")
    if "flash" in text:
        return Attention.FLASH2
    if "eager" in text:
        return Attention.EAGER
    if "math" in text:
        return Attention.MATH
    if "efficient" in text:
        return Attention.EFFICIENT
    return Attention.AUTO


def _loss(row: Row) -> Loss:
    notes = row.words("notes")
    if any(
        word in notes
        for word in ("liger fused linear", "foak-liger", "kernels-liger", "cut-cross-entropy", "cut cross entropy", "fused linear")
    ):
        return Loss.FUSED
    return Loss.CHUNKED if "chunked ce" in notes else Loss.HF


# ---------------------------------------------------------------- GPU


def _hardware(row: Row, era: Era, assumed: list[str]) -> Hardware:
    name = re.sub(r"\(.*?\)", " ", row["gpu"]).strip()
    memory = row.number("gpu_mem_gb")
    if not name:
        assumed.append(f"GPU {_DEFAULT_GPU[0]}: not named")
        return find_hardware(_DEFAULT_GPU[0], vram=int(memory * GIB) if memory else _DEFAULT_GPU[1])
    words = name.split()
    for end in range(len(words), 0, -1):
        candidate = " ".join(words[:end])
        for tried in ([f"{candidate}-{int(memory)}", f"{candidate}-{int(memory)}GB"] if memory else []) + [candidate]:
            try:
                return find_hardware(tried).replace(lazy_modules=era.lazy_modules)
            except InputError:
                continue
    raise Unreadable(f"GPU {row['gpu']!r} is not in the catalog")
