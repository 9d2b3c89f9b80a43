"""What the training example shows at the end: the loss curve as a picture, and predicted against
observed memory and speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import napkinmath
import torch
from napkinmath.base.errors import InputError
from napkinmath.base.units import MIB
from napkinmath.base.whole_file import write_whole
from napkinmath.catalog.gpus import find_hardware
from torch import nn

from napkinmath_profiler.example.loop import Progress
from napkinmath_profiler.trace import trace


@dataclass(frozen=True)
class MemoryFigure:
    """Peak bytes of a training step, and where the figure comes from."""

    num_bytes: int
    source: str


def observed_memory(
    model: nn.Module, step: Callable[[], Any], device: torch.device
) -> MemoryFigure:
    """The peak of one further step: the allocator's on a GPU; on a CPU the tensors that the
    dispatcher sees come and go."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return MemoryFigure(
            torch.cuda.max_memory_allocated(device), "torch.cuda.max_memory_allocated"
        )
    timeline = trace(model=model, step=step)
    return MemoryFigure(
        timeline.peak().nbytes,
        "storages seen by the dispatcher on the CPU, fused ops' inner buffers excepted",
    )


FULL = napkinmath.RecomputeConfig(kind=napkinmath.RecomputeKind.FULL)
#: What the example calls a layer's checkpointing, as the estimator has it.
RECOMPUTE: dict[str, dict[str, Any]] = {
    "keep": {},
    "full": {"recompute": FULL},
    "offload": {"recompute": FULL, "offload": napkinmath.OffloadConfig(checkpoints=True)},
    "keep-attention": {
        "recompute": napkinmath.RecomputeConfig(
            kind=napkinmath.RecomputeKind.SELECTIVE, keep=("sdpa",)
        )
    },
    "keep-matmuls": {
        "recompute": napkinmath.RecomputeConfig(
            kind=napkinmath.RecomputeKind.SELECTIVE, keep=("sdpa", "linear", "linears")
        )
    },
}


def predicted_step(
    config: Any,
    *,
    batch_size: int,
    sequence_length: int,
    rank: int,
    dropout: float,
    precision: str,
    gpu: str | None = None,
    checkpointing: str = "keep",
    quantized: bool = True,
) -> Any:
    """napkinmath's estimate of the same step, with its time if a GPU is named; the patched loss
    comes with the kernels."""
    four_bit = napkinmath.QuantizationConfig(kbit_preparation=False, compute_dtype=precision)
    return napkinmath.estimate(
        config.to_dict(),
        adapter=napkinmath.AdapterConfig(rank=rank, dropout=dropout),
        quantization=four_bit if quantized else None,
        micro_batch_size=batch_size,
        sequence_length=sequence_length,
        precision=napkinmath.Precision(precision),
        optimizer="adamw",
        kernels=napkinmath.Kernels.NAPKINMATH,
        hardware=gpu,
        **RECOMPUTE[checkpointing],
    )


def predicted_peak(estimate: Any, device: torch.device) -> int:
    """What `observed_memory` should see: on a GPU whole blocks of the allocator, on a CPU the bytes
    that tensors ask for."""
    return (
        round(estimate.memory.allocated.value)
        if device.type == "cuda"
        else estimate.memory.requested
    )


def named_gpu(device: torch.device) -> str | None:
    """The catalog's name of the GPU that this runs on; None on a CPU, or for a GPU it lacks."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    try:
        find_hardware(name)
    except InputError:
        return None
    return name


def comparison_lines(
    predicted_bytes: int,
    observed: MemoryFigure,
    predicted_tokens: float | None,
    observed_tokens: float,
) -> list[str]:
    """Predicted against observed, one line each."""
    ratio = predicted_bytes / observed.num_bytes
    lines = [
        (
            f"peak memory   predicted {predicted_bytes / MIB:8.1f} MiB   observed"
            f" {observed.num_bytes / MIB:8.1f} MiB   ratio {ratio:.2f}"
        ),
        f"              observed as: {observed.source}",
    ]
    if predicted_tokens is None:
        lines.append(
            f"tokens/s      predicted        - (no GPU named)   observed {observed_tokens:8.0f}"
        )
    else:
        lines.append(
            f"tokens/s      predicted {predicted_tokens:8.0f}       observed {observed_tokens:8.0f}"
            f"   ratio {predicted_tokens / observed_tokens:.2f}"
        )
    return lines


def draw_losses(path: Path, curves: dict[str, Progress]) -> None:
    """The loss of each stage by step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(curves), figsize=(5 * len(curves), 3.5), squeeze=False, layout="constrained"
    )
    for axis, (title, progress) in zip(axes[0], curves.items(), strict=True):
        axis.plot(range(1, progress.num_steps + 1), progress.losses, linewidth=1)
        axis.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
        axis.grid(alpha=0.3)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120), force=True)
    pyplot.close(figure)
