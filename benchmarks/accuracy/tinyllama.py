"""TinyLlama QLoRA at batch 1, context 1200: the steps from what was meant to what a talk of 2024
measured, as docs/tinyllama.md prints them.

python benchmarks/accuracy/tinyllama.py             # from the rules alone
python benchmarks/accuracy/tinyllama.py --traced    # and today's transformers, PEFT and bitsandbytes run without storage, contexts 1000 and 1200
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("estimator", "profiler", "kernels")]

from napkinmath.catalog.stacks import STACKS  # noqa: E402
from napkinmath.config.train_config import (  # noqa: E402
    AdapterConfig,
    Attention,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Estimate, estimate  # noqa: E402
from napkinmath.memory.replay import replay  # noqa: E402

GB = 10**9
MEASURED_ALLOCATED_GB, MEASURED_RESERVED_GB = 6.42, 7.09
DROPOUT = 0.05  # of PEFT's examples of QLoRA; any rate above zero takes the same bytes
QUANTIZATION = QuantizationConfig(format="fp4", double_quant=False)
ADAPTER = AdapterConfig(rank=8, targets=("q_proj", "v_proj"))
BASE = TrainConfig(
    micro_batch_size=1,
    sequence_length=1200,
    precision=Precision.FP32,
    adapter=ADAPTER,
    quantization=QUANTIZATION,
    recompute=RecomputeConfig(kind=RecomputeKind.FULL),
    optimizer="sgd",
    clip_gradients=False,
    stack="hf-2024",
)


def old_bitsandbytes(*, logits_held: bool = False) -> str:
    """The stack of 2024 with a bitsandbytes up to 0.43.1, whose 4-bit products keep their input; in
    a loop that may hold the outputs."""
    row = STACKS["hf-2024"]
    name = f"hf-2024, bitsandbytes 0.43.1{', outputs held' * logits_held}"
    STACKS.setdefault(
        name,
        row.replace(
            name=name,
            quantizer=row.quantizer.replace(keeps_input=True),
            loss=row.loss.replace(holds_logits=logits_held),
        ),
    )
    return name


def ladder() -> list[tuple[str, Estimate]]:
    """(what changed, estimate) from top to bottom."""
    fp32_products = BASE.replace(
        quantization=QUANTIZATION.replace(compute_dtype="fp32"), training_mode=False
    )
    kept = fp32_products.replace(stack=old_bitsandbytes())
    dropped = kept.replace(adapter=ADAPTER.replace(dropout=DROPOUT))
    rungs = (
        ("checkpointing active, libraries of mid-2024", BASE),
        (
            "checkpointing requested, model left in eval mode: inactive",
            BASE.replace(training_mode=False),
        ),
        ("products in fp32, bitsandbytes' default", fp32_products),
        ("bitsandbytes up to 0.43.1 keeps the input of every 4-bit product", kept),
        ("the adapters' dropout is active in eval mode too", dropped),
        (
            "the notebook's variable keeps the outputs, so their logits, through the backward",
            dropped.replace(stack=old_bitsandbytes(logits_held=True)),
        ),
    )
    return [(label, estimate("tinyllama", config)) for label, config in rungs]


def variants() -> list[tuple[str, Estimate]]:
    """Other settings that the talk leaves open, each in place of the last rung's."""
    last = ladder()[-1][1].config
    assert last.adapter is not None and last.quantization is not None
    everywhere = last.adapter.replace(targets=("all-linear",))
    plain = last.replace(
        precision=Precision.FP16, quantization=last.quantization.replace(kbit_preparation=False)
    )
    rows = (
        (
            "adapters on all linears",
            last.replace(adapter=everywhere),
        ),
        ("eager attention", last.replace(attention=Attention.EAGER)),
        (
            "fp16 activations, no k-bit preparation, adapters on all linears",
            plain.replace(adapter=everywhere),
        ),
    )
    return [(label, estimate("tinyllama", config)) for label, config in rows]


TODAY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("eval mode, so checkpointing is inactive", {"training_mode": False}),
    ("training mode, checkpointing active", {}),
    ("training mode, no checkpointing", {"recompute": RecomputeConfig()}),
)


def today(context: int, precision: Precision, changes: dict[str, object]) -> tuple[float, float]:
    """GB allocated at the peak with the installed libraries: priced, and traced."""
    from napkinmath.catalog.models import find_row
    from napkinmath_profiler.trace import trace_options
    from napkinmath_profiler.tracing.meta_model import config_from
    from napkinmath_profiler.tracing.trace_options import options_from
    from napkinmath_profiler.tracing.traced_timeline import timeline_of

    config = BASE.replace(
        stack="hf-bare",
        precision=precision,
        sequence_length=context,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL, reentrant=True),
    )
    config = config.replace(**changes)
    row = find_row("tinyllama-1.1b")
    assert row is not None
    found = trace_options(config_from(dict(row["config"])), options_from(config), all_layers=False)
    return tuple(
        replay(timeline).peak_allocated / GB
        for timeline in (estimate("tinyllama", config).timeline, timeline_of(found))
    )  # type: ignore[return-value]


def print_today() -> None:
    """A row a way to run it; a column a context, without autocast and with it."""
    print(
        "\n| today's libraries, traced (priced) GB | 1000 | 1200 | 1000, bf16 autocast | 1200, bf16"
        " autocast |\n|---|---|---|---|---|"
    )
    for label, changes in TODAY:
        pairs = [
            today(context, precision, changes)
            for precision in (Precision.BF16, Precision.BF16_AUTOCAST)
            for context in (1000, 1200)
        ]
        print(
            f"| {label} | "
            + " | ".join(f"{traced:.2f} ({priced:.2f})" for priced, traced in pairs)
            + " |"
        )


def main() -> None:
    """Prints the table, a line for each rung and one for what stays unexplained."""
    print("| step | allocated GB | change | reserved GB |\n|---|---|---|---|")
    before = 0.0
    for label, e in ladder():
        books = replay(e.timeline)
        allocated = books.peak_allocated / GB
        print(
            f"| {label} | {allocated:.2f} | {allocated - before:+.2f} |"
            f" {books.peak_reserved / GB:.2f} |"
        )
        before = allocated
    print(f"| unexplained | | {MEASURED_ALLOCATED_GB - before:+.2f} | |")
    print(f"| measured in the talk | {MEASURED_ALLOCATED_GB} | | {MEASURED_RESERVED_GB} |")
    print("\nAt the peak of the last step:")
    for role, nbytes in ladder()[-1][1].breakdown.items():
        print(f"- {role.value}: {nbytes / GB:.2f} GB")
    print("\nIn place of the last step:")
    for label, e in variants():
        print(f"- {label}: {e.replay.peak_allocated / GB:.2f} GB")
    if "--traced" in sys.argv[1:]:
        print_today()


if __name__ == "__main__":
    main()
