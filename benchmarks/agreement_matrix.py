"""How well the rules agree with the traced step, family by family: |difference| of the peak over method x checkpointing x attention.

    python benchmarks/agreement_matrix.py [FAMILY ...] [--cells] [--csv FILE]

Families are those of tests/agreement/tiny_configs.py. A cell that the library itself refuses (SDPA where a model has only eager
attention) is counted as refused. `--cells` prints every cell with the peak of each phase.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from agreement.tiny_configs import TINY
from analytic_vs_traced import Case, phase_peaks, traced_phase_peaks
from napkinmath.ledger import Phase

METHODS = ("full", "lora", "qlora")
ATTENTIONS = ("sdpa", "eager")
# bitsandbytes runs a fused product up to 1,536 tokens on some GPUs and shapes; above, it always unpacks the weight (backends/cuda/ops.py).
SEQUENCE = {"full": 128, "lora": 128, "qlora": 896}
LIBRARY_REFUSES = "does not support an attention implementation"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison: requested bytes of the highest phase and of each phase, by the rules and traced."""

    family: str
    method: str
    checkpointing: bool
    attention: str
    analytic: dict[Phase, int]
    traced: dict[Phase, int]

    @property
    def difference(self) -> float:
        """Relative difference of the peak over all phases."""
        return max(self.analytic.values()) / max(self.traced.values()) - 1

    @property
    def name(self) -> str:
        """'llama lora checkpointed eager'."""
        return " ".join((self.family, self.method, *(("checkpointed",) if self.checkpointing else ()), self.attention))


def compare(family: str, case: Case) -> Cell:
    """Runs both sides of one case."""
    analytic, traced = phase_peaks(case.analytic()), traced_phase_peaks(case.traced())
    return Cell(
        family=family, method=case.method, checkpointing=case.checkpointing, attention=case.attention, analytic=analytic, traced=traced
    )


def cells_of(family: str, config: dict[str, object]) -> Iterator[Cell]:
    """Every cell of a family that the library can run."""
    for method, checkpointing, attention in itertools.product(METHODS, (False, True), ATTENTIONS):
        case = Case(
            config=config,
            method=method,
            checkpointing=checkpointing,
            attention=attention,
            sequence=SEQUENCE[method],
            optimizer="adamw-fused",
        )
        try:
            yield compare(family, case)
        except ValueError as error:
            if LIBRARY_REFUSES not in str(error):
                raise


def print_cell(cell: Cell) -> None:
    """One line a cell: the peak's difference, then each phase's."""
    phases = "  ".join(f"{phase.value} {cell.analytic.get(phase, 0) / traced - 1:+.3%}" for phase, traced in cell.traced.items())
    print(f"{cell.name:48} {cell.difference:+.3%}   {phases}")


def main() -> None:
    """Prints the table by family and its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names of tests/agreement/tiny_configs.py (default: all)")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    parser.add_argument("--csv", type=Path, help="write every cell to this file")
    options = parser.parse_args()
    everything: list[Cell] = []
    print(f"{'family':24} {'cells':>5} {'median':>9} {'max':>9}  worst cell")
    for family in options.families or TINY:
        cells = list(cells_of(family, TINY[family]))
        everything += cells
        if options.cells:
            for cell in cells:
                print_cell(cell)
        worst = max(cells, key=lambda cell: abs(cell.difference))
        differences = [abs(cell.difference) for cell in cells]
        print(
            f"{family:24} {len(cells):5} {statistics.median(differences):9.4%} {max(differences):9.4%}  {worst.name.removeprefix(family).strip()}",
            flush=True,
        )
    differences = [abs(cell.difference) for cell in everything]
    print(f"{'all':24} {len(everything):5} {statistics.median(differences):9.4%} {max(differences):9.4%}")
    if options.csv:
        write_csv(everything, options.csv)


def write_csv(cells: list[Cell], path: Path) -> None:
    """One row a cell and phase."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["family", "method", "checkpointing", "attention", "phase", "analytic_bytes", "traced_bytes"])
        for cell in cells:
            for phase, traced in cell.traced.items():
                row = [cell.family, cell.method, cell.checkpointing, cell.attention, phase.value, cell.analytic.get(phase, 0), traced]
                writer.writerow(row)


if __name__ == "__main__":
    main()
