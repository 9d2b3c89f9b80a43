"""What is trained and how its base is stored: method, adapter and quantization out of options."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.command_line import METHOD_FLAGS
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.models import find_row, stored_format
from napkinmath.catalog.quantization import find_format
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    AdapterConfig,
    AdapterKind,
    QuantizationConfig,
)
from napkinmath.inputs.model_options import config_storage
from napkinmath.inputs.option_table import fields_of, keys_of
from napkinmath.inputs.option_table.model_and_method import METHODS, SPELLINGS
from napkinmath.inputs.option_table.option import flag_of as flag
from napkinmath.models.stored_weights import StoredWeights

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Options = Mapping[str, object]


_LOW_RANK = (AdapterKind.LORA, AdapterKind.DORA, AdapterKind.QALORA)
ADAPTER_OPTIONS = tuple(key for key in keys_of("adapter") if key != "method")
QUANT_OPTIONS = tuple(key for key in keys_of("quantization") if key != "quant")
_LOW_RANK_OPTIONS = ("rank", "alpha", "dropout", "rslora")


_FORMAT_WORDS = ("bit", "awq", "gptq", "fp4", "nf4", "bnb", "int")  # parts of names, to ask further


def read_method(options: Options) -> tuple[str, AdapterKind | None, str]:
    """(name, adapter kind, quantization it implies); several methods at once are refused."""
    given = values.listed(options.get("method", "full"))
    chosen = list(dict.fromkeys(values.text(name, "--method") for name in given)) or [
        values.text("", "--method")
    ]
    if "lora" in chosen and {"qlora", "dora", "qdora", "qalora"} & set(chosen):
        chosen.remove("lora")  # each is a LoRA of its kind
    if len(chosen) > 1:
        words = (f"--{name}" if name in METHOD_FLAGS else f"--method {name}" for name in chosen)
        raise InputError(f"{' '.join(words)} exclude each other; give one of them")
    name = chosen[0].strip().lower().replace("_", "-")
    name = SPELLINGS.get(name, name)
    if name not in METHODS:
        raise InputError(
            f"--method {shown(chosen[0])} is unknown; use one of"
            f" {', '.join(METHODS)}{suggest(name, [*METHODS, *SPELLINGS])}"
        )
    return name, *METHODS[name]


def adapter_of(options: Options, method: str, kind: AdapterKind | None) -> AdapterConfig | None:
    """The adapter of a method; None for full training, which refuses an adapter's options."""
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
    return AdapterConfig(kind=kind, **_typed(fields_of(options, "adapter")))


def quantization_of(
    options: Options, method: str, kind: AdapterKind | None, default_format: str
) -> QuantizationConfig | None:
    """The base's quantization as options and method say; None where the base stays as it is."""
    stored = _stored(options, kind)
    given = stored.format or options.get("quant", default_format)
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
    two_levels = row.name in BITSANDBYTES_4BIT
    doubled = two_levels if stored.double_quant is None else stored.double_quant
    fields = {"double_quant": doubled, **fields_of(options, "quantization")}
    if fields["double_quant"] and not two_levels:
        raise InputError(
            f"--double-quant has no meaning with --quant {shown(given)}; it belongs to nf4 and fp4"
        )
    return QuantizationConfig(format=row.name, **_typed(fields))


def _stored(options: Options, kind: AdapterKind | None) -> StoredWeights:
    """How the model's weights are stored; transformers keeps that whatever else is asked for.
    Raises InputError where the weights themselves are to be trained."""
    found, model, base = config_storage(options), options.get("model"), "weights that are plain"
    if found is None and isinstance(model, str) and _may_be_stored(model):
        found, row = StoredWeights(format=stored_format(model)), find_row(model)
        base = row["name"] if row else "its base"
    found = found or StoredWeights()
    if found.format and kind is None:
        raise InputError(
            f"model {shown(model if isinstance(model, str) else 'given')} is stored in"
            f" {found.format}, which cannot be trained itself; add --lora, or give {base}"
        )
    return found


def _may_be_stored(model: str) -> bool:
    return any(word in model.lower() for word in _FORMAT_WORDS)


def _typed(fields: dict[str, object]) -> dict[str, Any]:
    """The same for a constructor, which checks what it is given."""
    return fields
