"""TinyLlama QLoRA at batch 1, context 1200: the steps from what was meant to what a talk of 2024 measured, as docs/tinyllama.md prints them.

python benchmarks/tinyllama.py
"""

from __future__ import annotations

from napkinmath.allocator import replay
from napkinmath.catalog.stacks import STACKS
from napkinmath.estimate import Estimate, estimate
from napkinmath.train_config import AdapterConfig, Precision, QuantizationConfig, RecomputeConfig, RecomputeKind, TrainConfig

GB = 10**9
MEASURED_ALLOCATED_GB, MEASURED_RESERVED_GB = 6.42, 7.09
QUANTIZATION = QuantizationConfig(format="fp4", double_quant=False)
BASE = TrainConfig(
    micro_batch_size=1, sequence_length=1200, precision=Precision.FP32, adapter=AdapterConfig(rank=8, targets=("q_proj", "v_proj")), quantization=QUANTIZATION,
    recompute=RecomputeConfig(kind=RecomputeKind.FULL), optimizer="sgd", clip_gradients=False, stack="hf-2024",
)  # fmt: skip


def old_bitsandbytes() -> str:
    """The stack of 2024 with a bitsandbytes up to 0.43.1, whose 4-bit products keep their input."""
    name = "hf-2024, bitsandbytes 0.43.1"
    STACKS.setdefault(name, STACKS["hf-2024"].replace(name=name, quantized_keeps_input=True))
    return name


def ladder() -> list[tuple[str, Estimate]]:
    """(what changed, estimate) from top to bottom."""
    fp32_products = BASE.replace(quantization=QUANTIZATION.replace(compute_dtype="fp32"), training_mode=False)
    rungs = (
        ("checkpointing active, libraries of mid-2024", BASE),
        ("checkpointing requested, model left in eval mode: inactive", BASE.replace(training_mode=False)),
        ("products in fp32, bitsandbytes' default", fp32_products),
        ("bitsandbytes up to 0.43.1 keeps the input of every 4-bit product", fp32_products.replace(stack=old_bitsandbytes())),
    )
    return [(label, estimate("tinyllama", config)) for label, config in rungs]


def main() -> None:
    """Prints the table, a line for each rung and one for what stays unexplained."""
    print("| step | allocated GB | change | reserved GB |\n|---|---|---|---|")
    before = 0.0
    for label, e in ladder():
        books = replay(e.timeline)
        allocated = books.peak_allocated / GB
        print(f"| {label} | {allocated:.2f} | {allocated - before:+.2f} | {books.peak_reserved / GB:.2f} |")
        before = allocated
    print(f"| unexplained | | {MEASURED_ALLOCATED_GB - before:+.2f} | |")
    print(f"| measured in the talk | {MEASURED_ALLOCATED_GB} | | {MEASURED_RESERVED_GB} |")
    print("\nAt the peak of the last step:")
    for role, nbytes in ladder()[-1][1].breakdown.items():
        print(f"- {role.value}: {nbytes / GB:.2f} GB")


if __name__ == "__main__":
    main()
