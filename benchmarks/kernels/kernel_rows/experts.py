"""The experts' linear with adapters against PEFT's algorithm over torch's grouped product."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from napkinmath_kernels import costs
from napkinmath_kernels.ops.expert_linear import ExpertAdapter, expert_linear

from kernel_rows.goals import EXPERTS, EXPERTS_SHAPE, PEFT_EXPERTS, QLORA_RANK, experts_name
from kernel_rows.timing import Case


def _grouped(x: torch.Tensor, stack: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its matrix (experts, out, in); a loop where torch has no grouped
    kernel."""
    if x.is_cuda:
        return torch.nn.functional.grouped_mm(x, stack.transpose(1, 2), offs=offsets)
    ends = [0, *offsets.tolist()]
    rows = [x[start:end] @ stack[e].t() for e, (start, end) in enumerate(pairwise(ends))]
    return torch.cat(rows)


def _peft(
    x: torch.Tensor, stack: torch.Tensor, offsets: torch.Tensor, adapter: ExpertAdapter
) -> torch.Tensor:
    """peft 0.21 tuners/lora/layer.py ParamWrapper.get_delta_weight after its equations: the sum is
    made for every expert, from fp32 adapters in fp32."""
    delta = torch.einsum("eor,eri->eoi", adapter.b, adapter.a) * adapter.scaling
    return _grouped(x, stack + delta.to(stack.dtype), offsets)


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward + backward to dx and the adapters (fp32, rank 16), tokens spread evenly."""
    experts, visited, tokens, inputs, outputs = (2, 1, 16, 32, 64) if tiny else EXPERTS_SHAPE
    rows = tokens * visited
    stack = torch.randn(experts, outputs, inputs, device=device, dtype=torch.bfloat16)
    stack /= inputs**0.5
    each = rows // experts
    offsets = torch.arange(each, rows + 1, each, dtype=torch.int32, device=device)
    shapes = (experts, QLORA_RANK, inputs), (experts, outputs, QLORA_RANK)
    a, b = ((0.02 * torch.randn(shape, device=device)).requires_grad_() for shape in shapes)
    adapter = ExpertAdapter(a, b, 1.0)

    def make() -> Any:
        x = torch.randn(rows, inputs, device=device).bfloat16().requires_grad_()
        return x, torch.randn(rows, outputs, device=device).bfloat16()

    calls = {
        name: lambda given, run=run: torch.autograd.grad(
            run(given[0], stack, offsets, adapter), (given[0], a, b), given[1]
        )
        for name, run in (("napkinmath", expert_linear), (PEFT_EXPERTS, _peft))
    }
    size = costs.LinearSize(outputs, inputs, QLORA_RANK)
    cost = costs.expert_linear(rows, experts, size, "bf16")
    return [
        Case(
            "expert linear fwd+bwd",
            experts_name(experts, visited, tokens, inputs, outputs),
            make,
            calls,
            2 * rows * (inputs + outputs),
            flops=cost.forward_flops + cost.backward_flops,
            goals=EXPERTS,
        )
    ]
