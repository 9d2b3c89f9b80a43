"""What is trained and in which types: the cells on method, precision and quantization, in the many
ways they are written."""

from __future__ import annotations

import re

from napkinmath.catalog.stacks import find_stack
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    AdapterConfig,
    AdapterKind,
    Precision,
    QuantizationConfig,
)
from napkinmath.config.workload_config import Workload, WorkloadKind
from napkinmath.ir.model_spec import ModelSpec

from published.era import Era
from published.identify import Key, linears_of
from published.rows import Row, Unreadable
from published.targets import Linears, adapter_targets

# Words of the method column; the first that occurs decides.
_KINDS = (
    (r"dora", AdapterKind.DORA),
    (r"\(?ia\)?[ ^]?3", AdapterKind.IA3),
    (r"prefix", AdapterKind.PREFIX),
    (r"prompt[- _]?tun|p-?tuning", AdapterKind.PROMPT),
    (r"lora|peft|pissa|loftq|olora|\beva\b|mica\b", AdapterKind.LORA),
)
# Training that is no one model's step on one loss, or trains other parts of the model than
# adapters.
_ELSE = r"\b(longlora|lisa|freeze|llama-?pro|ppo|grpo|kto|orpo|rlhf|distillation)\b"
# Adapters whose own tensors are not LoRA's and as small: read as LoRA on the same linears. On one
# model, batch and length PEFT's own comparison reserves 20.1 to 25.2 GB for 40 of them where LoRA
# reserves 22.3 (huggingface/peft method_comparison/MetaMathQA/results).
_NEARLY_LORA = (
    r"ada-?lora|vera\b|vb-?lora|lora[-"
    r" _]?fa\b|fourier-?ft|\bd?oft\b|\bboft\b|\bloha\b|\blokr\b|lycoris|rand-?lora|\bhra\b|\bc3a\b|shira|\bhira\b|de-?lora|gralora|\bbone\b|\bmiss\b|\broad\b|"
    r"wave-?ft|tiny-?lora|uni-?lora|psoft|adamss|peanut|\blily\b|\bfrod\b|\bglora\b|\bdeft\b|(llama|houlsby|pfeiffer|bottleneck|parallel)[-"
    r" _]?adapters?|adapters?[- _]?v?2?\b(?! merg)|adaption[- _]?prompt|b[ei]t?ft|bitfit|"
    r"ln[- _]?tuning|layer-?norm tuning|trainable[- _]tokens|\b(lo)?reft\b"
)
# Of those, adapters with a vector or a shared matrix a linear in place of a pair of factors: rank
# 1.
_LIGHT = (
    r"vera\b|vb-?lora|fourier|wave-?ft|tiny-?lora|uni-?lora|b[ei]t?ft|bitfit|ln[-"
    r" _]?tuning|layer-?norm tuning|trainable[- _]tokens|reft\b"
)
# LLaMA-Adapter and its kin: gated prompts beside attention, so that gradients pass its output
# projection and nothing else is kept.
_BESIDE_ATTENTION = r"adaption[- _]?prompt|(llama[- _]?)?adapters?\b(?![- _]?v?2)"
_FULL = (
    r"full|\bfft\b|pre-?train|\bsft\b|\bcpt\b|fine-?tun|^ft$|train|dense|\bgalore|\bapollo|\blomo|badam|from"
    r" scratch|instruct|all param"
)
# Linears named in the method itself: "LoRA r=8 on q_proj, v_proj".
_TARGETS = r"\b(?:[qkvo]_proj|gate_proj|up_proj|down_proj|query_key_value|c_attn|W_pack)\b"
_FOUR_BIT = r"nf4|fp4|int4|gptq|awq|hqq|eetq|4[- ]?bit|w4|q4|\bbnb\b"
_EIGHT_BIT = r"int8|8[- ]?bit|w8(?!a)|llm\.int8"


def adapter_of(
    row: Row, key: Key, spec: ModelSpec, era: Era, assumed: dict[str, str]
) -> AdapterConfig | None:
    """The adapter, or None for full training; raises Unreadable for methods that are priced neither
    way."""
    method = row.words("method")
    if re.search(_ELSE, method):
        raise Unreadable(f"method {row['method']!r} of the table is not read")
    nearly = bool(
        re.search(_NEARLY_LORA, re.sub(r"adapters?", " ", method) if "lora" in method else method)
    )
    kind = (
        AdapterKind.LORA
        if nearly
        else next((kind for word, kind in _KINDS if re.search(word, method)), None)
    )
    if kind is AdapterKind.LORA and not nearly and re.search(r"\buse_dora\b", row.words("notes")):
        kind = AdapterKind.DORA
    if kind is None:
        full = re.search(_FULL, method) or not (
            row.states("lora_rank") or row.states("lora_targets")
        )
        if full:
            if method.strip() and not re.search(_FULL, method):
                assumed["method"] = f"{row['method']} read as full training"
            return None
        kind = AdapterKind.LORA
        nearly = bool(method.strip())
    if nearly:
        assumed["method"] = f"{row['method']} read as LoRA, whose peak is close"
    if kind in (AdapterKind.PREFIX, AdapterKind.PROMPT):
        return _virtual(row, kind, spec)
    linears = linears_of(key, spec)
    if nearly and re.search(_BESIDE_ATTENTION, method):
        return AdapterConfig(
            kind=kind,
            rank=1,
            targets=adapter_targets("o_proj", linears, spec.family),
            dtype=era.adapter_dtype,
        )
    trained = (*linears.embeddings, *linears.heads) if re.search(r"emb|lm_head", method) else ()
    rank = _rank(row, method, era, assumed)
    return AdapterConfig(
        kind=kind,
        rank=rank,
        targets=_targets(row, linears, spec, era, assumed),
        dropout=_dropout(row, era),
        dtype=era.adapter_dtype,
        rank_stabilized=bool(re.search(r"rs-?lora", method)),
        trained_modules=trained,
    )


def _dropout(row: Row, era: Era) -> float:
    """Of the adapters, as a cell says it, else the tool's."""
    found = re.search(
        r"lora[_ ]?dropout\s*[=:]?\s*(0?\.\d+|0(?![.\d]))",
        row.words("method", "lora_rank", "notes"),
    )
    return float(found[1]) if found else era.adapter_dropout


def _virtual(row: Row, kind: AdapterKind, spec: ModelSpec) -> AdapterConfig:
    """Prompt or prefix tuning, with the virtual tokens that the notes count, or that the parameters
    trained make: a row of the embedding each, or a key and a value a layer."""
    found = re.search(
        r"(\d+)\s*(?:virtual|soft|prompt|prefix)[ _-]*tokens|virtual_tokens\D{0,4}(\d+)",
        row.words("method", "notes"),
    )
    if found:
        return AdapterConfig(kind=kind, num_virtual_tokens=int(found[1] or found[2]))
    encodes = re.search(r"\bp-?tuning", row.words("method"))  # trains a network beside them
    trained = None if encodes else re.search(r"\btrainable (\d+)\b", row.words("notes"))
    sizes = dict(spec.symbols)
    each = (
        2 * spec.num_layers * sizes.get("k", 0) * sizes.get("dh", 0)
        if kind is AdapterKind.PREFIX
        else sizes.get("h", 0)
    )
    if trained and each and int(trained[1]) % each == 0:
        return AdapterConfig(kind=kind, num_virtual_tokens=int(trained[1]) // each)
    return AdapterConfig(kind=kind)


def _rank(row: Row, method: str, era: Era, assumed: dict[str, str]) -> int:
    if re.search(_LIGHT, method):
        return 1
    if not row.states("lora_rank"):
        found = re.search(r"\b(?:lora_)?(?:r|rank) ?[ =:_-]? ?(\d+)\b", method)
        if found and int(found[1]):
            return int(found[1])
        assumed["rank"] = f"rank {era.default_rank}: not stated"
    return row.whole_or("lora_rank", era.default_rank, assumed)


def _targets(
    row: Row, linears: Linears, spec: ModelSpec, era: Era, assumed: dict[str, str]
) -> tuple[str, ...]:
    """The adapted linears; all of them, as assumed, where the cell is empty or names none of the
    model's."""
    named = re.findall(_TARGETS, row["method"])
    if not row.states("lora_targets") and named:
        return adapter_targets(",".join(named), linears, spec.family)
    if not row.states("lora_targets"):
        assumed["targets"] = f"adapters on {era.default_targets or 'all linears'}: not stated"
        return adapter_targets(era.default_targets, linears, spec.family)
    try:
        return adapter_targets(row["lora_targets"], linears, spec.family)
    except Unreadable as error:
        assumed["targets"] = f"adapters on {era.default_targets or 'all linears'}: {error}"
        return adapter_targets(era.default_targets, linears, spec.family)


def workload_of(row: Row) -> Workload:
    """What is trained besides next-token prediction: preferences by pairs, or a reward model."""
    method = row.words("method")
    kind = (
        WorkloadKind.DPO
        if re.search(r"\bdpo\b", method)
        else WorkloadKind.REWARD
        if "reward" in method
        else WorkloadKind.SFT
    )
    return Workload(kind=kind)


def quantization_of(row: Row, adapter: AdapterConfig | None, era: Era) -> QuantizationConfig | None:
    """How the frozen base is stored, where the method or the precision says that it is."""
    method, text = row.words("method"), row.words("precision", "method")
    eight = bool(re.search(_EIGHT_BIT, text)) and "4" not in "".join(re.findall(_FOUR_BIT, text))
    if re.search(r"dequanti[sz]ed", text):
        return None
    if adapter is None or not (
        re.search(r"q-?lora|q-?dora", method) or eight or re.search(_FOUR_BIT, text)
    ):
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
        format=form,
        double_quant=double and form in BITSANDBYTES_4BIT,
        kbit_preparation=era.prepares,
        keep=era.unquantized,
    )


def precision_of(
    row: Row, era: Era, adapter: AdapterConfig | None, hardware: Hardware
) -> Precision:
    """Types of weights and of computation."""
    if adapter is None and "fp4" in row.words("precision"):
        raise Unreadable("products in FP4 are not priced")
    text = row.words("precision").replace("bfloat16", "bf16").replace("float16", "fp16")
    stated = re.search(r"fp16|bf16|half|16", text)
    sixteen = ("fp16" in text and "bf16" not in text.partition("/")[2]) or re.search(
        r"\bhalf\b|^16-(mixed|true)", text
    )
    if not stated and _lacks_bf16(hardware):
        sixteen = True
    if re.search(r"float8|fp8|8-?bit float|e4m3|mxfp8", text):
        return Precision.FP8_ROW if "rowwise" in text else Precision.FP8
    if re.search(r"no amp|-true|pure|\bo3\b", text):
        return Precision.FP16 if sixteen else Precision.BF16
    if (
        re.search(r"\bo2\b.*apex|apex.*\bo2\b|fp16.*\bo2\b", text)
        and find_stack(era.stack).optimizer.master_weights
    ):
        return Precision.FP16 if sixteen else Precision.BF16
    if "master" in text and find_stack(era.stack).optimizer.master_weights:
        return Precision.FP16 if sixteen else Precision.BF16
    if "tf32" in text and not stated:
        return Precision.TF32
    wide = re.search(r"(fp32|float32) (weights|param)|^(bf16|fp16|16)-mixed", text)
    if wide or re.search(r"amp|mixed| mp\b|autocast|\bo[12]\b|master", text):
        narrow = re.search(r"16 \+|base|(bf16|fp16) weights", text)
        if (adapter is not None or narrow) and not wide:
            return Precision.FP16_AUTOCAST if sixteen else Precision.BF16_AUTOCAST
        return Precision.FP16_AMP if sixteen else Precision.BF16_AMP
    if re.search(
        r"tf32|fp32|float32|single|full precision|\b32-?(true|bit)?\b", text
    ) and not re.search(r"bf16|fp16", text):
        return Precision.TF32 if "tf32" in text else Precision.FP32
    if adapter is None and era.full_weights == "fp32":
        return Precision.FP16_AMP if sixteen else Precision.BF16_AMP
    if era.autocast:
        return Precision.FP16_AUTOCAST if sixteen else Precision.BF16_AUTOCAST
    return Precision.FP16 if sixteen else Precision.BF16


def _lacks_bf16(hardware: Hardware) -> bool:
    capability = hardware.gpu.compute_capability
    return (
        hardware.gpu.vendor == "nvidia" and bool(capability) and int(capability.split(".")[0]) < 8
    )
