"""Whether the training files of public repositories are read: how many are answered, and what is
said of the others.

    python benchmarks/accuracy/trainer_files.py FOLDER [--tool NAME] [--json OUT] [--why]

FOLDER holds checkouts named owner+name, at the commits of benchmarks/data/trainer_repositories.json.
Each file that trains is priced as `estimate FILE` does, in this process. Answered is what gives an
estimate; a file that is refused is not, however clear the refusal. `--why` prints the refusals.
With `--tool` the other tools of OUT stay as they were recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPOSITORIES = ROOT / "benchmarks" / "data" / "trainer_repositories.json"
ANSWERED = "answered"


def files_of(row: dict[str, Any], folder: Path) -> list[Path]:
    """The files of a repository that are runs of their own."""
    root = folder / row["repository"].replace("/", "+")
    found = {path for pattern in row["files"] for path in root.glob(pattern) if path.is_file()}
    return sorted(
        path
        for path in found
        if not any(fnmatch(path.relative_to(root).as_posix(), part) for part in row["no_run"])
    )


def read(path: Path, flags: dict[str, object]) -> tuple[str, dict[str, int]]:
    """('answered' or why not, keys by their use)."""
    from napkinmath.base.errors import InputError
    from napkinmath.config.job_keys import JobKeys
    from napkinmath.inputs.job_file import with_job_file
    from napkinmath.inputs.jobs import priced

    notes: list[str] = []
    try:
        options = with_job_file({**flags, "job": str(path)}, notes)
        found = priced(options, notes)[0]
        _ = found.memory
    except InputError as error:
        return str(error), {}
    keys = found.job_keys
    uses = Counter(key.use.value for key in keys.keys) if isinstance(keys, JobKeys) else Counter()
    return ANSWERED, dict(uses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tool")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--why", action="store_true")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "estimator"))
    rows = json.loads(REPOSITORIES.read_text())["repositories"]
    tools: dict[str, dict[str, Any]] = {}
    for row in rows:
        if given.tool not in (None, row["tool"]):
            continue
        one = tools.setdefault(
            row["tool"],
            {"files": 0, "answered": 0, "seconds": 0.0, "keys": Counter(), "refused": Counter()},
        )
        for path in files_of(row, given.folder):
            started = time.perf_counter()
            said, keys = read(path, row.get("flags", {}))
            one["files"] += 1
            one["seconds"] += time.perf_counter() - started
            one["answered"] += said == ANSWERED
            one["keys"].update(keys)
            if said != ANSWERED:
                shown = said.replace(str(given.folder), "")
                one["refused"][shown] += 1
                if given.why:
                    print(f"{path.relative_to(given.folder)}\n    {shown}")
    print("| tool | files | answered | share |")
    print("|---|---|---|---|")
    for tool, one in tools.items():
        share = one["answered"] / max(1, one["files"])
        print(f"| {tool} | {one['files']} | {one['answered']} | {share:.0%} |")
    if given.json is not None:
        table = {
            tool: {
                "files": one["files"],
                "answered": one["answered"],
                "keys": dict(sorted(one["keys"].items())),
            }
            for tool, one in tools.items()
        }
        commits = {row["repository"]: row["commit"] for row in rows}
        if given.tool is not None and given.json.exists():
            table = {**json.loads(given.json.read_text(encoding="utf-8"))["tools"], **table}
        given.json.write_text(
            json.dumps({"commits": commits, "tools": table}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
