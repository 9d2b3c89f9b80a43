"""Analytic against traced: the same step priced by the rules and run by the real libraries on meta
tensors, side by side.

    python benchmarks/accuracy/analytic_vs_traced.py CONFIG [--method qlora] [--checkpointing full] [--attention eager] [--diff]

CONFIG is JSON text, a config.json or a catalogued name. `--diff` aligns the two sequences of
allocations of every phase of the steady step and prints where they differ: the rule that is wrong,
or the library that changed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import pathlib
import warnings
from dataclasses import dataclass, field
from typing import Any

from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Batch,
    Kernels,
    Loss,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.ledger import Phase
from napkinmath.ir.timeline import Timeline
from napkinmath.lowering.build import build_step
from napkinmath.lowering.patching import settle_patch
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import trace_config
from napkinmath_profiler.tracing.meta_model import AdapterOptions, QuantizationOptions, TrainMethod
from napkinmath_profiler.tracing.storage_events import TracePhase
from napkinmath_profiler.tracing.trace_options import PRECISIONS
from napkinmath_profiler.tracing.trace_result import TraceResult
from napkinmath_profiler.tracing.training_step import LoopOptions

PHASES = {
    TracePhase.FORWARD: Phase.FORWARD,
    TracePhase.LOSS: Phase.FORWARD,
    TracePhase.BACKWARD: Phase.BACKWARD,
    TracePhase.RECOMPUTE: Phase.BACKWARD,
    TracePhase.CLIP: Phase.CLIP,
    TracePhase.OPTIMIZER: Phase.STEP,
    TracePhase.ZERO_GRAD: Phase.STEP,
}
SDPA_KERNELS = {
    "auto": Attention.FLASH,
    "sdpa": Attention.FLASH,
    "sdpa_flash": Attention.FLASH,
    "sdpa_efficient": Attention.EFFICIENT,
    "math": Attention.MATH,
    "sdpa_cudnn": Attention.CUDNN,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    config: dict[str, object]
    method: str = "full"
    checkpointing: bool = False
    reentrant: bool = False
    attention: str = "sdpa_flash"
    loss: str = "hf"
    kernels: str = "hf"
    kernel_parts: tuple[str, ...] = ()
    batch: int = 2
    sequence: int = 128
    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    dropout: float = 0.0
    optimizer: str = "adamw-foreach"
    adapter_dtype: str = "auto"
    double_quant: bool = True
    kbit: bool = True
    experts: bool = False
    precision: str = "bf16"
    all_layers: bool = True
    mlp_tiles: int = 0
    media: Batch = field(default_factory=Batch)

    def train_config(self) -> TrainConfig:
        """The case as the analytic path takes it."""
        lora = (
            AdapterConfig(
                rank=self.rank,
                targets=self.targets,
                dropout=self.dropout,
                dtype=self.adapter_dtype,
            )
            if self.method != "full"
            else None
        )
        quantization = (
            QuantizationConfig(
                double_quant=self.double_quant, experts=self.experts, kbit_preparation=self.kbit
            )
            if self.method == "qlora"
            else None
        )
        return TrainConfig(
            micro_batch_size=self.batch,
            sequence_length=self.sequence,
            precision=Precision(self.precision),
            adapter=lora,
            quantization=quantization,
            recompute=RecomputeConfig(
                kind=RecomputeKind.FULL if self.checkpointing else RecomputeKind.NONE,
                reentrant=self.reentrant,
            ),
            optimizer=self.optimizer,
            attention=Attention.EAGER if self.attention == "eager" else Attention.SDPA,
            clip_gradients=False,
            loss=Loss(self.loss),
            kernels=Kernels(self.kernels),
            kernel_parts=self.kernel_parts,
            batch=self.media,
            mlp_tiles=self.mlp_tiles,
        )

    def analytic(self) -> Timeline:
        """The analytic timeline of two steps."""
        spec, config, patch = read_config(self.config), self.train_config(), None
        if config.kernels is not Kernels.HF:
            patch, config = settle_patch(spec, config)
        policy = Policy(
            config,
            STACKS["hf-bare"],
            sdpa_choice=SDPA_KERNELS.get(self.attention, Attention.FLASH),
            patch=patch,
        )
        return simulate(build_step(spec, policy), steps=2)

    def traced(self) -> TraceResult:
        """The traced result of two steps."""
        dtype, autocast = PRECISIONS[Precision(self.precision)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trace_config(
                self.config,
                all_layers=self.all_layers,
                method=TrainMethod(self.method),
                micro_batch_size=self.batch,
                sequence_length=self.sequence,
                dtype=dtype,
                loop=LoopOptions(autocast_dtype=autocast),
                checkpointing=self.checkpointing,
                use_reentrant=self.reentrant,
                **_traced_attention(self.attention),
                optimizer=TRACED_OPTIMIZERS[self.optimizer],
                loss=Loss(self.loss),
                kernels=Kernels(self.kernels),
                kernel_parts=self.kernel_parts,
                media=self.media,
                mlp_tiles=self.mlp_tiles,
                adapters=AdapterOptions(
                    rank=self.rank, dropout=self.dropout, targets=_traced_targets(self.targets)
                ),
                quantization=QuantizationOptions(
                    double_quant=self.double_quant,
                    experts=self.experts,
                    kbit_preparation=self.kbit,
                    compute_dtype=self._product_type(),
                ),
            )

    def _product_type(self) -> str:
        """The type of products with packed weights, as the analytic path settles it: of autocast
        where there is one, not of the weights."""
        return Policy(self.train_config(), STACKS["hf-bare"]).product_dtype.name


TRACED_OPTIMIZERS = {
    name: name
    for name in (
        "adamw-foreach",
        "adamw-fused",
        "adamw",
        "sgd",
        "momentum",
        "adamw-8bit",
        "adamw-bnb",
        "lion-8bit",
        "lion-bnb",
        "paged-adamw-8bit",
        "adagrad",
        "rmsprop",
    )
}


def _traced_targets(targets: tuple[str, ...]) -> str | tuple[str, ...]:
    return targets[0] if targets == ("all-linear",) else targets


def _traced_attention(name: str) -> dict[str, Any]:
    from napkinmath_profiler.tracing.cuda_choices import AttentionBackend

    if name in ("auto", "eager"):
        return {"attention": None if name == "auto" else "eager"}
    return {
        "attention": "sdpa",
        "attention_backend": (
            AttentionBackend.AUTO
            if name == "sdpa"
            else AttentionBackend(name.removeprefix("sdpa_"))
        ),
    }


def phase_peaks(timeline: Timeline) -> dict[Phase, int]:
    """Analytic peak of each phase over both steps."""
    return {phase: point.nbytes for phase, point in timeline.phase_peaks().items()}


def traced_phase_peaks(result: TraceResult) -> dict[Phase, int]:
    """Traced peak of each phase over both steps, in the analytic path's phases."""
    peaks: dict[Phase, int] = {}
    for step in (0, 1):
        for phase, moment in result.peak_by_phase(step).items():
            ours = PHASES.get(phase)
            if ours is not None:
                peaks[ours] = max(peaks.get(ours, 0), moment.requested_bytes)
    return peaks


def allocations(timeline: Timeline, phase: Phase) -> list[tuple[int, str]]:
    """(requested bytes, label) of each allocation of a phase in the last step."""
    seen = [f"{s.name}" for s in timeline.segments]
    start = len(seen) // 2
    found: list[tuple[int, str]] = []
    for segment in timeline.segments[start:]:
        if segment.phase is phase:
            for _ in range(segment.repeat):
                for action, index in segment.events:
                    if action == "+":
                        tensor = timeline.tensors[index]
                        found.append(
                            (
                                tensor.requested,
                                f"{tensor.module}: {tensor.name} ({tensor.role.value})",
                            )
                        )
    return found


def traced_allocations(result: TraceResult, phase: Phase, step: int = 1) -> list[tuple[int, str]]:
    """The same from a trace."""
    return [
        (
            r.rounded_bytes,
            f"{r.module}: {r.op} {r.shape} {r.dtype} ({r.role.value if r.role else '?'})",
        )
        for r in result.records
        if r.step == step and PHASES.get(r.phase) is phase and r.rounded_bytes
    ]


def print_difference(
    ours: list[tuple[int, str]], theirs: list[tuple[int, str]], limit: int = 40
) -> None:
    """Where two sequences of allocations differ, by size."""
    matcher = difflib.SequenceMatcher(
        None, [size for size, _ in ours], [size for size, _ in theirs], autojunk=False
    )
    shown = 0
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        for size, label in ours[i1:i2]:
            print(f"    - analytic only {size:>14,}  {label}")
        for size, label in theirs[j1:j2]:
            print(f"    + traced only   {size:>14,}  {label}")
        shown += 1
        if shown >= limit:
            print("    ...")
            return


def main() -> None:
    """Prints the phase peaks of both, and with --diff the differing allocations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--method", default="full", choices=["full", "lora", "qlora"])
    parser.add_argument("--checkpointing", default="none", choices=["none", "full"])
    parser.add_argument("--reentrant", action="store_true")
    parser.add_argument("--attention", default="sdpa_flash", choices=["eager", *SDPA_KERNELS])
    parser.add_argument("--bs", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--optimizer", default="adamw-foreach", choices=list(TRACED_OPTIMIZERS))
    parser.add_argument("--precision", default="bf16", choices=[p.value for p in PRECISIONS])
    parser.add_argument("--loss", default="hf", choices=[loss.value for loss in Loss])
    parser.add_argument("--kernels", default="hf", choices=[kernels.value for kernels in Kernels])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--images", type=int, default=0, help="in each sequence")
    parser.add_argument("--image", default="", metavar="WIDTHxHEIGHT")
    parser.add_argument("--diff", action="store_true")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    if arguments.layers:
        config["num_hidden_layers"] = arguments.layers
    case = Case(
        config=config,
        method=arguments.method,
        checkpointing=arguments.checkpointing == "full",
        reentrant=arguments.reentrant,
        attention=arguments.attention,
        batch=arguments.bs,
        sequence=arguments.ctx,
        dropout=arguments.dropout,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        loss=arguments.loss,
        kernels=arguments.kernels,
        media=Batch(
            images=arguments.images,
            image_size=tuple(int(side) for side in arguments.image.split("x") if side),
        ),
    )
    timeline, result = case.analytic(), case.traced()
    ours, theirs = phase_peaks(timeline), traced_phase_peaks(result)
    for phase in theirs:
        a, b = ours.get(phase, 0), theirs[phase]
        print(f"{phase.value:20} analytic {a:>16,}  traced {b:>16,}  {(a / b - 1) * 100:+.3f}%")
    print(
        f"{'end':20} analytic {timeline.end_bytes():>16,}  traced"
        f" {sum(result.persistent_bytes().values()):>16,}"
    )
    if arguments.diff:
        for phase in theirs:
            print(phase.value)
            print_difference(allocations(timeline, phase), traced_allocations(result, phase))


def load_config(text: str) -> dict[str, object]:
    """A config from JSON text, a file, or the catalog."""
    if text.lstrip().startswith("{"):
        return json.loads(text)
    path = pathlib.Path(text)
    if path.exists():
        return json.loads((path / "config.json" if path.is_dir() else path).read_text())
    return next(
        dict(row["config"]) for row in catalogue() if text in (row["name"], *row.get("aliases", ()))
    )


def catalogue() -> list[dict[str, Any]]:
    """The rows of the catalogue of models."""
    rows = json.loads(
        (pathlib.Path(__file__).parents[2] / "estimator/napkinmath/catalog/models.json").read_text()
    )
    return list(rows["models"] if isinstance(rows, dict) else rows)


if __name__ == "__main__":
    main()
