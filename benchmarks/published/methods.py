"""What is trained and in which types: the cells on method, precision and quantization, in the many ways they are written."""

from __future__ import annotations

import re

from napkinmath.hardware import Hardware
from napkinmath.model_spec import ModelSpec
from napkinmath.train_config import AdapterConfig, AdapterKind, Precision, QuantizationConfig

from published.era import Era
from published.identify import Key, linears_of
from published.rows import Row, Unreadable
from published.targets import adapter_targets

# Words of the method column; the first that occurs decides.
_KINDS = (
    (r"dora", AdapterKind.DORA), (r"\(?ia\)?[ ^]?3", AdapterKind.IA3), (r"prefix", AdapterKind.PREFIX), (r"prompt[- _]?tun|p-?tuning", AdapterKind.PROMPT), (r"lora|peft|pissa|loftq|olora|\beva\b|mica\b", AdapterKind.LORA),
)  # fmt: skip
# Methods whose tensors are not LoRA's. VeRA, AdaLoRA, LoRA-FA and the like differ from LoRA by a few per cent of the peak
# (huggingface/peft method_comparison/MetaMathQA: 21.6, 22.8 and 22.2 GB where LoRA reserves 22.3) and are read as it, as assumed.
_ELSE = r"\b(longlora|fourierft|boft|oft|loha|lokr|adapters?(?! merg)|llama-?pro|lisa|randlora|freeze|bitfit|reft|dpo|ppo|grpo|kto|orpo|rlhf|reward|distillation)\b"
_NEARLY_LORA = r"adalora|\bvera\b|vblora|lora[- _]?fa\b"
_FOUR_BIT = r"nf4|fp4|int4|gptq|awq|hqq|eetq|4[- ]?bit|w4|q4|\bbnb\b"
_EIGHT_BIT = r"int8|8[- ]?bit|w8(?!a)|llm\.int8"


def adapter_of(row: Row, key: Key, spec: ModelSpec, era: Era, assumed: dict[str, str]) -> AdapterConfig | None:
    """The adapter, or None for full training; raises Unreadable for methods that are priced neither way."""
    method = row.words("method")
    if re.search(_ELSE, method):
        raise Unreadable(f"method {row['method']!r} of the table is not read")
    kind = next((kind for word, kind in _KINDS if re.search(word, method)), AdapterKind.LORA if re.search(_NEARLY_LORA, method) else None)
    if kind is None:
        if not method.strip() and row["lora_rank"].strip():
            kind = AdapterKind.LORA
        else:
            return None
    if re.search(_NEARLY_LORA, method):
        assumed["method"] = f"{row['method']} read as LoRA, whose peak is within a few per cent"
    if kind in (AdapterKind.PREFIX, AdapterKind.PROMPT):
        return AdapterConfig(kind=kind)
    linears = linears_of(key, spec)
    trained = (*linears.embeddings, *linears.heads) if "emb" in method or "lm_head" in method else ()
    if row.number("lora_rank") is None:
        assumed["rank"] = f"rank {era.default_rank}: not stated"
    if not row["lora_targets"].strip():
        assumed["targets"] = f"adapters on {era.default_targets or 'all linears'}: not stated"
    targets = adapter_targets(row["lora_targets"] or era.default_targets, linears, spec.family)
    return AdapterConfig(
        kind=kind, rank=row.whole("lora_rank", era.default_rank), targets=targets, dropout=era.adapter_dropout, dtype=era.adapter_dtype,
        rank_stabilized=bool(re.search(r"rs-?lora", method)), trained_modules=trained,
    )  # fmt: skip


def quantization_of(row: Row, adapter: AdapterConfig | None, era: Era) -> QuantizationConfig | None:
    """How the frozen base is stored, where the method or the precision says that it is."""
    method, text = row.words("method"), row.words("precision", "method")
    eight = bool(re.search(_EIGHT_BIT, text)) and "4" not in "".join(re.findall(_FOUR_BIT, text))
    if adapter is None or not (re.search(r"q-?lora|q-?dora", method) or eight or re.search(_FOUR_BIT, text)):
        return None
    double, form = era.double_quant, "nf4"
    if re.search(r"\bdq\b|-dq|double", text):
        double = not re.search(r"no[- ](dq|double)|without double", text)
    if "gptq" in text:
        form = "gptq-int8" if eight else "gptq-int4"
    elif "awq" in text:
        form = "awq-int4"
    elif "hqq" in text:
        form = "hqq-int4"
    elif "mxfp4" in text:
        form = "mxfp4"
    elif eight:
        form = "int8"
    elif "fp4" in text and "nf4" not in text:
        form = "fp4"
    return QuantizationConfig(
        format=form, double_quant=double and form in ("nf4", "fp4"), kbit_preparation=era.prepares, keep=era.unquantized
    )


def precision_of(row: Row, era: Era, adapter: AdapterConfig | None, hardware: Hardware) -> Precision:
    """Types of weights and of computation."""
    text = row.words("precision").replace("bfloat16", "bf16").replace("float16", "fp16")
    stated = re.search(r"fp16|bf16|half|16", text)
    sixteen = ("fp16" in text and "bf16" not in text.partition("/")[2]) or re.search(r"\bhalf\b|^16-mixed", text)
    if not stated and _lacks_bf16(hardware):
        sixteen = True
    if re.search(r"float8|fp8|8-?bit float|e4m3|mxfp8", text):
        return Precision.FP8
    if re.search(r"no amp|-true|pure|\bo3\b", text):
        return Precision.FP16 if sixteen else Precision.BF16
    if re.search(r"amp|mixed| mp\b|autocast|\bo[12]\b", text):
        if adapter is not None or re.search(r"16 \+|base|(bf16|fp16) weights", text):
            return Precision.FP16_AUTOCAST if sixteen else Precision.BF16_AUTOCAST
        return Precision.FP16_AMP if sixteen else Precision.BF16_AMP
    if re.search(r"tf32|fp32|float32|single|full precision|\b32-?(true|bit)?\b", text) and not re.search(r"bf16|fp16", text):
        return Precision.TF32 if "tf32" in text else Precision.FP32
    if adapter is None and era.full_weights == "fp32":
        return Precision.FP16_AMP if sixteen else Precision.BF16_AMP
    if era.autocast:
        return Precision.FP16_AUTOCAST if sixteen else Precision.BF16_AUTOCAST
    return Precision.FP16 if sixteen else Precision.BF16


def _lacks_bf16(hardware: Hardware) -> bool:
    capability = hardware.gpu.compute_capability
    return bool(capability) and int(capability.split(".")[0]) < 8 and hardware.gpu.vendor == "nvidia"
