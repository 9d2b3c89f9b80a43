"""``python -m napkinmath_profiler.cli.oracle``: a traced step printed for people who write and
check rules."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from napkinmath.base.json_input import loads
from napkinmath.base.units import MIB

from napkinmath_profiler.trace import TraceOptions, trace_config
from napkinmath_profiler.tracing.attention_choice import AttentionBackend
from napkinmath_profiler.tracing.meta_model import (
    DTYPES,
    AdapterOptions,
    QuantizationOptions,
    TrainMethod,
)
from napkinmath_profiler.tracing.optimizer_choices import OPTIMIZERS
from napkinmath_profiler.tracing.storage_events import StorageRecord
from napkinmath_profiler.tracing.trace_result import PeakMoment, TraceResult
from napkinmath_profiler.tracing.training_step import LoopOptions

ATTENTION = {
    "auto": (None, AttentionBackend.AUTO),
    "eager": ("eager", AttentionBackend.AUTO),
    "sdpa": ("sdpa", AttentionBackend.AUTO),
    "sdpa_flash": ("sdpa", AttentionBackend.FLASH),
    "sdpa_efficient": ("sdpa", AttentionBackend.EFFICIENT),
    "sdpa_cudnn": ("sdpa", AttentionBackend.CUDNN),
    "math": ("sdpa", AttentionBackend.MATH),
}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(
        prog="python -m napkinmath_profiler.cli.oracle", description=__doc__
    )
    p.add_argument("--config", required=True, help="a config.json, or the JSON itself")
    p.add_argument("--method", choices=[m.value for m in TrainMethod], default="full")
    p.add_argument("--bs", type=int, default=1)
    p.add_argument("--ctx", type=int, default=2048)
    p.add_argument("--layers", type=int, help="override num_hidden_layers")
    p.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    p.add_argument("--checkpointing", choices=["none", "full"], default="none")
    p.add_argument("--reentrant", action="store_true")
    p.add_argument("--attention", choices=sorted(ATTENTION), default="auto")
    p.add_argument(
        "--capability", default="8.0", help="compute capability of the GPU whose choices are made"
    )
    p.add_argument(
        "--no-workspaces", action="store_true", help="leave out the buffers inside CUDA kernels"
    )
    p.add_argument(
        "--use-cache", action="store_true", help="leave the key/value cache on, as bare loops do"
    )
    p.add_argument("--mask", action="store_true", help="pass an attention mask of ones")
    p.add_argument("--optimizer", choices=[*OPTIMIZERS, "none"], default="adamw-foreach")
    p.add_argument("--steps", type=int, default=2)
    p.add_argument("--grad-accum", type=int, default=1)
    p.add_argument("--clip", type=float)
    p.add_argument(
        "--keep-outputs", action="store_true", help="the logits outlive the forward (bare loops)"
    )
    p.add_argument("--autocast", choices=["none", "bf16", "fp16"], default="none")
    p.add_argument(
        "--trainer",
        action="store_true",
        help="with --autocast: outputs converted to float32, as accelerate does",
    )
    p.add_argument("--eval", action="store_true")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--targets", default="all-linear")
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--adapter-dtype", choices=["bf16", "fp16", "fp32"])
    p.add_argument("--dora", action="store_true")
    p.add_argument("--quant", choices=["nf4", "fp4"], default="nf4")
    p.add_argument("--no-double-quant", action="store_true")
    p.add_argument("--no-kbit", action="store_true")
    p.add_argument("--dump", action="store_true", help="list every birth and death of one layer")
    p.add_argument("--dump-layer", default="1", help="which layer number; 'all' for everything")
    p.add_argument("--top", type=int, default=30, help="rows of the peak's list")
    return p


def options_from(args: argparse.Namespace) -> dict[str, Any]:
    """``TraceOptions`` fields out of the parsed flags."""
    attention, backend = ATTENTION[args.attention]
    targets = args.targets if args.targets == "all-linear" else tuple(args.targets.split(","))
    return {
        "method": TrainMethod(args.method),
        "micro_batch_size": args.bs,
        "sequence_length": args.ctx,
        "dtype": args.dtype,
        "checkpointing": args.checkpointing == "full",
        "use_reentrant": args.reentrant,
        "attention": attention,
        "attention_backend": backend,
        "attention_mask": args.mask,
        "use_cache": args.use_cache,
        "compute_capability": tuple(int(part) for part in args.capability.split(".")),
        "kernel_workspaces": not args.no_workspaces,
        "optimizer": None if args.optimizer == "none" else args.optimizer,
        "training": not args.eval,
        "adapters": AdapterOptions(
            rank=args.rank,
            targets=targets,
            dropout=args.dropout,
            adapter_dtype=args.adapter_dtype,
            use_dora=args.dora,
        ),
        "quantization": QuantizationOptions(
            quant_type=args.quant,
            double_quant=not args.no_double_quant,
            kbit_preparation=not args.no_kbit,
        ),
        "loop": LoopOptions(
            num_steps=args.steps,
            gradient_accumulation_steps=args.grad_accum,
            max_grad_norm=args.clip,
            keep_outputs=args.keep_outputs,
            autocast_dtype=DTYPES.get(args.autocast),
            convert_outputs_to_fp32=args.trainer,
        ),
    }


def summary_lines(result: TraceResult, top: int) -> list[str]:
    """Peaks, saved and persistent bytes, and what was alive at the peak."""
    peak = result.peak
    lines = [
        (
            f"ops {result.num_ops}  events {len(result.events)}  {result.seconds:.2f} s  versions"
            f" {result.versions}"
        ),
        f"cuda choices applied {result.choices}  attention {result.attention}",
        f"PEAK {peak.requested_bytes} B = {peak.requested_bytes / MIB:.3f} MiB  {_moment(peak)}",
    ]
    for step in sorted({e.step for e in result.events}):
        for phase, moment in result.peak_by_phase(step).items():
            lines.append(
                f"  step {step} {phase.value:10} {moment.requested_bytes:>16} B  {moment.module} "
                f" {moment.op}"
            )
    lines.append(
        f"SAVED at end of forward (step 0): {result.saved_bytes} B ="
        f" {result.saved_bytes / MIB:.3f} MiB"
    )
    lines += [
        f"PERSISTENT {role.value:24} {size:>16} B"
        for role, size in result.persistent_bytes().items()
    ]
    lines.append(
        "AT THE PEAK by role: "
        + "  ".join(f"{r.value} {b}" for r, b in result.bytes_by_role(peak.event_index).items())
    )
    for (role, where, op, shape, dtype, phase), count, size in result.grouped_at(peak.event_index)[
        :top
    ]:
        lines.append(
            f"  {size:>14} B  {count:>4} x {role:20} {where:50} {op:40} {list(shape)} {dtype}"
            f" {phase}"
        )
    return lines


def _moment(peak: PeakMoment) -> str:
    return f"step {peak.step} {peak.phase.value}  {peak.module}  {peak.op}"


def _line(record: StorageRecord, is_birth: bool) -> str:
    if not is_birth:
        index = f"{record.died:>7} - #{record.storage_id:<6} {record.rounded_bytes:>12}"
        return f"{index} {'':42} ({record.op} of {record.phase.value} {record.module})"
    fate = "kept"
    if record.died_phase is not None:
        fate = (
            f"freed at {record.died} in {record.died_phase.value} {record.died_module}"
            f" {record.died_op}"
        )
    index = f"{record.born:>7} + #{record.storage_id:<6} {record.rounded_bytes:>12}"
    what = f"{list(record.shape)!s:22} {record.dtype:9} {record.phase.value:9}"
    role = record.role.value if record.role else "?"
    return f"{index} {what} {record.module or '(root)':46} {record.op:46} [{role}] {fate}"


def dump_lines(result: TraceResult, layer: str, step: int = 0) -> list[str]:
    """Births and deaths of one layer's storages in order, with the layer's modules named by number
    ``layer``."""
    lines: list[str] = []
    for event in result.events:
        record = result.records[event.storage_id]
        inside = (
            layer == "all"
            or f".{layer}." in f".{record.module}."
            or f".{layer}." in f".{event.module}."
        )
        if event.step == step and inside:
            lines.append(_line(record, event.is_allocation))
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Trace and print."""
    args = parser().parse_args(arguments)
    source: Any = (
        loads(args.config)
        if args.config.lstrip().startswith("{")
        else loads(_config_path(args.config).read_text())
    )
    result = trace_config(source, num_layers=args.layers, **options_from(args))
    print("\n".join(summary_lines(result, args.top)))
    if args.dump:
        print("\n".join(dump_lines(result, args.dump_layer)))


def _config_path(text: str) -> Path:
    path = Path(text)
    return path / "config.json" if path.is_dir() else path


__all__ = ["TraceOptions", "dump_lines", "main", "summary_lines"]

if __name__ == "__main__":
    main()
