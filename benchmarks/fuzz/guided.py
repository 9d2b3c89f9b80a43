"""Does coverage lead to an input that breaks a reader? Ten minutes of atheris (libFuzzer) over the
four that read foreign files: config.json, YAML job files, memory snapshots, out-of-memory texts.

    python benchmarks/fuzz/guided.py [--seconds 600] [--json FILE]      (needs `pip install atheris`)

Each reader starts from inputs of its seeded door. It answers or raises a NapkinError, within 5 s of
processor time and 2 GB; anything else ends that reader's run, and its input is named by `crash`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("estimator", "profiler", "benchmarks/fuzz")]

READERS = {  # by the door whose inputs they start from
    "config.json": ("config.json", ".json"),
    "YAML": ("job files", ".yaml"),
    "snapshots": ("snapshots", ".pickle"),
    "out-of-memory texts": ("out-of-memory texts", ""),
}
SEEDS = 300
MOST_BYTES = 20_000
MOST_SECONDS, MOST_MB = 5, 2048
DONE = re.compile(r"Done (\d+) runs")
COVERED = re.compile(r"cov: (\d+) ft: (\d+)")


def reader(name: str) -> Callable[[bytes], object]:
    """What reads the bytes of an input."""
    if name == "snapshots":
        from napkinmath_profiler.snapshot.read_snapshot import read_snapshot_bytes

        return lambda data: read_snapshot_bytes(data, "snapshot")
    if name == "out-of-memory texts":
        from napkinmath_profiler.snapshot.oom_message import read_messages

        return lambda data: read_messages(data.decode("utf-8", "replace"))
    if name == "YAML":
        from napkinmath.inputs import yaml_text

        return lambda data: yaml_text.load(
            data.decode("utf-8", "replace"), "job.yaml", what="job file"
        )
    return _read_config


def _read_config(data: bytes) -> object:
    from napkinmath.base import json_text
    from napkinmath.models.read import read_model

    try:
        config = json_text.loads(data.decode("utf-8", "replace"))
    except ValueError:
        return None
    return read_model(config) if isinstance(config, dict) else None


def run_reader(name: str, corpus: str, seconds: int) -> None:
    """Fuzzes one reader until the time is over or it breaks; ends the process."""
    atheris: Any = importlib.import_module("atheris")

    with atheris.instrument_imports(include=["napkinmath", "napkinmath_profiler"]):
        from napkinmath.base.errors import NapkinError

        read = reader(name)

        def one(data: bytes) -> None:
            try:
                read(data)
            except NapkinError:
                return

        for seed in sorted(Path(corpus).iterdir()):  # what is imported late is instrumented too
            one(seed.read_bytes())

    limits = [f"-max_total_time={seconds}", f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_MB}"]
    flags = [f"-max_len={MOST_BYTES}", "-print_final_stats=0", "-seed=1"]
    atheris.Setup([sys.argv[0], *limits, *flags, corpus], one)
    atheris.Fuzz()


def seeded(name: str, folder: Path) -> None:
    """Writes the first inputs of the reader's door into a folder."""
    from fuzz_doors import BY_NAME
    from fuzz_doors.door import STANDARD_INPUT
    from fuzz_doors.trial import case_of

    door, suffix = READERS[name]
    for number in range(SEEDS):
        for file, content in case_of(BY_NAME[door], 0, number).files:
            if file.endswith(suffix) or file == STANDARD_INPUT:
                (folder / f"{number}").write_bytes(content[:MOST_BYTES])


def guided(name: str, seconds: int) -> dict[str, Any]:
    """The outcome of one reader's run in a process of its own."""
    with tempfile.TemporaryDirectory() as work:
        corpus = Path(work) / "corpus"
        corpus.mkdir()
        seeded(name, corpus)
        seeds = len(list(corpus.iterdir()))
        argv = [sys.executable, __file__, "--reader", name, "--seconds", str(seconds)]
        done = subprocess.run(
            [*argv, "--corpus", str(corpus)], cwd=work, capture_output=True, text=True, check=False
        )
        runs, covered = DONE.findall(done.stderr), COVERED.findall(done.stderr)
        last = [line for line in done.stderr.splitlines() if "Error" in line or "ALARM" in line]
        return {
            "seconds": seconds,
            "seeds": seeds,
            "inputs": int(runs[-1]) if runs else 0,
            "edges_at_first": int(covered[0][0]) if covered else 0,
            "edges_at_last": int(covered[-1][0]) if covered else 0,
            "crash": "" if done.returncode == 0 else (last or [f"exit {done.returncode}"])[0][:300],
        }


def main() -> int:
    """Returns 1 where a reader broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=600, help="of all readers together")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        run_reader(options.reader, options.corpus, options.seconds)
    found = {name: guided(name, options.seconds // len(READERS)) for name in READERS}
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(any(each["crash"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
