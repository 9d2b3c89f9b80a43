"""A whole small fine-tuning, end to end, with this project's kernels in it.

    python -m napkinmath_profiler.train --out run

Trains a small Llama on the Python manual (or takes `--model FOLDER`), freezes it in NF4, puts LoRA
adapters on it, fine-tunes them on arithmetic, and prints predicted against observed memory and
speed. The kernels run as Triton on a GPU and as their torch reference on a CPU. Interrupted, the
same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from napkinmath.base.errors import InputError
from napkinmath_kernels.checkpoint import Recompute
from napkinmath_kernels.patching import patch, unpatch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import nn

from napkinmath_profiler.example.corpus import VOCABULARY, arithmetic_text, batches_of, manual_text
from napkinmath_profiler.example.loop import Progress, run_steps, train_step
from napkinmath_profiler.example.model import (
    ModelSize,
    add_adapters,
    base_config,
    base_model,
    can_quantize,
    load_base,
    quantize_linears,
)
from napkinmath_profiler.example.report import (
    comparison_lines,
    draw_losses,
    named_gpu,
    observed_memory,
    predicted_peak,
    predicted_step,
)
from napkinmath_profiler.measuring.device_names import device_named

SEED = 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = argparse.ArgumentParser(
        prog="python -m napkinmath_profiler.train", description=str(__doc__).split("\n")[0]
    )
    found.add_argument(
        "--out",
        type=Path,
        default=Path("train-example"),
        help="folder for checkpoints and the picture",
    )
    found.add_argument(
        "--model",
        help="folder of a pretrained model with a byte vocabulary, instead of training one",
    )
    found.add_argument("--base-steps", type=int, default=120, help="steps of the base model")
    found.add_argument("--steps", type=int, default=80, help="steps of the fine-tuning")
    found.add_argument("--bs", type=int, default=8, help="sequences a step")
    found.add_argument("--ctx", type=int, default=128, help="bytes a sequence")
    found.add_argument("--rank", type=int, default=8)
    found.add_argument("--dropout", type=float, default=0.0)
    found.add_argument("--lr", type=float, default=3e-3)
    found.add_argument("--save-every", type=int, default=40, help="steps between checkpoints")
    found.add_argument(
        "--checkpointing", choices=[how.value for how in Recompute], default=Recompute.KEEP.value
    )
    found.add_argument("--attention", choices=["napkinmath", "sdpa"], default="napkinmath")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument(
        "--gpu", help="GPU to predict speed for, by napkinmath's name of it [the one this runs on]"
    )
    return found


def show(
    console: Console, title: str, num_steps: int, work: Callable[[Callable[[float], Any]], Progress]
) -> Progress:
    """Runs `work` under a progress bar that names the latest loss."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, total=num_steps, loss="")
        return work(lambda loss: bar.update(task, advance=1, loss=f"loss {loss:.3f}"))


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def train_base(
    options: argparse.Namespace, model: nn.Module, device: torch.device, console: Console
) -> Progress:
    """The first stage: every parameter, on the manual."""
    patch(model, attention=options.attention)
    batch_of = batches_of(manual_text(), options.bs, options.ctx, seed=SEED, device=device)
    optimizer = optimizer_for(model, options.lr)
    checkpoint = options.out / "base.pt"
    run = lambda advance: run_steps(  # noqa: E731
        model,
        optimizer,
        batch_of,
        options.base_steps,
        checkpoint=checkpoint,
        save_every=options.save_every,
        advance=advance,
    )
    return show(console, "base", options.base_steps, run)


def fine_tune(
    options: argparse.Namespace, model: nn.Module, device: torch.device, console: Console
) -> tuple[Progress, nn.Module, torch.optim.Optimizer, Callable[[int], torch.Tensor]]:
    """The second stage: adapters over the frozen 4-bit base, on arithmetic."""

    unpatch(model)
    if can_quantize():
        model = quantize_linears(model, next(model.parameters()).dtype, device)
    else:
        console.print(
            "bitsandbytes is not installed: the frozen base is not quantized to NF4", soft_wrap=True
        )
    model = add_adapters(model, rank=options.rank, dropout=options.dropout, seed=SEED)
    report = patch(model, attention=options.attention, checkpoint=Recompute(options.checkpointing))
    console.print(str(report))
    batch_of = batches_of(
        arithmetic_text(seed=SEED), options.bs, options.ctx, seed=SEED + 1, device=device
    )
    optimizer = optimizer_for(model, options.lr)
    run = lambda advance: run_steps(  # noqa: E731
        model,
        optimizer,
        batch_of,
        options.steps,
        checkpoint=options.out / "adapters.pt",
        save_every=options.save_every,
        advance=advance,
    )
    return show(console, "fine-tuning", options.steps, run), model, optimizer, batch_of


def report_figures(
    options: argparse.Namespace,
    model: Any,
    step: Callable[[], Any],
    progress: Progress,
    device: torch.device,
    precision: str,
    console: Console,
) -> None:
    """Predicted against observed."""
    config = model.get_base_model().config
    estimate = predicted_step(
        config,
        batch_size=options.bs,
        sequence_length=options.ctx,
        rank=options.rank,
        dropout=options.dropout,
        precision=precision,
        gpu=options.gpu or named_gpu(device),
        checkpointing=options.checkpointing,
        quantized=can_quantize(),
    )
    tokens = progress.tokens_per_second(options.bs * options.ctx)
    observed = observed_memory(model, step, device)
    for line in comparison_lines(
        predicted_peak(estimate, device),
        observed,
        estimate.time and estimate.time.tokens_per_s,
        tokens,
    ):
        console.print(line, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the example; exit code 0, or 2 without the device asked for."""
    options = parser().parse_args(arguments)
    console = Console()
    try:
        device = device_named(options.device)
    except InputError as reason:
        print(reason, file=sys.stderr)
        return 2
    dtype, precision = (
        (torch.bfloat16, "bf16") if device.type == "cuda" else (torch.float32, "fp32")
    )
    options.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, Progress] = {}
    if options.model:
        model = load_base(options.model, dtype, device)
    else:
        model = base_model(
            base_config(ModelSize(max_positions=options.ctx), VOCABULARY), dtype, device, SEED
        )
        curves["base model, Python manual"] = train_base(options, model, device, console)
    progress, model, optimizer, batch_of = fine_tune(options, model, device, console)
    curves[f"{'NF4 + ' if can_quantize() else ''}LoRA, arithmetic"] = progress
    picture = options.out / "losses.png"
    draw_losses(picture, curves)
    console.print(
        f"loss {progress.losses[0]:.3f} -> {progress.losses[-1]:.3f} in {progress.num_steps} steps;"
        f" curve in {picture}",
        soft_wrap=True,
    )
    report_figures(
        options,
        model,
        lambda: train_step(model, optimizer, batch_of(options.steps)),
        progress,
        device,
        precision,
        console,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
