"""Names that several tools share: the Trainer's optimizers, attention, and how a precision is
switched on."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP16, FP32
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    AdapterKind,
    Attention,
    Precision,
    TrainConfig,
)

# our row -> `optim` of transformers' TrainingArguments (transformers 5.23 training_args.py
# OptimizerNames)
OPTIMIZERS = {
    "adamw-fused": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
    "adamw-8bit": "adamw_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "lion-bnb": "lion_32bit",
    "lion-8bit": "lion_8bit",
    "paged-lion": "paged_lion_32bit",
    "paged-lion-8bit": "paged_lion_8bit",
    "rmsprop-bnb": "rmsprop_bnb",
    "rmsprop-8bit": "rmsprop_bnb_8bit",
    "ademamix": "ademamix",
    "ademamix-8bit": "ademamix_8bit",
    "paged-ademamix": "paged_ademamix_32bit",
    "paged-ademamix-8bit": "paged_ademamix_8bit",
    "galore": "galore_adamw",
    "apollo": "apollo_adamw",
    "adalomo": "adalomo",
    "schedule-free-adamw": "schedule_free_adamw",
    "schedule-free-radam": "schedule_free_radam",
    "schedule-free-sgd": "schedule_free_sgd",
}
_ATTENTION = {
    Attention.EAGER: "eager",
    Attention.SDPA: "sdpa",
    Attention.FLASH2: "flash_attention_2",
    Attention.FLASH3: "flash_attention_3",
    Attention.FLEX: "flex_attention",
}


def optimizer_name(config: TrainConfig) -> str:
    """The Trainer's name of the optimizer; raises InputError where it has none."""
    name = (
        find_stack(config.stack).optimizer.default
        if config.optimizer == "auto"
        else config.optimizer
    )
    if name not in OPTIMIZERS:
        raise InputError(
            f"optimizer {shown(name)} is not one of the Trainer's; use e.g. adamw-fused, adamw-8bit"
            " or adafactor"
        )
    return OPTIMIZERS[name]


def attention_name(config: TrainConfig) -> str | None:
    """transformers' attn_implementation; None leaves it to the library."""
    return _ATTENTION.get(config.attention)


def precision_switches(config: TrainConfig) -> tuple[dict[str, bool], str]:
    """(bf16, fp16, tf32 as far as they are on or must be off, type in which weights are loaded)."""
    found: dict[Precision, tuple[dict[str, bool], str]] = {
        Precision.BF16_AUTOCAST: ({"bf16": True}, BF16.torch),
        Precision.BF16_AMP: ({"bf16": True}, FP32.torch),
        Precision.FP16_AUTOCAST: ({"bf16": False, "fp16": True}, FP16.torch),
        Precision.FP16_AMP: ({"bf16": False, "fp16": True}, FP32.torch),
        Precision.BF16: ({"bf16": False}, BF16.torch),
        Precision.FP16: ({"bf16": False, "fp16": False}, FP16.torch),
        Precision.FP32: ({"bf16": False}, FP32.torch),
        Precision.TF32: ({"bf16": False, "tf32": True}, ""),
    }
    if config.precision not in found:
        raise InputError(
            f"precision {config.precision.value} has no switch there; use bf16-autocast, bf16-amp,"
            " fp16-amp or fp32"
        )
    return found[config.precision]


def lora_only(config: TrainConfig, tool: str) -> None:
    """Raises InputError for adapters the tool's file does not know."""
    if config.adapter is not None and config.adapter.kind not in (
        AdapterKind.LORA,
        AdapterKind.DORA,
    ):
        raise InputError(
            f"{tool}'s file knows no {config.adapter.kind.value} adapters; use --lora or --method"
            " dora"
        )
    if config.quantization is not None and config.quantization.format not in (
        *BITSANDBYTES_4BIT,
        "int8",
    ):
        raise InputError(
            f"{tool}'s file cannot load {config.quantization.format} weights; use nf4 or int8"
        )


def number(size: object) -> int:
    """A batch or length as a plain number."""
    assert isinstance(size, int)
    return size
