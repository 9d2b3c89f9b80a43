"""How far the estimate and the trace are off recorded training steps: the work of
benchmarks/campaign/report.py."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB, MIB
from napkinmath.base.whole_file import write_whole
from napkinmath.calibration.calibration import read_calibration
from napkinmath.config.hardware import Hardware
from napkinmath.timing.efficiency import Efficiency

from campaign_parts.foreign_ops import OPS, op_lines, write_calibration
from campaign_parts.foreign_rows import is_foreign, translated
from campaign_parts.histories import History, Replayed, read_histories, replayed
from campaign_parts.kernel_goals import kernel_lines
from campaign_parts.ledger import Row, Rows, read_rows
from campaign_parts.stage_states import stage_lines


@dataclass(frozen=True, slots=True)
class Facts:
    """What a folder of results was made on: the GPU of the catalog, and the calibration measured
    there."""

    device: str
    hardware: Hardware | None
    calibration: str | None
    environment: dict[str, Any]

    @staticmethod
    def of(folder: Path) -> Facts:
        """Read from a folder's environment.json and calibration.json."""
        from napkinmath.catalog.gpus import find_hardware

        path = folder / "environment.json"
        environment: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        device = str(environment.get("gpu", environment.get("device", "unknown")))
        try:
            hardware = find_hardware(device)
        except InputError:
            hardware = None
        calibration = folder / "calibration.json"
        if not calibration.exists() and hardware is not None and (folder / OPS).exists():
            write_calibration(folder, hardware.gpu)
        return Facts(
            device, hardware, str(calibration) if calibration.exists() else None, environment
        )

    @property
    def speed(self) -> Efficiency | None:
        """The calibration's rates."""
        if self.hardware is None or self.calibration is None:
            return None
        return read_calibration(self.calibration, self.hardware.gpu, allow_stale=True).efficiency(
            self.hardware.gpu
        )


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing predicted by one side: its name, how to read it off a measured and a predicted row,
    and what is wanted of it."""

    name: str
    side: str
    measured: Callable[[Row], float | None]
    predicted: Callable[[Row], float | None]
    wanted: str


def _bytes(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get("memory", {}).get(name) or None


def _of(side: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get(side) or {}).get(name)


def _seconds(row: Row) -> float | None:
    return row.get("step", {}).get("median_s")


QUANTITIES = (
    Quantity(
        "allocated",
        "traced",
        _bytes("allocated"),
        _of("traced", "allocated"),
        "every case within 1%",
    ),
    Quantity(
        "reserved", "traced", _bytes("reserved"), _of("traced", "reserved"), "every case within 3%"
    ),
    Quantity(
        "allocated",
        "analytic",
        _bytes("allocated"),
        _of("analytic", "allocated"),
        "3% median, 6% at most",
    ),
    Quantity("reserved", "analytic", _bytes("reserved"), _of("analytic", "reserved"), ""),
    Quantity(
        "step time",
        "analytic",
        _seconds,
        _of("analytic", "step_s"),
        "15% median without a calibration",
    ),
    Quantity(
        "step time", "calibrated", _seconds, _of("calibrated", "step_s"), "5% median, 10% at most"
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """A measured case and what was predicted of it."""

    folder: str
    measured: Row
    predicted: Row

    def error(self, quantity: Quantity) -> float | None:
        """Predicted over measured, less one; None where either is missing."""
        real, told = quantity.measured(self.measured), quantity.predicted(self.predicted)
        return told / real - 1 if real and told else None


def read_steps(folder: Path) -> list[Row]:
    """The rows of a folder's steps.jsonl, those of the other recorder in this campaign's words."""
    capability = Facts.of(folder).environment.get("capability", (9, 0))
    return [
        translated(row, capability) if is_foreign(row) else row
        for row in read_rows(folder / "steps.jsonl")
    ]


def results_of(folder: Path, *, traced: bool = True, made: bool = True) -> list[Result]:
    """A folder's measured cases with their predictions, made now where they are missing; without
    ``made`` those cases have none."""
    measured = {
        row["case"]: row
        for row in read_steps(folder)
        if row.get("status") == "measured" and "memory" in row
    }
    predictions = {row["case"]: row for row in read_rows(folder / "predictions.jsonl")}
    missing = [row for name, row in measured.items() if name not in predictions]
    if missing and not made:
        predictions |= {row["case"]: {} for row in missing}
    elif missing:
        from campaign_parts.predicted import predict

        facts, rows = Facts.of(folder), Rows(folder / "predictions.jsonl")
        for row in missing:
            predictions[row["case"]] = rows.add(
                predict(row, facts.hardware, facts.calibration, traced=traced)
            )
    return [Result(folder.name, row, predictions[name]) for name, row in measured.items()]


def write_report(
    folder: Path | Sequence[Path],
    out: Path,
    *,
    pictures: bool,
    traced: bool = True,
    made: bool = True,
) -> list[Result]:
    """report.md and pictures of one or several folders, in ``out``; without matplotlib the tables
    alone."""
    folders = [folder] if isinstance(folder, Path) else list(folder)
    found = [result for one in folders for result in results_of(one, traced=traced, made=made)]
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# Measured and predicted training steps", ""]
    for one in folders:
        lines += [
            *headline(one),
            *stage_lines(one),
            *unmeasured_lines(one),
            *doubtful_lines(one),
            "",
        ]
    lines += [*summary_lines(found), "", *case_lines(found)]
    for one in folders:
        lines += [*kernel_lines(one), *replay_lines(one)]
        facts = Facts.of(one)
        if facts.hardware is not None:
            lines += op_lines(one, facts.hardware.gpu, facts.speed)
    if unpredicted := sum(not result.predicted for result in found):
        lines += [
            "",
            (
                f"{unpredicted} cases have no predictions yet; `python benchmarks/campaign/report.py FOLDER`"
                " makes them on any machine."
            ),
        ]
    if pictures and find_spec("matplotlib") is None:
        pictures = False
        lines += [
            "",
            (
                "No pictures: matplotlib is not installed here; `python benchmarks/campaign/report.py"
                " FOLDER` draws them elsewhere."
            ),
        ]
    write_whole(out / "report.md", "\n".join(lines) + "\n", force=True)
    if pictures and found:
        from campaign_parts.pictures import draw_accuracy, draw_histories

        draw_accuracy(found, QUANTITIES, out / "accuracy.png")
        for one in folders:
            draw_histories(
                one, out / ("histories.png" if len(folders) == 1 else f"histories-{one.name}.png")
            )
    return found


def headline(folder: Path) -> list[str]:
    """Where the rows of a folder come from."""
    facts = Facts.of(folder)
    environment = facts.environment
    versions = environment.get("versions", environment)
    stamps = [
        f"{name} {versions[name]}"
        for name in ("torch", "transformers", "peft", "bitsandbytes")
        if versions.get(name)
    ]
    if environment.get("driver"):
        stamps.insert(0, f"driver {environment['driver']}")
    lines = [f"**{folder.name}**: {facts.device}; {', '.join(stamps)}."]
    if environment.get("trial") or environment.get("device") == "cpu":
        lines.append(
            "These rows are a trial of the program on a CPU with tiny shapes. They say nothing"
            " about a GPU."
        )
    watching = folder / "watch.json"
    if watching.exists():
        cost = json.loads(watching.read_text())
        lines.append(
            f"Watching a training spent {cost['inside_watch_s'] * 1e6:.0f} us a step of"
            f" {cost['plain_step_s'] * 1e3:.2f} ms ({cost['share_inside_watch']:.2%})."
        )
    return lines


def unmeasured_lines(folder: Path) -> list[str]:
    """Cases without a figure, and why."""
    rows = {row.get("case"): row for row in read_steps(folder)}
    return [
        f"- {row['case']}: {row['status']} {row.get('reason', row.get('out_of_memory', ''))}"
        for row in rows.values()
        if row.get("status") != "measured"
    ]


def doubtful_lines(folder: Path) -> list[str]:
    """Measured cases that carry a note: slowed clocks, other processes, a wide spread."""
    noted = [
        row for row in read_steps(folder) if row.get("status") == "measured" and row.get("notes")
    ]
    if not noted:
        return []
    return [
        f"{len(noted)} measured cases carry notes:",
        *(f"- {row['case']}: {'; '.join(row['notes'])}" for row in noted),
    ]


def summary_lines(results: Sequence[Result]) -> list[str]:
    """Median and largest error of every quantity, beside what is wanted."""
    lines = [
        "| quantity | by | cases | median error | largest | bias | wanted |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for quantity in QUANTITIES:
        errors = [error for result in results if (error := result.error(quantity)) is not None]
        if not errors:
            lines.append(
                f"| {quantity.name} | {quantity.side} | 0 | not measured | | | {quantity.wanted} |"
            )
            continue
        sizes = [abs(error) for error in errors]
        bias = statistics.median(errors)
        lines.append(
            f"| {quantity.name} | {quantity.side} | {len(errors)} | {statistics.median(sizes):.2%}"
            f" | {max(sizes):.2%} | {bias:+.2%} | {quantity.wanted} |"
        )
    return lines


def case_lines(results: Sequence[Result]) -> list[str]:
    """A line a case: what was measured, and each prediction's error."""
    names = [f"{q.name}, {q.side}" for q in QUANTITIES]
    lines = [
        "| case | allocated GiB | reserved GiB | step ms | " + " | ".join(names) + " |",
        "|---|---:|---:|---:|" + "---:|" * len(names),
    ]
    for result in results:
        memory, seconds = result.measured["memory"], _seconds(result.measured)
        errors = [result.error(q) for q in QUANTITIES]
        cells = " | ".join("-" if e is None else f"{e:+.1%}" for e in errors)
        step = f"{seconds * 1e3:.1f}" if seconds else "-"
        lines.append(
            f"| {result.measured['case']} | {memory['allocated'] / GIB:.3f} |"
            f" {memory['reserved'] / GIB:.3f} | {step} | {cells} |"
        )
    return lines


def replay_lines(folder: Path) -> list[str]:
    """The recorded allocator histories under the allocator's rules: a row a case; nothing where
    none were recorded."""
    settings = allocator_settings(Facts.of(folder).environment)
    measured = {
        row["case"]: row["memory"]
        for row in read_steps(folder)
        if row.get("status") == "measured" and "memory" in row
    }
    rows = [
        replay_line(history, replayed(history, settings), measured.get(history.case))
        for history in read_histories(folder)
    ]
    if not rows:
        return []
    heads = [
        (
            "| recorded history | bookings | allocated MiB | replayed | reserved MiB | replayed |"
            " segments as recorded |"
        ),
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    return [
        "",
        f"Allocator histories of {folder.name} under the allocator's rules:",
        "",
        *heads,
        *rows,
    ]


def allocator_settings(environment: Mapping[str, Any]) -> str:
    """PYTORCH_ALLOC_CONF of a recording, by either recorder's name for it."""
    return str(environment.get("allocator_conf") or environment.get("allocator") or "")


def replay_line(history: History, found: Replayed, memory: Mapping[str, int] | None) -> str:
    """One recorded history beside its replay."""
    known = [peaks for peaks in history.peaks if peaks is not None]
    if known:
        recorded: tuple[int | None, int | None] = (
            max(a for a, _ in known),
            max(r for _, r in known),
        )
    else:
        recorded = (memory["allocated"], memory["reserved"]) if memory else (None, None)
    cells = [
        f"{real / MIB:.1f} | {told / real - 1:+.2%}" if real else f"- | {told / MIB:.1f} MiB"
        for real, told in zip(recorded, (found.allocated, found.reserved), strict=True)
    ]
    other = found.first_other_segment(history.segments)
    segments = (
        "not recorded"
        if not history.segments
        else (
            f"all {len(history.segments)}"
            if other is None
            else f"the first {other} of {len(history.segments)}"
        )
    )
    return f"| {history.case} | {len(history.bookings):,} | {cells[0]} | {cells[1]} | {segments} |"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 2 if there is nothing to report on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of results")
    parser.add_argument(
        "--out", type=Path, help="where report.md and the pictures go [the first folder]"
    )
    parser.add_argument(
        "--no-trace", action="store_true", help="make no traced predictions where they are missing"
    )
    options = parser.parse_args(arguments)
    found = write_report(
        options.folders,
        options.out or options.folders[0],
        pictures=True,
        traced=not options.no_trace,
    )
    if not found:
        print("no measured case in these folders", file=sys.stderr)
        return 2
    print(((options.out or options.folders[0]) / "report.md").read_text())
    return 0
