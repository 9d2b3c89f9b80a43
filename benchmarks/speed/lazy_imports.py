"""Which imports within functions save start-up, and which save nothing.

    python benchmarks/speed/lazy_imports.py [--all]

An import in a function saves something where a cold command loads the module that has it and not
the module that it names. Where every command that loads the one loads the other too, the import
belongs to the top of the file. Prints those, and exits with 1 if there is one; `--all` prints the
others with the commands in which they save.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from import_graph import DOORS, Import, Kind, all_imports  # noqa: E402

STEP = ("--model", "llama-7b", "--qlora", "--bs", "4", "--ctx", "2048")
# What people start many times a day; each is a fresh process.
COLD = {
    "import napkinmath": None,
    "report": STEP,
    "report, no model given": (),
    "json": (*STEP, "--json"),
    "report on a GPU": (*STEP, "--gpu", "rtx4090"),
    "report on 8 GPUs": ("--model", "llama-7b", "--fsdp", "--gpus", "8xH100"),
    "explain": (*STEP, "--explain"),
    "job file": (str(ROOT / "tests" / "cli" / "jobs" / "own.yaml"),),
    "check": ("check", "--model", "tinyllama", "--gpu", "H100"),
    "models": ("models",),
    "gpus": ("gpus",),
    "links": ("links", "--gpus", "16xH100"),
    "version": ("version",),
    "help": ("--help",),
    "check --help": ("check", "--help"),
    "generate --help": ("generate", "--help"),
    "gpus --help": ("gpus", "--help"),
    "links --help": ("links", "--help"),
    "models --help": ("models", "--help"),
    "plan --help": ("plan", "--help"),
    "sweep --help": ("sweep", "--help"),
    "plan": ("plan", "--model", "tinyllama", "--gpu", "rtx4090"),
    "generate": ("generate", "tinyllama", "--gpu", "H100"),
    "dpo": (*STEP, "--workload", "dpo"),
    "sweep": ("sweep", "--model", "tinyllama", "--bs", "1,2", "--gpu", "H100"),
    "full": ("--model", "gpt2", "--full", "--json"),
}
SHOW = "import sys; print(*(m for m in sys.modules if m.startswith('napkinmath')), file=sys.stderr)"
RUN = "import sys, io; from napkinmath.cli.main import main; sys.stdout = io.StringIO(); main()"


def loaded_by(arguments: tuple[str, ...] | None) -> set[str]:
    """Modules of the estimator in a process after one command line, or after the bare import."""
    program = f"{'import napkinmath' if arguments is None else RUN}\n{SHOW}"
    done = subprocess.run(
        [sys.executable, "-c", program, *(arguments or ())],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "estimator"), "NO_COLOR": "1"},
    )
    return set(done.stderr.splitlines()[-1].split())


def judged() -> list[tuple[Import, list[str]]]:
    """Every import within a function, with the commands in which it saves loading its target; those
    of modules that no cold command loads are left out."""
    loaded = {name: loaded_by(arguments) for name, arguments in COLD.items()}
    found: list[tuple[Import, list[str]]] = []
    for one in all_imports():
        if one.kind is not Kind.CALLED or one.source in DOORS:
            continue
        holders = [name for name, modules in loaded.items() if one.source in modules]
        if holders:
            found.append((one, [name for name in holders if one.target not in loaded[name]]))
    return found


def useless_imports() -> list[str]:
    """'module:line imports target' of each import within a function that saves nothing."""
    return [f"{one.source}:{one.line} imports {one.target}" for one, saves in judged() if not saves]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="also those that save, and where")
    everything = parser.parse_args().all
    useless = 0
    for one, saves in judged():
        useless += not saves
        if everything or not saves:
            where = f"saves in {', '.join(saves)}" if saves else "saves nothing"
            print(f"{one.source}:{one.line} imports {one.target}: {where}")
    print(f"{useless} imports within functions save nothing")
    return int(useless > 0)


if __name__ == "__main__":
    sys.exit(main())
