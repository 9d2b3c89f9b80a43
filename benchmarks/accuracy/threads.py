"""Public threads about memory in preference and reinforcement learning, and of engines: what
their users gave, what the report says, and what was true.

    python benchmarks/accuracy/threads.py

benchmarks/data/rollout_threads.json has a row a thread: `line` is what a user would type, `open` what
the thread does not say (the line assumes it), `truth` what it says of the outcome, if anything.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.base.units import GIB
from napkinmath.cli.main import main as estimate_command

TABLE = Path(__file__).resolve().parents[1] / "data" / "rollout_threads.json"
CLOSE = 0.2  # of what a tool showed, where the thread leaves options open


def rows() -> list[dict[str, Any]]:
    """The threads."""
    found: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def reported(line: str) -> dict[str, Any]:
    """The report for a line, as its JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        estimate_command([*line.split(), "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def said(answer: dict[str, Any]) -> str:
    """Verdict and memory in a few words."""
    verdict = str(answer["verdict"]).replace("_", " ")
    if "engine" in answer:
        cache = answer["memory"].get("cache", 0) / GIB
        return f"{verdict}, cache {cache:.2f} GiB, {answer['longest_context']:,} tokens alone"
    memory = {name: answer["memory"][name]["value"] / GIB for name in ("allocated", "device")}
    return f"{verdict}, allocated {memory['allocated']:.1f}, device {memory['device']:.1f} GiB"


def agrees(row: dict[str, Any], answer: dict[str, Any]) -> bool | None:
    """Whether the report says what was true; None where the thread does not say it."""
    truth = row["truth"]
    if "verdict" in truth:
        return str(answer["verdict"]).replace("_", " ") == truth["verdict"]
    if "tokens" in truth:
        return abs(answer["longest_context"] / truth["tokens"] - 1) <= CLOSE
    for name, key in (("device", "device_gib"), ("allocated", "allocated_gib")):
        if key in truth:
            value = answer["memory"][name]["value"] / GIB
            return abs(value / truth[key] - 1) <= CLOSE
    return None


def main() -> None:
    for row in rows():
        print(f"{row['thread']}: {row['given']}")
        if row["line"]:
            answer = reported(row["line"])
            word = {True: "agrees", False: "disagrees", None: "not comparable"}
            print(f"  estimate {row['line']}")
            print(f"  {said(answer)}   [{word[agrees(row, answer)]}]")
        print(f"  true: {row['said']}   not said: {row['open'] or 'nothing'}")


if __name__ == "__main__":
    main()
