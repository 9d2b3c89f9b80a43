"""What the training example shows at the end: the loss curve as a picture, and predicted against observed memory and speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import napkinmath
import torch
from torch import nn

from napkinmath_profiler.trace import trace
from napkinmath_profiler.train_loop import Progress

MIB = 2**20


@dataclass(frozen=True)
class MemoryFigure:
    """Peak bytes of a training step, and where the figure comes from."""

    num_bytes: int
    source: str


def observed_memory(model: nn.Module, step: Callable[[], Any], device: torch.device) -> MemoryFigure:
    """The peak of one further step: the allocator's on a GPU; on a CPU the tensors that the dispatcher sees come and go."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return MemoryFigure(torch.cuda.max_memory_allocated(device), "torch.cuda.max_memory_allocated")
    timeline = trace(model=model, step=step)
    return MemoryFigure(timeline.peak().nbytes, "storages seen by the dispatcher on the CPU, fused ops' inner buffers excepted")


def predicted_step(
    config: Any, *, batch_size: int, sequence_length: int, rank: int, dropout: float, precision: str, gpu: str | None = None
) -> Any:
    """napkinmath's estimate of the same step, with its time if a GPU is named."""
    return napkinmath.estimate(
        config.to_dict(),
        adapter=napkinmath.AdapterConfig(rank=rank, dropout=dropout),
        quantization=napkinmath.QuantizationConfig(kbit_preparation=False),
        micro_batch_size=batch_size,
        sequence_length=sequence_length,
        precision=napkinmath.Precision(precision),
        optimizer="adamw",
        loss=napkinmath.Loss.CHUNKED,
        kernels=napkinmath.Kernels.NAPKINMATH,
        hardware=gpu,
    )


def comparison_lines(predicted_bytes: int, observed: MemoryFigure, predicted_tokens: float | None, observed_tokens: float) -> list[str]:
    """Predicted against observed, one line each."""
    ratio = predicted_bytes / observed.num_bytes
    lines = [
        f"peak memory   predicted {predicted_bytes / MIB:8.1f} MiB   observed {observed.num_bytes / MIB:8.1f} MiB   ratio {ratio:.2f}",
        f"              observed as: {observed.source}",
    ]
    if predicted_tokens is None:
        lines.append(f"tokens/s      predicted        - (no GPU named)   observed {observed_tokens:8.0f}")
    else:
        lines.append(
            f"tokens/s      predicted {predicted_tokens:8.0f}       observed {observed_tokens:8.0f}   ratio {predicted_tokens / observed_tokens:.2f}"
        )
    return lines


def draw_losses(path: Path, curves: dict[str, Progress]) -> None:
    """The loss of each stage by step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 3.5), squeeze=False, layout="constrained")
    for axis, (title, progress) in zip(axes[0], curves.items(), strict=True):
        axis.plot(range(1, progress.num_steps + 1), progress.losses, linewidth=1)
        axis.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
