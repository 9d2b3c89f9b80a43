"""One to three layers carried over to the whole model, held against the whole model's real steps:
bytes and seconds of each phase.

    python benchmarks/accuracy/extrapolation.py [--device cuda:0|cpu] [--models llama,gemma,gpt2,...] [--rounds 3] [--json FILE] [--note TEXT]
    python benchmarks/accuracy/extrapolation.py --page FILE.json        (the same results as a page, without measuring)

`--json` writes the page beside the file, with the ending .md.
The short runs and the whole model take turns, so that a machine whose speed drifts is fair to both.
On a CPU the sizes are small and one thread computes; on a GPU the sizes are those of real models,
of as many layers as the memory takes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from napkinmath import AdapterConfig, Precision, RecomputeConfig, RecomputeKind, TrainConfig
from napkinmath.calibration.measured_layers import counts_of
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase
from napkinmath.models.families import read_config
from napkinmath_profiler.calibration.allowance import Allowance
from napkinmath_profiler.calibration.devices import Device, choose_device
from napkinmath_profiler.calibration.layer_fit import fit_seconds
from napkinmath_profiler.calibration.layer_plan import plan_layers, short_config
from napkinmath_profiler.calibration.layer_runs import (
    NUM_WARMUP_STEPS,
    LayerOptions,
    measure_layers,
    medians,
    settled,
)
from napkinmath_profiler.calibration.stamp import stamp_of
from napkinmath_profiler.measuring.garbage import quick_collections
from napkinmath_profiler.measuring.measured_loop import StepFigures
from napkinmath_profiler.measuring.runner import MeasureOptions, measure_step
from napkinmath_profiler.tracing.meta_model import config_from
from napkinmath_profiler.tracing.trace_options import options_from
from napkinmath_profiler.tracing.traced_timeline import PHASES

SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "num_hidden_layers": 12,
    },
    "gemma": {
        "model_type": "gemma3_text",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "vocab_size": 1500,
        "num_hidden_layers": 20,
        "sliding_window": 32,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 192,
        "n_head": 6,
        "n_layer": 10,
        "vocab_size": 2000,
        "n_positions": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "num_hidden_layers": 12,
    },
}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "num_hidden_layers": 22,
    },
    "gemma": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "num_hidden_layers": 26,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 24,
        "vocab_size": 50257,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_hidden_layers": 28,
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointed": {"recompute": RecomputeConfig(kind=RecomputeKind.FULL)},
    "lora": {"adapter": AdapterConfig(rank=8)},
}
NUM_STEPS = 5
SHOWN = ("forward", "backward", "optimizer step")


def run_case(
    config: dict[str, Any], train: TrainConfig, device: Device, rounds: int
) -> dict[str, Any]:
    """Bytes and seconds of the whole model's phases: carried over, and real."""
    options = options_from(train, compute_capability=(8, 0))
    parsed = config_from(config)
    plan = plan_layers(parsed, options)
    whole = tuple(range(len(plan.order)))
    priced, notes = estimate(read_config(config), train), []
    batch, length = options.micro_batch_size, options.sequence_length
    layers = measure_layers(
        dict(config),
        options,
        priced,
        device,
        Allowance(1 << 62, 600.0),
        notes,
        how=LayerOptions(share=0.9, rounds=1, num_steps=1),
        points=[(batch, length)],
    )
    if layers is None or layers.points[0].memory is None:
        return {"error": "; ".join(notes)}
    record = measure_step(
        dict(config),
        options,
        MeasureOptions(device=str(device.torch_device), num_steps=0, memory_share=0.9),
    )
    if record.failure is not None or record.result is None:
        return {"error": "the whole model ran out of memory"}
    real: dict[str, int] = {}
    for phase, moment in record.result.peak_by_phase().items():
        if PHASES[phase] is not Phase.LOAD:
            real[PHASES[phase].value] = max(
                real.get(PHASES[phase].value, 0), moment.requested_bytes
            )
    timed: dict[tuple[int, ...], list[list[StepFigures]]] = {}
    for _ in range(rounds):
        for run in (*plan.runs, whole):
            how = MeasureOptions(
                device=str(device.torch_device),
                attribute=False,
                num_steps=NUM_STEPS,
                num_warmup_steps=NUM_WARMUP_STEPS,
                memory_share=0.9,
            )
            found = measure_step(short_config(parsed, run, len(plan.order)), options, how)
            timed.setdefault(run, []).append(list(found.steps[NUM_WARMUP_STEPS:]))
    counts = counts_of(plan.order, len(set(plan.order)))
    steps = {run: medians(settled(found, device)) for run, found in timed.items()}
    fits = fit_seconds(plan, {run: steps[run] for run in plan.runs})
    seconds = fit_seconds(plan, {whole: steps[whole]})
    return {
        "layers": len(plan.order),
        "bytes": {
            phase: [layers.points[0].memory.phase_peaks(plan.order).get(phase, 0), nbytes]
            for phase, nbytes in real.items()
        },
        "seconds": {
            phase: [fit.at(counts), seconds[phase].at(counts)]
            for phase, fit in fits.items()
            if phase in seconds
        },
    }


def main() -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default=",".join(SMALL))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--note", default="", help="what else to say of the run, such as what kept the machine busy"
    )
    parser.add_argument("--page", type=Path, help="results to write as a page beside them")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(arguments.page)
        return 0
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = choose_device(arguments.device)
    if not device.is_cuda:
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(
        f"{device.name}, torch {torch.__version__}: carried over from 1-3 layers / the whole"
        " model's real step"
    )
    print(
        f"{'model':8s}{'way':14s}{'layers':>6s}{'bytes off':>12s}{'forward':>9s}{'backward':>9s}{'step':>9s}{'whole step':>12s}{'wall s':>8s}"
    )
    for model in arguments.models.split(","):
        for way in arguments.ways.split(","):
            started = time.monotonic()
            config = (LARGE if device.is_cuda else SMALL)[model]
            sizes = {"micro_batch_size": 2, "sequence_length": 1024 if device.is_cuda else 96}
            train = TrainConfig(
                precision=Precision.BF16 if device.is_cuda else Precision.FP32, **sizes, **WAYS[way]
            )
            with quick_collections():
                row = {
                    "model": model,
                    "way": way,
                    **run_case(config, train, device, arguments.rounds),
                }
            rows.append(row)
            print(_line(row, time.monotonic() - started), flush=True)
    print(_summary(rows))
    if arguments.json:
        found = {
            "stamp": stamp_of(device),
            "rounds": arguments.rounds,
            "note": arguments.note,
            "summary": _summary(rows),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        write_page(arguments.json)
    return 0


def write_page(results: Path) -> None:
    """The Markdown page of a results file, beside it."""
    results.with_suffix(".md").write_text(
        page(json.loads(results.read_text()), results.name), encoding="utf-8"
    )


def page(found: dict[str, Any], name: str) -> str:
    """Results as a page: how they were made, a row a case, the summary."""
    stamp = found["stamp"]
    device = "cpu" if stamp["device"].startswith("CPU") else "cuda:0"
    note = f" {found['note']}." if found.get("note") else ""
    lines = [
        (
            "# One to three layers carried over to the whole model, on"
            f" {'a CPU' if device == 'cpu' else stamp['device']}"
        ),
        "",
        (
            f"Made by `python benchmarks/accuracy/extrapolation.py --device {device} --rounds"
            f" {found['rounds']} --json {name}`, {stamp['date'][:10]}: {stamp['device']},"
        ),
        f"torch {stamp['torch']}, transformers {stamp['transformers']}.{note}",
        "Carried over / real, by phase; bytes: the largest difference of any phase's peak.",
        "",
        "| model | step | layers | bytes off | forward | backward | optimizer step | whole step |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(_page_row(row) for row in found["rows"]),
        "",
        _summary(found["rows"]) + ".",
    ]
    return "\n".join(lines) + "\n"


def _page_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['way']} | | {row['error']} | | | | |"
    ratios = [
        f"{carried / real:.3f}" if real else ""
        for carried, real in (row["seconds"].get(phase, (0, 0)) for phase in SHOWN)
    ]
    return (
        f"| {row['model']} | {row['way']} | {row['layers']} | {_bytes_off(row):,} |"
        f" {' | '.join(ratios)} | {_whole(row):.3f} |"
    )


def _summary(rows: list[dict[str, Any]]) -> str:
    done = [row for row in rows if "error" not in row]
    if not done:
        return "nothing was measured"
    errors = [abs(_whole(row) - 1) for row in done]
    return (
        f"whole step over {len(done)} cases: median error {statistics.median(errors):.1%}, largest"
        f" {max(errors):.1%}; cases with every byte right:"
        f" {sum(_bytes_off(row) == 0 for row in done)}"
    )


def _bytes_off(row: dict[str, Any]) -> int:
    return max(abs(carried - real) for carried, real in row["bytes"].values())


def _whole(row: dict[str, Any]) -> float:
    return sum(carried for carried, _ in row["seconds"].values()) / sum(
        real for _, real in row["seconds"].values()
    )


def _line(row: dict[str, Any], wall_s: float) -> str:
    if "error" in row:
        return f"{row['model']:8s}{row['way']:14s}{row['error']}"
    ratios = {phase: carried / real for phase, (carried, real) in row["seconds"].items() if real}
    cells = "".join(f"{ratios[phase]:9.3f}" if phase in ratios else f"{'':9s}" for phase in SHOWN)
    return f"{row['model']:8s}{row['way']:14s}{row['layers']:6d}{_bytes_off(row):12,d}{cells}{_whole(row):12.3f}{wall_s:8.1f}"


if __name__ == "__main__":
    sys.exit(main())
