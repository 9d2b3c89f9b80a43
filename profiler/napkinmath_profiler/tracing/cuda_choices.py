"""What a CUDA build of PyTorch chooses where the meta device chooses otherwise, each as a named
override.

Every override counts how often it acted (``AppliedChoices.counts``), so that a report lists it with
its source.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from napkinmath_profiler.tracing.attention_choice import AttentionBackend, sdpa_function
from napkinmath_profiler.tracing.cuda_autocast import meta_autocast
from napkinmath_profiler.tracing.kernel_patches import fp8_on_cuda, liger_on_cuda, trl_on_cuda
from napkinmath_profiler.tracing.triton_launches import triton_launches

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class CudaChoice:
    """One override: its name, what CUDA does, and where that is written."""

    name: str
    what: str
    source: str


CHOICES: dict[str, CudaChoice] = {
    choice.name: choice
    for choice in (
        CudaChoice(
            "sdpa",
            "attention runs cuDNN, flash, efficient or math by dtype, mask, head size, grouped"
            " heads and architecture",
            "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
        ),
        CudaChoice(
            "dropout",
            "dropout is one kernel that saves a bool mask",
            "aten/src/ATen/native/Dropout.cpp is_fused_kernel_acceptable",
        ),
        CudaChoice(
            "autocast",
            "casts by CUDA's op lists, cast weights cached",
            "the installed torch/include/ATen/autocast_mode.h",
        ),
        CudaChoice(
            "foreach and fused optimizers",
            "multi-tensor and fused updates are taken",
            "torch/utils/_foreach_utils.py",
        ),
        CudaChoice(
            "scalar answers",
            "a tensor asked for its value answers true or one",
            "transformers asks .all() of masks",
        ),
        CudaChoice(
            "grouped_mm",
            "grouped products take float32 and float16",
            "aten/src/ATen/native/cuda/GroupedBlas.cpp",
        ),
        CudaChoice(
            "bitsandbytes gemm_4bit",
            "with many tokens the whole weight is dequantized, then linear runs",
            "bitsandbytes/backends/cuda/ops.py gemm_4bit",
        ),
        CudaChoice(
            "kernel workspaces",
            "buffers that kernels request inside one op",
            "napkinmath_profiler/tracing/kernel_workspaces.py",
        ),
        CudaChoice(
            "paged memory",
            "paged optimizer states live in unified memory",
            "bitsandbytes/functional.py get_paged",
        ),
        CudaChoice(
            "gradient sums",
            "the engine adds a second gradient into the first where nobody else holds it, which no"
            " dispatch mode lets it do",
            "torch/csrc/autograd/input_buffer.cpp can_accumulate_inplace",
        ),
        CudaChoice(
            "triton launches",
            "a kernel writes into what was allocated before it",
            "triton/runtime/jit.py JITFunction.run",
        ),
        CudaChoice(
            "opened kernels",
            "the ops' own bodies run, so that buffers between launches are seen",
            "kernels/napkinmath_kernels/ops",
        ),
        CudaChoice(
            "boolean index",
            "a mask selects everything, through a table of int64 positions",
            "aten/src/ATen/native/IndexingUtils.h expandTensors",
        ),
        CudaChoice(
            "index backward",
            "an index's gradient is put into fresh zeros in place",
            "torch/csrc/autograd/FunctionsManual.cpp index_backward",
        ),
        CudaChoice(
            "half softmax",
            "softmax reads float16 and writes float32 in one kernel",
            "aten/src/ATen/native/SoftMax.cpp softmax",
        ),
    )
}


@dataclass(slots=True)
class AppliedChoices:
    """How often each override acted in one trace, and which attention kernel was picked how
    often."""

    counts: Counter[str] = field(default_factory=Counter)
    attention: Counter[str] = field(default_factory=Counter)


def _dropout_function(applied: AppliedChoices) -> Callable[..., torch.Tensor]:
    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or input.numel() == 0:
            return input
        if p == 1:
            return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
        applied.counts["dropout"] += 1
        return aten.native_dropout(input, p, train)[0]

    return dropout


def _softmax_function(
    applied: AppliedChoices, kernel: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            applied.counts["half softmax"] += 1
            return kernel(input, dim, True)
        return kernel(input if dtype is None else input.to(dtype), dim, False)

    return softmax


@contextmanager
def cuda_choices(
    backend: AttentionBackend,
    capability: tuple[int, int],
    applied: AppliedChoices,
    mark_managed: Callable[[torch.Tensor], None] | None = None,
) -> Generator[None]:
    """Give the meta device CUDA's choices inside the block, recompute during backward included.

    ``mark_managed`` is called with tensors that live in unified memory. Registered at the dispatcher's
    ``AutogradMeta`` key because a function mode is off while backward runs.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "scaled_dot_product_attention": sdpa_function(backend, capability, applied.attention),
        "dropout": _dropout_function(applied),
        "softmax.int": _softmax_function(applied, aten._softmax),
        "log_softmax.int": _softmax_function(applied, aten._log_softmax),
    }.items():
        library.impl(name, function, "AutogradMeta")
    with ExitStack() as stack:
        autocast = stack.enter_context(meta_autocast())
        stack.enter_context(triton_launches(applied.counts))
        stack.enter_context(trl_on_cuda())
        stack.enter_context(liger_on_cuda())
        stack.enter_context(fp8_on_cuda())
        _allow_fused_updates(stack)
        _page_optimizer_states(stack, applied, mark_managed)
        try:
            yield
        finally:
            library._destroy()
            applied.counts["sdpa"] += applied.attention.total()
            applied.counts["autocast"] += autocast.num_casting_calls


def _allow_fused_updates(stack: ExitStack) -> None:
    """Optimizers ask which devices have multi-tensor and fused kernels: on meta as on CUDA."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        for kind in ("foreach", "fused"):
            asked = f"{module}._get_{kind}_kernels_supported_devices"
            stack.enter_context(mock.patch(asked, lambda: ["cuda", "meta"]))


def _page_optimizer_states(
    stack: ExitStack, applied: AppliedChoices, mark_managed: Callable[[torch.Tensor], None] | None
) -> None:
    """bitsandbytes' paged states are buffers of unified memory that its CUDA library hands out."""
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None:
        return

    def get_paged(
        *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> torch.Tensor:
        paged = torch.empty(shape, dtype=dtype, device="meta")
        paged.is_paged = True  # type: ignore[attr-defined]
        if mark_managed is not None:
            mark_managed(paged)
        applied.counts["paged memory"] += 1
        return paged

    def nothing(*_: object, **__: object) -> None:
        """Filling and prefetching move pages, not tensors."""

    replacements = {"get_paged": get_paged, "fill": nothing, "prefetch_tensor": nothing}
    for name, replacement in replacements.items():
        if hasattr(functional, name):
            stack.enter_context(mock.patch.object(functional, name, replacement))
