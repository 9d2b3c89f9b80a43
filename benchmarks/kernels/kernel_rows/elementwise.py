"""Norms, SwiGLU and RoPE against the copy bandwidth, torch and Liger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class RowWise(NamedTuple):
    """An operation on `num_inputs` matrices of bf16, and who computes it."""

    op: str
    rows: int
    columns: int
    num_inputs: int
    cost: costs.Cost
    ours: Callable[..., Any]
    of_torch: Callable[..., Any]
    of_liger: Callable[..., Any] | None = None
    without_liger: str = ""
    """Why Liger's is absent."""

    def contestants(self) -> dict[str, Callable[..., Any]]:
        known = {"napkinmath": self.ours, "torch": self.of_torch}
        return known | ({"liger": self.of_liger} if self.of_liger else {})

    def forward(self, device: torch.device) -> Case:
        calls = {name: lambda inputs, f=f: f(*inputs) for name, f in self.contestants().items()}
        traffic = self.cost.forward_traffic_bytes
        return self._case("forward", self._maker(device, trained=False), calls, 1, traffic)

    def both_ways(self, device: torch.device) -> Case:
        """Forward and backward."""
        calls = {name: _backward(f) for name, f in self.contestants().items()}
        traffic = self.cost.forward_traffic_bytes + self.cost.backward_traffic_bytes
        return self._case("fwd+bwd", self._maker(device, trained=True), calls, 2, traffic)

    def _maker(self, device: torch.device, *, trained: bool) -> Callable[[], tuple[Any, ...]]:
        """Makes fresh inputs; with the upstream gradient behind them where they are `trained`."""

        def matrix() -> torch.Tensor:
            return torch.randn(self.rows, self.columns, device=device).bfloat16()

        def make() -> tuple[Any, ...]:
            inputs = tuple(matrix().requires_grad_(trained) for _ in range(self.num_inputs))
            return (*inputs, matrix()) if trained else inputs

        return make

    def _case(
        self, way: str, make: Callable[[], Any], calls: dict[str, Any], passes: int, traffic: int
    ) -> Case:
        return Case(
            f"{self.op} {way}",
            f"{self.rows}x{self.columns}",
            make,
            calls,
            passes * self.rows * self.columns * 2 * self.num_inputs,
            traffic,
            goals=ELEMENTWISE[self.op],
            absent={"liger": self.without_liger} if self.without_liger else {},
            graphed=True,
        )


def cases(device: torch.device, tiny: bool) -> list[Case]:
    """Forward and forward + backward at 8,192 tokens of an 8B model."""
    rows, hidden, width = (8, 64, 128) if tiny else (NORM_ROWS, NORM_HIDDEN, GATED_WIDTH)
    weight = torch.randn(hidden, device=device).bfloat16()
    operations = (*_norms(rows, weight), _swiglu(rows, width))
    found = [case for op in operations for case in (op.forward(device), op.both_ways(device))]
    return [*found, _rope_case(device, tiny)]


def _norms(rows: int, weight: torch.Tensor) -> tuple[RowWise, RowWise]:
    """RMSNorm, and LayerNorm without bias; neither trains its weight."""
    hidden = len(weight)
    liger, reason = _liger("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    rms = RowWise(
        "rms_norm",
        rows,
        hidden,
        1,
        costs.rms_norm(rows, hidden, "bf16", trains_weight=False),
        lambda x: rms_norm(x, weight),
        lambda x: torch.nn.functional.rms_norm(x, (hidden,), weight, 1e-6),
        liger and (lambda x: liger.apply(x, weight, 1e-6)),
        reason,
    )
    layer = RowWise(
        "layer_norm",
        rows,
        hidden,
        1,
        costs.layer_norm(rows, hidden, "bf16", trains_parameters=False),
        lambda x: layer_norm(x, weight),
        lambda x: torch.nn.functional.layer_norm(x, (hidden,), weight),
    )
    return rms, layer


def _swiglu(rows: int, width: int) -> RowWise:
    liger, reason = _liger("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    return RowWise(
        "swiglu",
        rows,
        width,
        2,
        costs.gated(rows, width, "bf16"),
        swiglu,
        lambda gate, up: torch.nn.functional.silu(gate) * up,
        liger and liger.apply,
        reason,
    )


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

        q, k = inputs
        return apply_rotary_pos_emb(q, k, cos.bfloat16(), sin.bfloat16())

    liger, reason = _liger("liger_kernel.ops.rope", "LigerRopeFunction")
    contestants = {
        "napkinmath": lambda inputs: rope(inputs[0], inputs[1], cos, sin),
        "napkinmath in place": lambda inputs: rope(inputs[0], inputs[1], cos, sin, inplace=True),
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
        graphed=True,
    )
