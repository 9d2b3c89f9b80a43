"""Five tasks of a newcomer in a fresh environment, with nothing but what the README says.

    python benchmarks/newcomers/newcomers.py [--out FILE]

The checkout is cloned and installed as the README says. Each task's commands are taken from the
README, or from the page that it links to, so that a page that changes changes what runs. What a task
has to show is checked, and its seconds are recorded; they are of a shared machine. torch comes from
the Makefile's pinned CPU build, since the pre-flight check is for those who have it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "browsers"), str(ROOT / "estimator")]
TORCH = "torch==2.13.0"
JOB = ROOT / "tests" / "cli" / "jobs" / "axolotl_qlora.yaml"
MOST_SECONDS = 900


class Task(NamedTuple):
    """What somebody wants, where the pages say how, and what has to come out."""

    question: str
    page: str
    after: str
    """The words in front of the block of commands."""
    shows: str
    """A pattern that the output has."""
    leaves: str = ""
    """A file that is there afterwards."""
    first: tuple[str, ...] = ()
    """Commands before it: what the task takes for granted."""


TASKS = (
    Task(
        "Does this model fit, and what does a step look like?",
        "README.md",
        "## One step",
        r"FITS +[\d.]+ GiB to spare",
        leaves="step.svg",
    ),
    Task(
        "What does my trainer's file need?",
        "README.md",
        "What does the job file that I already have need?",
        r"(FITS|DOES NOT FIT|CANNOT TELL) ",
        first=(f"cp {JOB} my_axolotl_config.yaml",),
    ),
    Task(
        "What should I run on this GPU?",
        "README.md",
        "What should I run on this GPU?",
        r"run it: +estimate --model llama-3\.1-8b ",
    ),
    Task(
        "Will my training script crash?",
        "docs/using.md",
        "## Will this script crash in three hours?",
        r"FITS [\s\S]*\n\d+\.\d+\n",
        first=(f"pip install --quiet {TORCH}", "pip install --quiet '.[profiler]'"),
    ),
)


def block_after(page: str, words: str) -> tuple[str, str]:
    """(language, text) of the first block behind the words on a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(r"```(sh|python)\n(.*?)```", text[text.index(words) :], re.DOTALL)
    assert found is not None, f"{page} has no block after {words!r}"
    return found[1], found[2]


def ran(commands: str, folder: Path) -> tuple[int, str, float]:
    """(exit code, output, seconds) of commands in the environment of a folder."""
    entered = "" if not (folder / ".venv").exists() else ". .venv/bin/activate\n"
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", entered + commands],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def tried(task: Task, folder: Path) -> dict[str, Any]:
    """A task's commands, its seconds and, where it is a dead end, why."""
    for command in task.first:
        code, said, _ = ran(command, folder)
        assert code == 0, said
    language, text = block_after(task.page, task.after)
    if language == "python":
        (folder / "train.py").write_text(text, encoding="utf-8")
        text = "python train.py"
    code, said, seconds = ran(text, folder)
    found: dict[str, Any] = {"task": task.question, "commands": text.strip().splitlines()}
    ended = code if not re.search(task.shows, said) or code not in (0, 1, 3) else 0
    missing = task.leaves and not (folder / task.leaves).exists()
    if ended or missing or "Traceback" in said:
        found["dead_end"] = said[-400:]
    return {**found, "exit_code": code, "seconds": round(seconds, 1)}


def page_offline(folder: Path) -> dict[str, Any]:
    """The page that the README writes, shown from a file server, and again after it has gone."""
    from chromium import BROWSER, chromium
    from run import SETTLED, Host, running  # pyright: ignore[reportAttributeAccessIssue]

    words = re.search(r"`(estimate page --out) DIR`", (ROOT / "README.md").read_text())
    assert words is not None
    command = f"{words[1]} page"
    found: dict[str, Any] = {"task": "The page, without a server", "commands": [command]}
    if BROWSER is None:
        return {**found, "not_run": "needs Chromium"}
    code, said, seconds = ran(command, folder)
    if code:
        return {**found, "exit_code": code, "dead_end": said[-400:]}
    began = time.monotonic()
    with running(Host(folder / "page")) as host, chromium() as page:
        page.open(host.url)
        page.until(SETTLED, 300)
        page.until("navigator.serviceWorker.controller")
        host.gone = True
        page.open(f"{host.url}?gone")
        page.until(SETTLED, 300)
        verdict = page.run("document.getElementById('verdict').textContent")
    seconds += time.monotonic() - began
    return {**found, "exit_code": 0, "without_its_host": verdict, "seconds": round(seconds, 1)}


def everything(folder: Path) -> dict[str, Any]:
    """The installation and the five tasks."""
    checkout = folder / "napkinmath"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    _, install = block_after("README.md", "## Install")
    code, said, seconds = ran(install, checkout)
    assert code == 0, said
    tasks = [*(tried(task, checkout) for task in TASKS), page_offline(checkout)]
    return {"install_seconds": round(seconds, 1), "tasks": tasks}


def main() -> None:
    """Runs everything, writes the result, and exits 1 at a dead end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = everything(Path(folder))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    found = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        **found,
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    sys.exit(any("dead_end" in task for task in found["tasks"]))


if __name__ == "__main__":
    main()
