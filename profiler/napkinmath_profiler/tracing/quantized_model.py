"""A model's linears in bitsandbytes' 4 bits or in FP8, as transformers loads them, and the constants
that come with them."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import torch
from torch import nn

from napkinmath_profiler.tracing.meta_model import DTYPES, QuantizationOptions
from napkinmath_profiler.tracing.trace_errors import TraceError

FP8 = "fp8"


def bitsandbytes_package() -> Any:
    """bitsandbytes, imported without its remarks on this machine's lack of a GPU; TraceError where
    it is not installed."""

    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    try:
        import bitsandbytes
    except ImportError as reason:
        raise TraceError(
            f"this step needs bitsandbytes ({reason}); pip install bitsandbytes, or leave quantized"
            " weights and 8-bit states out"
        ) from None
    return bitsandbytes


def quantize(
    model: nn.Module, *, compute_dtype: str, options: QuantizationOptions, device: str = "meta"
) -> nn.Module:
    """Replace the linears that transformers would replace by those of the format."""
    if options.quant_type == FP8:
        return _in_fp8(model, device)
    return quantize_4bit(model, compute_dtype=compute_dtype, options=options, device=device)


def _in_fp8(model: nn.Module, device: str) -> nn.Module:
    """transformers' ``FP8Linear`` in blocks of 128 x 128 for each linear but the head."""
    if device != "meta":
        raise TraceError("FP8 weights are made on the meta device alone; measure nf4 or bf16")
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.quantizers.base import HfQuantizer

    skipped = HfQuantizer.get_modules_to_not_convert(
        cast(Any, model), None, getattr(model, "_keep_in_fp32_modules", None)
    )
    model = replace_with_fp8_linear(model, skipped, FineGrainedFP8Config())
    cast(Any, model).is_quantized = True
    return model


def quantize_4bit(
    model: nn.Module, *, compute_dtype: str, options: QuantizationOptions, device: str = "meta"
) -> nn.Module:
    """Replace the linears transformers would replace by bitsandbytes ``Linear4bit``; off the meta
    device their weights are random."""
    bitsandbytes = bitsandbytes_package()
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.quant_type,
        bnb_4bit_use_double_quant=options.double_quant,
        bnb_4bit_compute_dtype=DTYPES[compute_dtype],
        bnb_4bit_quant_storage=DTYPES.get(options.quant_storage, torch.uint8),
    )
    skipped = HfQuantizer.get_modules_to_not_convert(
        cast(Any, model), None, getattr(model, "_keep_in_fp32_modules", None)
    )
    model = replace_with_bnb_linear(model, skipped, settings)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            _quantize_linear(module, DTYPES[compute_dtype], device)
    if options.experts:
        _quantize_experts(model, DTYPES[compute_dtype], options)
    forget_meta_tables()
    for mark in ("is_loaded_in_4bit", "is_quantized"):
        setattr(model, mark, True)
    return model


def _quantize_linear(module: Any, dtype: torch.dtype, device: str) -> None:
    if device != "meta":
        _give_data(module, dtype, device)
    weight = module.weight
    weight.data = weight.data.to(dtype)
    weight.module = module
    weight._quantize(torch.device(device))
    if module.bias is not None:
        module.bias.data = module.bias.data.to(dtype)


def _quantize_experts(model: nn.Module, dtype: torch.dtype, options: QuantizationOptions) -> None:
    """Packs parameters of three axes under a name with `expert` in it, as axolotl does while it
    loads a model (monkeypatch/moe_quant.py)."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    stacks = [name for name, weight in model.named_parameters() if weight.ndim >= 3]
    for path, _, name in (name.rpartition(".") for name in stacks if "expert" in name.lower()):
        module = model.get_submodule(path)
        stack = getattr(module, name)
        stack.data = stack.data.to(dtype)
        replace_parameter_4bit(
            module,
            name,
            compress_statistics=options.double_quant,
            quant_type=cast(Any, options.quant_type),
        )


def forget_meta_tables() -> None:
    """Empties bitsandbytes' cache of code tables of those without values, which it would hand a
    later, real quantization."""
    tables = getattr(sys.modules.get("bitsandbytes.functional"), "name2qmap", {})
    for name in [name for name, table in tables.items() if getattr(table, "is_meta", False)]:
        del tables[name]


def _give_data(module: Any, dtype: torch.dtype, device: str) -> None:
    """Random values for a ``Linear4bit`` on meta, spread as a model's initialization spreads
    them."""
    weight = module.weight
    data = torch.empty(weight.shape, dtype=dtype, device=device).normal_(0.0, 0.02)
    kept = {
        name: getattr(weight, name)
        for name in ("quant_type", "compress_statistics", "blocksize", "quant_storage")
    }
    module.weight = type(weight)(data, requires_grad=False, module=module, **kept)
    if module.bias is not None:
        module.bias = nn.Parameter(
            torch.zeros(module.bias.shape, dtype=dtype, device=device), requires_grad=False
        )


def quantization_constants(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every tensor held by the 4-bit weights' quantization states, named after the module."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in model.named_modules():
        held = getattr(getattr(module, "weight", None), "quant_state", None)
        state = (
            held if held is not None else getattr(module, "quant_state", None)
        )  # a sharded weight has left it to its module
        for prefix, owner in (("", state), ("state2.", getattr(state, "state2", None))):
            for name in ("absmax", "code", "offset"):
                tensor = getattr(owner, name, None)
                if isinstance(tensor, torch.Tensor):
                    found.append((f"{path}.quant_state.{prefix}{name}", tensor))
    return found
