"""Throughput of engines as three sources published it, against `estimate generate`.

    python benchmarks/accuracy/served.py [SOURCE]

benchmarks/data/served.csv has a row a measurement. `counts` says which tokens its speed counts: those
of prompts and completions, or those that one GPU generates. `sequences` 0 leaves the number to the
engine, where a client sends all requests at once. No rule was made with these rows.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.cli.main import main as estimate_command

TABLE = Path(__file__).resolve().parents[1] / "data" / "served.csv"


def rows() -> list[dict[str, str]]:
    """The measurements."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def line(row: dict[str, str]) -> list[str]:
    """What a user would type for a row."""
    number, gpu = row["gpus"].split("x", 1)
    words = ["generate", row["model"], "--gpu", gpu, "--tp", number, "--engine", row["engine"]]
    words += ["--prompt", row["prompt"], "--completion", row["completion"]]
    for name, flag, default in (
        ("quant", "--quant", ""),
        ("sequences", "--sequences", "0"),
        ("cache", "--cache-format", "auto"),
        ("share", "--memory-share", ""),
    ):
        if row[name] != default:
            words += [flag, row[name]]
    return words


def priced(row: dict[str, str]) -> float:
    """Tokens a second as the row counts them, at the number of sequences that gives most."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        estimate_command([*line(row), "--json"])
    requests = max(speed["requests_per_s"] for speed in json.loads(out.getvalue())["speeds"])
    if row["counts"] == "total":
        return float(requests * (int(row["prompt"]) + int(row["completion"])))
    return float(requests * int(row["completion"]) / int(row["gpus"].split("x", 1)[0]))


def main() -> None:
    wanted = sys.argv[1:]
    errors = defaultdict[tuple[str, str], list[float]](list)
    for row in rows():
        if wanted and row["source"] not in wanted:
            continue
        error = priced(row) / float(row["tokens_per_s"]) - 1
        print(" ".join(line(row)), f"{error:+.0%}")
        for name in (row["set"], "all"):
            errors[row["source"], name].append(error)
    for (source, name), found in errors.items():
        median, bias = statistics.median(map(abs, found)), statistics.median(found)
        print(f"{source:14}{name:32}{len(found):4} rows  median {median:.1%}  bias {bias:+.1%}")


if __name__ == "__main__":
    main()
