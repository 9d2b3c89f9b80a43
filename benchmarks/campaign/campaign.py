"""Nine minutes on a GPU: its ceilings, a calibration, the cost of watching, whole training steps of
six architectures. The kernels have a command and a budget of their own
(benchmarks/kernels/kernel_speed.py) and write into the same folder.

    python benchmarks/campaign/campaign.py --budget 540 --out benchmarks/results/new      (or: make gpu)

Every figure is on the disk as soon as it is there. The same command goes on where an earlier one
stopped; cases run cheapest first. `--only` takes some stages and gives them the whole budget. A
stage that fails costs the others nothing, also where it breaks the GPU's context. At the end come a
table and pictures (benchmarks/campaign/report.py makes them again from the files alone).
`--dry-run` tries the program out on a CPU in tiny shapes, in a minute; its rows are marked as a
trial and say nothing about a GPU.

    OUT/environment.json   GPU, driver, allocator settings, versions
    OUT/stages.jsonl       which stage was begun, done, or failed, and why
    OUT/ceilings.json      copy bandwidth and matrix products
    OUT/calibration.json   what `estimate calibrate` makes here
    OUT/watch.json         the cost of watch()
    OUT/steps.jsonl        a row a case: bytes and seconds by phase, or why there are none
    OUT/events.jsonl.gz    for a dozen cases the allocator's life over two steps
    OUT/predictions.jsonl  the estimate's and the trace's figures of the same cases
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("estimator", "profiler", "kernels", "benchmarks/campaign", "benchmarks/kernels")
FOLDERS = [str(ROOT / name) for name in ROOMS]
sys.path[:0] = FOLDERS
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
from campaign_parts import accuracy  # noqa: E402
from campaign_parts.cases import CONFIGS, Case, all_cases, tiny_cases, tiny_config  # noqa: E402
from campaign_parts.ceilings import ceilings  # noqa: E402
from campaign_parts.ledger import Rows  # noqa: E402
from campaign_parts.measured import measure_case  # noqa: E402
from campaign_parts.overhead import watch_overhead  # noqa: E402
from campaign_parts.predicted import predict  # noqa: E402
from campaign_parts.stage_states import BEGUN, DONE, FAILED, STAGES  # noqa: E402
from kernel_rows.archive import Archive  # noqa: E402
from kernel_rows.goals import LOST  # noqa: E402
from kernel_rows.lost_context import is_lost  # noqa: E402
from napkinmath.base.errors import InputError  # noqa: E402
from napkinmath.base.whole_file import FULL, NotWritten, write_whole  # noqa: E402
from napkinmath_profiler.measuring.device_names import device_named  # noqa: E402
from napkinmath_profiler.measuring.environment import describe_environment  # noqa: E402
from napkinmath_profiler.trace import TraceOptions  # noqa: E402

#: Shares of the budget, by stage in their order: what others need most comes first. What a stage
#: leaves, or is not asked for, goes to the others.
SHARES = {
    "ceilings": 0.03,
    "calibration": 0.18,
    "watching": 0.04,
    "steps": 0.69,
    "predictions": 0.06,
}
SLOWEST_CASE_S = 25.0  # a case of a whole 8B model is not begun with less left
GRACE_S = 15.0  # a budget of 540 s is for places that end a command after 600
RETRIED = ("failed",)
NO_ARCHIVE = Archive(None, None)
#: Said before anything is measured, by the name that Python imports.
OPTIONAL_PACKAGES = {
    "triton": "no kernels of ours",
    "bitsandbytes": "no QLoRA steps, and no goals against its kernels",
    "peft": "no steps with adapters, and no goals against PEFT",
    "liger_kernel": "no goals against Liger",
    "cut_cross_entropy": "no goals against cut-cross-entropy",
    "flash_attn": "no goals against flash-attn",
    "matplotlib": "no pictures; campaign/report.py makes them anywhere",
}


class NotMeasured(Exception):
    """A stage came to no figure, and why."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """One run: where it writes, on what, and until when (time.monotonic)."""

    out: Path
    device: torch.device
    deadline: float
    budget_s: float
    tiny: bool
    wanted: tuple[str, ...] = tuple(SHARES)
    archive: Archive = NO_ARCHIVE

    def share_s(self, stage: str) -> float:
        """Seconds of the budget for a stage, among those that are wanted; 0 for others."""
        if stage not in self.wanted:
            return 0.0
        return self.budget_s * SHARES[stage] / sum(SHARES[name] for name in self.wanted)

    @property
    def seconds_left(self) -> float:
        """Of the whole budget."""
        return self.deadline - time.monotonic()

    def at_most(self, seconds: float) -> float:
        """A limit for a program of its own: it may overrun its share, and the run as a whole by no
        more than ``GRACE_S``."""
        return min(seconds, max(0.0, self.seconds_left) + GRACE_S)

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{max(0.0, self.seconds_left):5.0f} s left] {text}", flush=True)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=float, default=540.0, help="seconds the whole run may take"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--archive", type=Path, help="a .tar.gz of that folder, kept current while the run goes on"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny shapes on the CPU: shows that the program works, nothing else",
    )
    parser.add_argument(
        "--only",
        default="",
        help="comma-separated stages, which share the whole budget: " + ", ".join(SHARES),
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    options = parser.parse_args(arguments)
    unknown = set(filter(None, options.only.split(","))) - set(SHARES)
    if unknown:
        parser.error(f"--only {options.only}: no stage {sorted(unknown)[0]}; {', '.join(SHARES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 1 if nothing was measured, or the disk is full; 2 without the device asked for,
    or where the folder cannot be written; 130 interrupted."""
    options = options_of(arguments)
    try:
        device = device_named("cpu" if options.dry_run else options.device)
    except InputError as reason:
        print(f"{reason}; --dry-run tries the program out on the CPU", file=sys.stderr)
        return 2
    if device.index is not None:  # events and caches are the current device's
        torch.cuda.set_device(device)
    try:
        return run(options, device)
    except (OSError, NotWritten) as error:
        full = error.errno in FULL
        reason = "the disk is full" if full else str(error)
        print(
            f"{reason}; what is in {options.out} is whole: make room for it and run the same"
            " command again",
            file=sys.stderr,
        )
        return 1 if full else 2
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace, device: torch.device) -> int:
    """All stages, then the report."""
    options.out.mkdir(parents=True, exist_ok=True)
    named = set(filter(None, options.only.split(",")))
    wanted = tuple(name for name in SHARES if not named or name in named)
    campaign = Campaign(
        options.out,
        device,
        time.monotonic() + options.budget,
        options.budget,
        options.dry_run,
        wanted,
        Archive(options.out, options.archive),
    )
    if wanted != ("predictions",):
        missing = missing_packages()
        write_json(
            options.out / "environment.json",
            describe_environment(device) | {"trial": options.dry_run, "missing": missing},
        )
        for package, what in missing.items():
            campaign.say(f"{package} is not installed: {what}")
    run_stages(campaign, stages(options))
    accuracy.write_report(
        options.out, options.out, pictures=True, made=False
    )  # what predictions are missing would take longer than there is
    campaign.archive.keep(at_once=True)
    print((options.out / "report.md").read_text())
    return 0 if Rows(options.out / "steps.jsonl").names("measured") else 1


def missing_packages() -> dict[str, str]:
    """What is not installed, and what this run will therefore lack."""
    return {
        name: what
        for name, what in OPTIONAL_PACKAGES.items()
        if importlib.util.find_spec(name) is None
    }


def stages(options: argparse.Namespace) -> dict[str, Callable[[Campaign], None]]:
    """What each stage does."""
    cases = [
        case
        for case in (tiny_cases() if options.dry_run else all_cases())
        if options.cases in case.name
    ]
    return {
        "ceilings": measure_ceilings,
        "calibration": calibrate,
        "watching": measure_watching,
        "steps": lambda campaign: measure_steps(campaign, cases),
        "predictions": make_predictions,
    }


def run_stages(campaign: Campaign, known: dict[str, Callable[[Campaign], None]]) -> None:
    """The stages that are wanted, in order. After one that leaves the GPU unusable a new process
    takes those that follow."""
    for number, name in enumerate(campaign.wanted):
        if attempt(campaign, name, known[name]) or not is_lost(campaign.device):
            continue
        rest = campaign.wanted[number + 1 :]
        if rest:
            seconds = max(1.0, campaign.seconds_left)
            campaign.say(go_on_anew(campaign, rest, seconds, campaign.at_most(seconds)))
        return


def attempt(campaign: Campaign, name: str, stage: Callable[[Campaign], None]) -> bool:
    """Run a stage; whether it came to its end. One that fails costs the others nothing, and its
    reason is kept. A full disk ends them all: nothing more could be kept."""
    states = Rows(campaign.out / STAGES)
    states.add({"case": name, "status": BEGUN})
    began = time.monotonic()
    try:
        stage(campaign)
    except Exception as error:  # whatever a driver or a library does
        if isinstance(error, (OSError, NotWritten)) and error.errno in FULL:
            raise
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        error.__traceback__ = None  # its frames hold tensors that the next stage needs room for
        campaign.say(f"{name}: {reason}")
        states.add({"case": name, "status": FAILED, "reason": reason})
        campaign.archive.keep(at_once=True)
        return False
    states.add({"case": name, "status": DONE, "wall_s": round(time.monotonic() - began, 2)})
    campaign.archive.keep(at_once=True)
    return True


def measure_ceilings(campaign: Campaign) -> None:
    """Copy bandwidth and matrix products."""
    path = campaign.out / "ceilings.json"
    if not path.exists():
        write_json(path, ceilings(campaign.device, campaign.share_s("ceilings")))
        campaign.say("ceilings measured")


def calibrate(campaign: Campaign) -> None:
    """`estimate calibrate`, in a process of its own."""
    path = campaign.out / "calibration.json"
    if path.exists():
        return
    budget = max(5.0, min(campaign.share_s("calibration"), campaign.seconds_left))
    model = path.with_name("model.json")
    write_json(model, tiny_config(tiny_cases()[1]) if campaign.tiny else CONFIGS["llama3-8b"])
    command = [
        sys.executable,
        "-m",
        "napkinmath",
        "calibrate",
        "--device",
        str(campaign.device),
        "--budget",
        f"{budget:.0f}",
        "--out",
        str(path),
    ]
    if not campaign.tiny:
        command += [
            "--model",
            str(model),
            "--lora",
            "--ctx",
            "1024",
            "--bs",
            "2",
            "--precision",
            "bf16",
        ]
    try:
        said = run_command(
            command, campaign.at_most(budget * 2 + 30), campaign.out / "calibration.log"
        )
    finally:
        model.unlink()
    campaign.say(said)
    if not path.exists():
        raise NotMeasured(f"{said}: {last_line(campaign.out / 'calibration.log')}")


def last_line(log: Path) -> str:
    """What a program of its own said last; nothing where it said nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def measure_watching(campaign: Campaign) -> None:
    """Steps with watch() and without."""
    path = campaign.out / "watch.json"
    if path.exists():
        return
    small = tiny_config(tiny_cases()[0])
    config = small if campaign.tiny else CONFIGS["tinyllama"]
    size = (
        {"micro_batch_size": 2, "sequence_length": 32, "dtype": "fp32"}
        if campaign.tiny
        else {"micro_batch_size": 1, "sequence_length": 512}
    )
    write_json(path, watch_overhead(config, TraceOptions(**size), campaign.device))  # type: ignore[arg-type]
    campaign.say("watching measured")


def measure_steps(campaign: Campaign, cases: list[Case]) -> None:
    """Every case that has no row yet, while there is time."""
    rows = Rows(campaign.out / "steps.jsonl")
    done = rows.names() - (rows.names(*RETRIED) - rows.names("measured"))
    events = campaign.out / "events.jsonl.gz"
    until = campaign.deadline - (0.0 if campaign.tiny else campaign.share_s("predictions"))
    longest = 0.0
    for number, case in enumerate(cases):
        if case.name in done:
            continue
        needed = (
            0.0 if campaign.tiny else max(longest, SLOWEST_CASE_S if case.layers >= 32 else 0.0)
        )
        if time.monotonic() + needed > until:
            campaign.say(
                f"steps: out of time, {sum(c.name not in done for c in cases[number:])} cases left;"
                " run the same command again"
            )
            return
        row = rows.add(measure_case(case, campaign.device, tiny=campaign.tiny, events=events))
        longest = max(longest, row.get("wall_s", 0.0))
        campaign.say(line_of(row))
        campaign.archive.keep()
        if row["status"] == LOST:
            left = until - time.monotonic()
            if number + 1 < len(cases) and left > 0:
                campaign.say(go_on_anew(campaign, ("steps",), left, left + SLOWEST_CASE_S))
            return


def go_on_anew(campaign: Campaign, names: tuple[str, ...], seconds: float, limit_s: float) -> str:
    """Some stages, in a process that the GPU still answers."""
    command = [sys.executable, __file__, "--only", ",".join(names), "--budget", f"{seconds:.0f}"]
    command += ["--out", str(campaign.out), "--device", str(campaign.device)]
    if campaign.archive.file is not None:
        command += ["--archive", str(campaign.archive.file)]
    return run_command(command, limit_s, campaign.out / f"{names[0]}.log")


def line_of(row: dict[str, Any]) -> str:
    """A measured case on one line."""
    memory, speed = row.get("memory"), row.get("tokens_per_s")
    figures = (
        f"{memory['allocated'] / 2**30:8.3f} GiB"
        if memory
        else f"{row['status']}: {row.get('reason', '')[:80]}"
    )
    return f"{row['case']:90} {figures}" + (f" {speed:10,.0f} tokens/s" if speed else "")


def make_predictions(campaign: Campaign) -> None:
    """The estimate's and the trace's figures of every measured case, with the libraries that were
    measured."""
    steps = Rows(campaign.out / "steps.jsonl")
    rows = Rows(campaign.out / "predictions.jsonl")
    facts = accuracy.Facts.of(campaign.out)
    done = rows.names()
    for row in steps.rows:
        if row.get("status") != "measured" or row["case"] in done:
            continue
        if campaign.seconds_left < 0:
            campaign.say(
                "predictions: out of time; benchmarks/campaign/report.py makes the rest anywhere"
            )
            return
        rows.add(predict(row, facts.hardware, facts.calibration))
        done.add(row["case"])


def run_command(command: list[str], limit_s: float, log: Path) -> str:
    """Runs a program with this project on its path, its output into ``log``; says how it went."""
    path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    said: list[str] = []

    def logged(file: BinaryIO) -> None:
        try:
            code = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                env={**os.environ, "PYTHONPATH": path},
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            said.append(f"stopped after {limit_s:.0f} s")
        else:
            said.append("done" if code == 0 else f"exit code {code}, see {log.name}")

    write_whole(log, logged, force=True)
    return f"{log.stem}: {said[0]}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(content, indent=1) + "\n", force=True)


if __name__ == "__main__":
    sys.exit(main())
