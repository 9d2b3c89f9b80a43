"""How well the rules agree with the traced step, family by family: |difference| of the peak over
method x checkpointing x attention x loss.

    python benchmarks/accuracy/agreement_matrix.py [FAMILY ...] [--real] [--cells] [--csv FILE]

Families are those of tests/agreement/tiny_configs.py; with `--real` the smallest catalogued model
of each model type at its own size, batch 1 x 2048 (4-bit: at least 1,537 tokens). A cell that the
library itself refuses (SDPA where a model has only eager attention) is left out. `--cells` prints
every cell with the peak of each phase. Components: of those that are 1% of the peak or more, the
median |difference| by role.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from agreement.tiny_configs import TINY
from analytic_vs_traced import Case, catalogue, phase_peaks, traced_phase_peaks
from napkinmath.ir.ledger import Phase
from napkinmath_profiler.measuring.comparison import compare as compare_timelines
from napkinmath_profiler.tracing.traced_timeline import timeline_of

METHODS = ("full", "lora", "qlora")
ATTENTIONS = ("sdpa", "eager")
LOSSES = ("hf", "chunked")
# bitsandbytes runs a fused product up to FUSED_TOKENS on some GPUs and shapes; above, it always
# unpacks the weight (backends/cuda/ops.py).
SEQUENCE = {"full": 128, "lora": 128, "qlora": 896}
FUSED_TOKENS = 1536
REAL_SEQUENCE = 2048
# Models that predict no next token have no chunked head (TRL's is of causal language models).
NOT_CAUSAL = (
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "deberta-v2",
    "modernbert",
    "vit",
    "t5",
    "mt5",
    "bart",
)
LIBRARY_REFUSES = (
    "does not support an attention implementation",
    "has no attribute",
    "all-linear",
    "Target module",
    "not supported",
)
SMALLEST_COMPONENT = 0.01  # share of the peak


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison: requested bytes of the highest phase and of each phase, and of each role at
    the peak, by the rules and traced."""

    family: str
    method: str
    checkpointing: bool
    attention: str
    loss: str = "hf"
    analytic: dict[Phase, int]
    traced: dict[Phase, int]
    roles: dict[str, tuple[int, int]]

    @property
    def difference(self) -> float:
        """Relative difference of the peak over all phases."""
        return max(self.analytic.values()) / max(self.traced.values()) - 1

    @property
    def components(self) -> dict[str, float]:
        """|difference| of each role that is a hundredth of the peak or more."""
        least = SMALLEST_COMPONENT * max(self.traced.values())
        return {
            name: abs(ours / theirs - 1) if theirs else 1.0
            for name, (ours, theirs) in self.roles.items()
            if max(ours, theirs) >= least
        }

    @property
    def name(self) -> str:
        """'llama lora checkpointed eager chunked'."""
        words = (
            self.family,
            self.method,
            *(("checkpointed",) if self.checkpointing else ()),
            self.attention,
        )
        return " ".join((*words, *(() if self.loss == "hf" else (self.loss,))))


def compare(family: str, case: Case) -> Cell:
    """Runs both sides of one case."""
    timeline, result = case.analytic(), case.traced()
    both = compare_timelines({"analytic": timeline, "traced": timeline_of(result)})
    return Cell(
        family=family,
        method=case.method,
        checkpointing=case.checkpointing,
        attention=case.attention,
        loss=case.loss,
        analytic=phase_peaks(timeline),
        traced=traced_phase_peaks(result),
        roles={name: (sizes[0], sizes[1]) for name, sizes in both.by_role.items()},
    )


def cells_of(family: str, config: dict[str, object], *, real: bool) -> Iterator[Cell]:
    """Every cell of a family that the library can run; what cannot be traced is said on standard
    error."""
    for method, checkpointing, attention, loss in itertools.product(
        METHODS, (False, True), ATTENTIONS, LOSSES
    ):
        case = Case(
            config=config,
            method=method,
            checkpointing=checkpointing,
            attention=attention,
            loss=loss,
            batch=real_batch(config, method) if real else 2,
            sequence=longest(config) if real else SEQUENCE[method],
            optimizer="adamw-fused",
            all_layers=not real,
        )
        if loss == "chunked" and config.get("model_type") in NOT_CAUSAL:
            continue
        try:
            yield compare(family, case)
        except Exception as error:  # whatever a library raises: the cell is left out, and said
            if any(words in str(error) for words in LIBRARY_REFUSES):
                continue
            if not real:
                raise
            print(
                f"  {family} {method} {attention} {loss}: {type(error).__name__}:"
                f" {str(error).splitlines()[0][:120]}",
                file=sys.stderr,
            )


def longest(config: dict[str, object]) -> int:
    """2,048 tokens, or as many as a model with learned positions has."""
    limits = [
        config[name]
        for name in ("max_position_embeddings", "n_positions")
        if isinstance(config.get(name), int)
    ]
    return min(
        [REAL_SEQUENCE, *(limit for limit in limits if isinstance(limit, int) and limit > 0)]
    )


def real_batch(config: dict[str, Any], method: str) -> int:
    """One sequence; with 4-bit weights as many short ones as pass the tokens up to which
    bitsandbytes may run its fused product."""
    if method != "qlora":
        return 1
    patches: Any = config.get("image_size"), config.get("patch_size")
    tokens = longest(config)
    if all(isinstance(size, int) for size in patches):
        tokens = (int(patches[0]) // int(patches[1])) ** 2
    return FUSED_TOKENS // tokens + 1


def smallest_models() -> dict[str, dict[str, object]]:
    """The smallest catalogued model of each model type that the installed transformers builds with
    a head, by its row's name."""
    rows = [
        row
        for row in catalogue()
        if row["class"]
        and row["class"].endswith(
            ("LMHeadModel", "ForMaskedLM", "ForCausalLM", "Generation", "Classification")
        )
    ]
    rows.sort(key=lambda row: row["parameters"])
    chosen: dict[str, Any] = {}
    for row in rows:
        chosen.setdefault(row["config"]["model_type"], row)
    return {row["name"]: dict(row["config"]) for row in chosen.values()}


def print_cell(cell: Cell) -> None:
    """One line a cell: the peak's difference, then each phase's."""
    phases = "  ".join(
        f"{phase.value} {cell.analytic.get(phase, 0) / traced - 1:+.3%}"
        for phase, traced in cell.traced.items()
    )
    print(f"{cell.name:48} {cell.difference:+.3%}   {phases}")


def main() -> None:
    """Prints the table by family and its summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families",
        nargs="*",
        help=(
            "names of tests/agreement/tiny_configs.py, or with --real of the catalogue (default:"
            " all)"
        ),
    )
    parser.add_argument("--real", action="store_true", help="catalogued models at their own size")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    parser.add_argument("--csv", type=Path, help="write every cell to this file")
    options = parser.parse_args()
    configs = smallest_models() if options.real else TINY
    everything: list[Cell] = []
    if options.csv:
        start_csv(options.csv)
    print(f"{'family':24} {'cells':>5} {'median':>9} {'max':>9} {'components':>10}  worst cell")
    for family in options.families or configs:
        cells = list(cells_of(family, configs[family], real=options.real))
        everything += cells
        if options.csv:
            append_csv(cells, options.csv)
        if options.cells:
            for cell in cells:
                print_cell(cell)
        if cells:
            worst = max(cells, key=lambda cell: abs(cell.difference))
            print(
                f"{family:24} {summary(cells)}  {worst.name.removeprefix(family).strip()}",
                flush=True,
            )
    if everything:
        print(f"{'all':24} {summary(everything)}")


def summary(cells: list[Cell]) -> str:
    """Cells, median and largest |difference| of the peak, median |difference| of components."""
    differences = [abs(cell.difference) for cell in cells]
    components = [value for cell in cells for value in cell.components.values()]
    return (
        f"{len(cells):5} {statistics.median(differences):9.4%} {max(differences):9.4%}"
        f" {statistics.median(components):10.4%}"
    )


def start_csv(path: Path) -> None:
    """An empty table; cells are appended family by family, so that a run that is cut off keeps what
    it found."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(
            [
                "family",
                "method",
                "checkpointing",
                "attention",
                "loss",
                "phase",
                "analytic_bytes",
                "traced_bytes",
            ]
        )


def append_csv(cells: list[Cell], path: Path) -> None:
    """One row a cell and phase."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for cell in cells:
            knobs = [cell.family, cell.method, cell.checkpointing, cell.attention, cell.loss]
            for phase, traced in cell.traced.items():
                writer.writerow([*knobs, phase.value, cell.analytic.get(phase, 0), traced])


if __name__ == "__main__":
    main()
