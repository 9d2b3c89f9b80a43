"""Norms, SwiGLU and RoPE against the copy bandwidth, torch and Liger."""

from __future__ import annotations

from typing import Any

import torch
from napkinmath_kernels import costs
from napkinmath_kernels.ops.gated import swiglu
from napkinmath_kernels.ops.layer_norm import layer_norm
from napkinmath_kernels.ops.rms_norm import rms_norm
from napkinmath_kernels.ops.rope import rope

from kernel_rows.goals import (
    ELEMENTWISE,
    GATED_WIDTH,
    NORM_HIDDEN,
    NORM_ROWS,
    ROPE_SHAPE,
    rope_name,
)
from kernel_rows.timing import Case


def _liger(path: str, name: str) -> tuple[Any, str]:
    if not torch.cuda.is_available():
        return None, "liger-kernel needs a GPU"
    try:
        return getattr(__import__(path, fromlist=[name]), name), ""
    except ImportError as error:
        return None, f"liger-kernel is not installed ({error})"


def _backward(function: Any) -> Any:
    """A call that runs forward and backward with a fixed upstream gradient."""

    def call(inputs: tuple[Any, ...]) -> Any:
        *arguments, upstream = inputs
        leaves = [x for x in arguments if x.requires_grad]
        outputs = function(*arguments)
        return torch.autograd.grad(outputs, leaves, upstream)

    return call


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward and forward + backward at 8,192 tokens of an 8B model."""
    rows, hidden, width = (8, 64, 128) if tiny else (NORM_ROWS, NORM_HIDDEN, GATED_WIDTH)
    found = []
    x = lambda n: torch.randn(rows, n, device=device).bfloat16()  # noqa: E731
    weight = torch.randn(hidden, device=device).bfloat16()
    norm = costs.rms_norm(rows, hidden, "bf16", trains_weight=False)
    layer = costs.layer_norm(rows, hidden, "bf16", trains_parameters=False)
    gate = costs.gated(rows, width, "bf16")
    liger_norm, no_norm = _liger("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    liger_swiglu, no_swiglu = _liger("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    torch_norm = lambda x: torch.nn.functional.rms_norm(x, (hidden,), weight, 1e-6)  # noqa: E731
    torch_layer = lambda x: torch.nn.functional.layer_norm(x, (hidden,), weight)  # noqa: E731
    plain_swiglu = lambda g, u: torch.nn.functional.silu(g) * u  # noqa: E731
    table = (
        (
            "rms_norm",
            hidden,
            1,
            norm,
            lambda x: rms_norm(x, weight),
            {"torch": torch_norm},
            liger_norm and (lambda x: liger_norm.apply(x, weight, 1e-6)),
            no_norm,
        ),
        (
            "layer_norm",
            hidden,
            1,
            layer,
            lambda x: layer_norm(x, weight),
            {"torch": torch_layer},
            None,
            "",
        ),
        (
            "swiglu",
            width,
            2,
            gate,
            swiglu,
            {"torch": plain_swiglu},
            liger_swiglu and liger_swiglu.apply,
            no_swiglu,
        ),
    )
    for op, columns, num_inputs, cost, ours, peers, liger, reason in table:
        contestants = {"napkinmath": ours, **peers, **({"liger": liger} if liger else {})}
        absent = {"liger": reason} if reason else {}
        goals = ELEMENTWISE[op]

        def make(
            columns: int = columns, num_inputs: int = num_inputs, upstream: bool = False
        ) -> Any:
            inputs = tuple(x(columns).requires_grad_(upstream) for _ in range(num_inputs))
            return (*inputs, x(columns)) if upstream else inputs

        forward = {name: lambda inputs, f=f: f(*inputs) for name, f in contestants.items()}
        both = {name: _backward(f) for name, f in contestants.items()}
        size = rows * columns * 2 * num_inputs
        found.append(
            Case(
                f"{op} forward",
                f"{rows}x{columns}",
                make,
                forward,
                size,
                cost.forward_traffic_bytes,
                goals=goals,
                absent=absent,
                graphed=True,
            )
        )
        traffic = cost.forward_traffic_bytes + cost.backward_traffic_bytes
        make_both = lambda make=make: make(upstream=True)  # noqa: E731
        found.append(
            Case(
                f"{op} fwd+bwd",
                f"{rows}x{columns}",
                make_both,
                both,
                2 * size,
                traffic,
                goals=goals,
                absent=absent,
                graphed=True,
            )
        )
    found.append(_rope_case(device, tiny))
    return found


def _rope_case(device: torch.device, tiny: bool) -> Case:
    batch, tokens, q_heads, k_heads, size = (1, 8, 4, 2, 16) if tiny else ROPE_SHAPE
    angle = torch.rand(1, tokens, size, device=device)
    cos, sin = angle.cos(), angle.sin()

    def make() -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.randn(batch, tokens, heads, size, device=device).bfloat16().transpose(1, 2)
            for heads in (q_heads, k_heads)
        )

    def plain(inputs: tuple[Any, ...]) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return apply_rotary_pos_emb(*inputs, cos.bfloat16(), sin.bfloat16())

    liger, reason = _liger("liger_kernel.ops.rope", "LigerRopeFunction")
    contestants = {
        "napkinmath": lambda inputs: rope(*inputs, cos, sin),
        "napkinmath in place": lambda inputs: rope(*inputs, cos, sin, inplace=True),
        "transformers": plain,
        **(
            {"liger": lambda inputs: liger.apply(*inputs, cos.bfloat16(), sin.bfloat16())}
            if liger
            else {}
        ),
    }
    cost = costs.rope(batch, q_heads, k_heads, tokens, size, "bf16")
    absent = {"liger": reason} if reason else {}
    num_bytes = batch * (q_heads + k_heads) * tokens * size * 2
    return Case(
        "rope",
        rope_name(batch, tokens, q_heads, k_heads),
        make,
        contestants,
        num_bytes,
        cost.forward_traffic_bytes,
        goals=ELEMENTWISE["rope"],
        absent=absent,
    )
