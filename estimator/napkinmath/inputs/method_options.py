"""What is trained and how its base is stored: method, adapter and quantization out of options."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import dtype_name
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.quantization import find_format
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    AdapterConfig,
    AdapterKind,
    QuantizationConfig,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Options = Mapping[str, object]


# name -> (adapter, default quantization format)
METHODS: dict[str, tuple[AdapterKind | None, str]] = {
    "full": (None, ""),
    "lora": (AdapterKind.LORA, ""),
    "qlora": (AdapterKind.LORA, "nf4"),
    "dora": (AdapterKind.DORA, ""),
    "qdora": (AdapterKind.DORA, "nf4"),
    "qalora": (AdapterKind.QALORA, "gptq-int4"),
    "ia3": (AdapterKind.IA3, ""),
    "prompt": (AdapterKind.PROMPT, ""),
    "prefix": (AdapterKind.PREFIX, ""),
}


_METHOD_ALIASES = {
    "pretrain": "full",
    "full-finetune": "full",
    "fft": "full",
    "qa-lora": "qalora",
    "(ia)3": "ia3",
    "prompt-tuning": "prompt",
    "prefix-tuning": "prefix",
}


_LOW_RANK = (AdapterKind.LORA, AdapterKind.DORA, AdapterKind.QALORA)


ADAPTER_OPTIONS = (
    "rank",
    "alpha",
    "targets",
    "dropout",
    "adapter_dtype",
    "rslora",
    "train_modules",
    "adapters",
    "virtual_tokens",
)


_LOW_RANK_OPTIONS = ("rank", "alpha", "dropout", "rslora")


QUANT_OPTIONS = (
    "double_quant",
    "group_size",
    "quant_compute_dtype",
    "quant_storage",
    "kbit",
    "keep_modules",
)


_FORMAT_WORDS = ("bit", "awq", "gptq", "fp4", "nf4", "bnb", "int")  # parts of names, to ask further


def flag(key: str) -> str:
    """'grad_accum' -> '--grad-accum', as messages name an option."""
    return "--" + key.replace("_", "-")


def read_method(options: Options) -> tuple[str, AdapterKind | None, str]:
    """(name, adapter kind, quantization it implies); several methods at once are refused."""
    given = values.listed(options.get("method", "full"))
    chosen = list(dict.fromkeys(values.text(name, "--method") for name in given)) or [
        values.text("", "--method")
    ]
    if len(chosen) > 1:
        raise InputError(
            f"{' '.join('--' + name for name in chosen)} exclude each other; give one of them"
        )
    name = chosen[0].strip().lower().replace("_", "-")
    name = _METHOD_ALIASES.get(name, name)
    if name not in METHODS:
        raise InputError(
            f"--method {shown(chosen[0])} is unknown; use one of"
            f" {', '.join(METHODS)}{suggest(name, [*METHODS, *_METHOD_ALIASES])}"
        )
    return name, *METHODS[name]


def adapter_of(options: Options, method: str, kind: AdapterKind | None) -> AdapterConfig | None:
    if kind is None:
        for key in ADAPTER_OPTIONS:
            if key in options:
                raise InputError(
                    f"{flag(key)} {shown(options[key])} has no meaning with --full; use --lora or"
                    " --qlora, or leave it out"
                )
        return None
    for key in _LOW_RANK_OPTIONS if kind not in _LOW_RANK else ("virtual_tokens",):
        if key in options:
            raise InputError(
                f"{flag(key)} {shown(options[key])} has no meaning with --method {method}; leave"
                " it out"
            )
    fields: dict[str, Any] = {"kind": kind}
    if "rank" in options:
        fields["rank"] = values.count(options["rank"], "--rank", high=1 << 16)
    if "alpha" in options:
        fields["alpha"] = values.count(options["alpha"], "--alpha", low=0, high=1 << 20)
    if "targets" in options:
        targets = values.names(options["targets"], "--targets")
        fields["targets"] = (
            ("all-linear",) if targets in (("all",), ("all-linear",), ("all_linear",)) else targets
        )
        if len(targets) > 1 and "all-linear" in targets:
            raise InputError(
                f"--targets {shown(options['targets'])} mixes all-linear with names; give one or"
                " the other"
            )
    if "dropout" in options:
        fields["dropout"] = values.number(options["dropout"], "--dropout")
    if "adapter_dtype" in options:
        fields["dtype"] = dtype_name(values.text(options["adapter_dtype"], "--adapter-dtype"))
    if "rslora" in options:
        fields["rank_stabilized"] = values.switch(options["rslora"], "--rslora")
    if "train_modules" in options:
        fields["trained_modules"] = values.names(options["train_modules"], "--train-modules")
    if "adapters" in options:
        fields["num_adapters"] = values.count(options["adapters"], "--adapters", high=1 << 16)
    if "virtual_tokens" in options:
        fields["num_virtual_tokens"] = values.count(
            options["virtual_tokens"], "--virtual-tokens", high=1 << 20
        )
    return AdapterConfig(**fields)


def quantization_of(
    options: Options, method: str, kind: AdapterKind | None, default_format: str
) -> QuantizationConfig | None:
    stored = _stored(options, kind)
    given = stored or options.get("quant", default_format)
    name = given.strip().lower() if isinstance(given, str) else values.text(given, "--quant")
    if name in ("", "none", "off"):
        if default_format:
            raise InputError(
                f"--quant {shown(given)} contradicts {method}, which trains over a quantized base;"
                " use --lora"
            )
        for key in QUANT_OPTIONS:
            if key in options:
                raise InputError(
                    f"{flag(key)} {shown(options[key])} has no meaning without a quantized base;"
                    " add --qlora or --quant nf4"
                )
        return None
    row = find_format(name)
    if kind is None:
        raise InputError(
            f"--quant {shown(given)} with --full: a quantized base cannot be trained itself; use"
            f" --qlora, or --lora --quant {row.name}"
        )
    fields: dict[str, Any] = {"format": row.name, "double_quant": row.name in BITSANDBYTES_4BIT}
    if "double_quant" in options:
        fields["double_quant"] = values.switch(options["double_quant"], "--double-quant")
        if fields["double_quant"] and row.name not in BITSANDBYTES_4BIT:
            raise InputError(
                f"--double-quant has no meaning with --quant {shown(given)}; it belongs to nf4"
                " and fp4"
            )
    if "group_size" in options:
        fields["group_size"] = values.count(options["group_size"], "--group-size", high=1 << 20)
    if "kbit" in options:
        fields["kbit_preparation"] = values.switch(options["kbit"], "--kbit")
    if "quant_compute_dtype" in options:
        fields["compute_dtype"] = dtype_name(
            values.text(options["quant_compute_dtype"], "--quant-compute-dtype")
        )
    if "quant_storage" in options:
        fields["storage"] = dtype_name(values.text(options["quant_storage"], "--quant-storage"))
    if "keep_modules" in options:
        fields["keep"] = values.names(options["keep_modules"], "--keep-modules")
    return QuantizationConfig(**fields)


def _stored(options: Options, kind: AdapterKind | None) -> str:
    """The format in which the named model is stored; transformers keeps it whatever else is asked
    for. Raises InputError where the weights themselves are to be trained."""
    model = options.get("model")
    if not isinstance(model, str) or not any(word in model.lower() for word in _FORMAT_WORDS):
        return ""
    from napkinmath.catalog.models import find_row, stored_format

    found = stored_format(model)
    if found and kind is None:
        row = find_row(model)
        base = row["name"] if row else "its base"
        raise InputError(
            f"model {shown(model)} is stored in {found}, which cannot be trained itself; add"
            f" --lora, or give {base}"
        )
    return found
