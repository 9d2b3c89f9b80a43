"""NF4 decoding against bitsandbytes, and the QLoRA linear against PEFT + bitsandbytes and unsloth's
algorithm over the same kernels of bitsandbytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from napkinmath_kernels import costs
from napkinmath_kernels.ops.linear_group import FrozenLinear, LinearGroup, LoraAdapter
from napkinmath_kernels.ops.nf4 import QuantizedWeight, dequantize, quantize
from napkinmath_kernels.ops.qlora import qlora_linears

from kernel_rows.environment import version_of
from kernel_rows.goals import (
    DEQUANTIZE,
    DEQUANTIZE_SHAPES,
    HOST_BOUND_TOKENS,
    PEFT,
    QLORA,
    QLORA_FACTORS,
    QLORA_GRAPHED,
    QLORA_RANK,
    QLORA_SHAPE,
    UNSLOTH,
    qlora_goals,
    qlora_name,
)
from kernel_rows.timing import Case


def _absent(*packages: str) -> str:
    """Why a contestant that needs the packages cannot run here, or an empty string."""
    missing = [package for package in packages if version_of(package) is None]
    return f"{', '.join(missing)}: not installed" if missing else ""


def _quantized(
    rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, Any, QuantizedWeight]:
    """(packed, bitsandbytes' state or None, the same weight as ours reads it); made by our own
    quantizer without bitsandbytes."""
    weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / columns**0.5
    if _absent("bitsandbytes"):
        ours = quantize(weight)
        return ours.packed, None, ours
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return packed, state, QuantizedWeight.from_bitsandbytes(packed, state)


def dequantize_cases(device: torch.device, tiny: bool) -> list[Case]:
    """Projections of 7B, 8B and 70B models, nested scales, to bf16. Outputs rotate too: one alone
    would stay in the level-2 cache."""
    found = []
    reason = _absent("bitsandbytes")

    def theirs(inputs: Any) -> torch.Tensor:
        import bitsandbytes.functional as bnb

        return bnb.dequantize_4bit(
            inputs[0], inputs[1], out=inputs[3] if inputs[3].is_cuda else None
        )

    for rows, columns in [(64, 128)] if tiny else DEQUANTIZE_SHAPES:
        linear = costs.LinearSize(rows, columns, 0, costs.four_bit_storage(rows, columns))

        def make(rows: int = rows, columns: int = columns) -> Any:
            return (
                *_quantized(rows, columns, device),
                torch.empty(rows, columns, dtype=torch.bfloat16, device=device),
            )

        contestants = {"napkinmath": lambda inputs: dequantize(inputs[2], out=inputs[3])}
        found.append(
            Case(
                "nf4 dequantize",
                f"{rows}x{columns}",
                make,
                contestants if reason else contestants | {"bitsandbytes": theirs},
                linear.stored_bytes + 2 * rows * columns,
                costs.dequantize(linear, "bf16").forward_traffic_bytes,
                goals=DEQUANTIZE,
                absent={"bitsandbytes": reason} if reason else {},
                graphed=True,
            )
        )
    return found


class _Holder(torch.nn.Module):
    """A model of one linear, which is what PEFT wants around a layer."""

    is_loaded_in_4bit = True

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.proj = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def _peft_layer(packed: torch.Tensor, state: Any, rank: int) -> Any:
    """PEFT's LoRA layer, with its default fp32 adapter, over bitsandbytes' 4-bit linear."""
    import bitsandbytes as bnb
    import peft

    rows, columns = state.shape
    nn: Any = bnb.nn  # its stubs leave the arguments of packed weights out
    base = nn.Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    base.weight = nn.Params4bit(
        packed, requires_grad=False, quant_state=state, bnb_quantized=True, module=base
    )
    config = peft.LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=["proj"])
    model: Any = peft.get_peft_model(_Holder(base), config).train()
    layer = model.base_model.model.proj
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return layer.to(packed.device)


class _UnslothLinear(torch.autograd.Function):
    """unsloth's QLoRA linear (`LoRA_W` in its kernels/fast_lora.py, 2026.10) after its equations.

    x alone is saved. bitsandbytes' kernels decode the weight into one buffer in both directions.
    `addmm_` adds the adapter's products to the base's, and the backward makes x A^T again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        state: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        buffer: torch.Tensor,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ _decoded(packed, state, buffer).t()
        y.addmm_(rows @ a.to(x.dtype).t(), b.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(x, a, b)
        ctx.frozen = packed, state, scaling, buffer
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        x, a, b = ctx.saved_tensors
        packed, state, scaling, buffer = ctx.frozen
        rows = x.reshape(-1, x.shape[-1])
        dy = upstream[0].reshape(-1, upstream[0].shape[-1])
        thin_a, thin_b = a.to(x.dtype), b.to(x.dtype)
        through_b = dy @ thin_b
        d_a = torch.empty_like(thin_a).addmm_(through_b.t(), rows, alpha=scaling, beta=0)
        d_b = torch.empty_like(thin_b).addmm_(dy.t(), rows @ thin_a.t(), alpha=scaling, beta=0)
        dx = dy @ _decoded(packed, state, buffer)
        dx.addmm_(through_b, thin_a, alpha=scaling)
        return dx.view(x.shape), None, None, d_a.to(a.dtype), d_b.to(b.dtype), None, None


def _decoded(packed: torch.Tensor, state: Any, buffer: torch.Tensor) -> torch.Tensor:
    import bitsandbytes.functional as bnb

    return bnb.dequantize_4bit(packed, state, out=buffer if buffer.is_cuda else None)


def _parameter(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return (0.02 * torch.randn(rows, columns, device=device)).requires_grad_()


def qlora_cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward + backward to dx and the adapters (fp32, rank 16) of a 4096 -> 14336 projection."""
    found = []
    rows, columns = (64, 64) if tiny else QLORA_SHAPE
    packed, state, weight = _quantized(rows, columns, device)
    missing = _absent("peft", "bitsandbytes")
    layer = None if missing else _peft_layer(packed, state, QLORA_RANK)
    a = (
        layer.lora_A["default"].weight
        if layer is not None
        else _parameter(QLORA_RANK, columns, device)
    )
    b = (
        layer.lora_B["default"].weight
        if layer is not None
        else _parameter(rows, QLORA_RANK, device)
    )
    buffer = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    group = LinearGroup(
        [FrozenLinear(weight, None, LoraAdapter(a, b, 1.0))]
    )  # as a module keeps it
    for tokens in [8] if tiny else QLORA_FACTORS:

        def ours(inputs: Any) -> Any:
            x, dy = inputs
            return torch.autograd.grad(qlora_linears(x, group)[0], (x, a, b), dy)

        def theirs(inputs: Any) -> Any:
            assert layer is not None
            x, dy = inputs
            return torch.autograd.grad(layer(x), (x, a, b), dy)

        def unsloths(inputs: Any) -> Any:
            x, dy = inputs
            return torch.autograd.grad(
                _UnslothLinear.apply(x, packed, state, a, b, 1.0, buffer), (x, a, b), dy
            )

        def make(tokens: int = tokens) -> Any:
            x = torch.randn(1, tokens, columns, device=device).bfloat16().requires_grad_()
            return x, torch.randn(1, tokens, rows, device=device).bfloat16()

        cost = costs.qlora_linears(tokens, [costs.LinearSize(rows, columns, QLORA_RANK)], "bf16")
        case = Case(
            QLORA,
            qlora_name(tokens, rows, columns),
            make,
            {"napkinmath": ours}
            | ({} if missing else {PEFT: theirs})
            | ({} if state is None else {UNSLOTH: unsloths}),
            tokens * (rows + columns) * 2,
            flops=cost.forward_flops + cost.backward_flops,
            goals=qlora_goals(tokens),
            absent=({PEFT: missing} if missing else {})
            | ({UNSLOTH: _absent("bitsandbytes")} if state is None else {}),
        )
        found.append(case)
        if tokens <= HOST_BOUND_TOKENS:
            found.append(replace(case, op=QLORA_GRAPHED, graphed=True))
    return found
