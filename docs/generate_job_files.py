"""Writes the tables of docs/job_files.md from the tables of keys and the recorded count of public
files: `python docs/generate_job_files.py` (`--check` compares)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "job_files.md"
KEYS = ROOT / "estimator" / "napkinmath" / "inputs" / "keys"
START, END = "<!-- keys: made by docs/generate_job_files.py -->", "<!-- end of keys -->"
FILES = ROOT / "benchmarks" / "results" / "cpu" / "trainer_files.json"
FILES_START, FILES_END = (
    "<!-- files: made by docs/generate_job_files.py -->",
    "<!-- end of files -->",
)


def tables() -> str:
    """One section a tool: what changes a run and is not priced, what has no effect."""
    parts: list[str] = []
    for path in sorted(KEYS.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        also = table.get("extends", [])
        parts.append(f"### {table['tool']}\n")
        parts.append(
            f"Keys after {table['source']} ({table['commit'][:12]}, {table['licence']})"
            + (f", and those of {', '.join(also)}.\n" if also else ".\n")
        )
        parts.append("| not priced | why | memory | time |\n|---|---|---|---|")
        parts += [
            f"| {_codes(group['keys'])} | {group['why']} | {group['memory']} | {group['time']} |"
            for group in table["not_priced"]
        ]
        parts.append("\n<details><summary>Without effect on a training step</summary>\n")
        parts.append("| why | keys |\n|---|---|")
        parts += [f"| {why} | {_codes(keys)} |" for why, keys in table["no_effect"].items()]
        parts.append("\n</details>\n")
    return "\n".join(parts)


def answered() -> str:
    """How many files of public repositories are answered, as recorded."""
    rows = json.loads(FILES.read_text(encoding="utf-8"))["tools"]
    parts = ["| tool | files | answered | share |\n|---|---|---|---|"]
    for tool, row in rows.items():
        share = row["answered"] / row["files"]
        parts.append(f"| {tool} | {row['files']} | {row['answered']} | {share:.0%} |")
    return "\n".join(parts)


def _codes(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    text = f"{before}{START}\n\n{tables()}\n{END}{rest.partition(END)[2]}"
    before, _, rest = text.partition(FILES_START)
    return f"{before}{FILES_START}\n{answered()}\n{FILES_END}{rest.partition(FILES_END)[2]}"


def main() -> int:
    made = page()
    if "--check" in sys.argv[1:]:
        return 0 if made == PAGE.read_text(encoding="utf-8") else 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
