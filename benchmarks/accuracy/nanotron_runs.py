"""Published runs of nanotron re-estimated from configurations like theirs: memory and speed of a Llama
of 1.1B parameters on 8 to 64 H100.

    python benchmarks/accuracy/nanotron_runs.py [--out benchmarks/results/published/nanotron.md]

benchmarks/data/nanotron_runs.csv has what nanotron logged in July 2024 (huggingface.co/nanotron/old_bench,
log_metrics.csv of each run): steps of 1,024 sequences of 4,096 tokens. The configurations themselves are
not there. The model's sizes follow from the logged FLOP a token and the bytes that stay after a step.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "estimator"))

from napkinmath.inputs.job_file import with_job_file  # noqa: E402
from napkinmath.inputs.jobs import priced  # noqa: E402

RUNS = ROOT / "benchmarks" / "data" / "nanotron_runs.csv"
SEQUENCES, GPUS_A_NODE, MIB = 1024, 8, 1 << 20
MODEL = {
    "is_llama_config": True,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 50257,
    "tie_word_embeddings": True,
}
HEADER = """| data | tensor | pipeline | micro-batch | allocated | reserved | tokens/s a GPU |
|---:|---:|---:|---:|---:|---:|---:|
"""


def configuration(run: Mapping[str, int]) -> dict[str, Any]:
    """As nanotron's own files are written, without what the run does not decide."""
    return {
        "model": {"dtype": "bfloat16", "model_config": MODEL},
        "optimizer": {
            "accumulate_grad_in_fp32": True,
            "clip_grad": 1.0,
            "zero_stage": 1,
            "optimizer_factory": {"name": "adamW", "torch_adam_is_fused": True},
        },
        "parallelism": {
            "dp": run["data"],
            "tp": run["tensor"],
            "pp": run["pipeline"],
            "tp_mode": "REDUCE_SCATTER",
            "tp_linear_async_communication": False,
        },
        "tokens": {
            "micro_batch_size": run["micro_batch"],
            "batch_accumulation_per_replica": SEQUENCES // run["data"] // run["micro_batch"],
            "sequence_length": 4096,
        },
    }


def errors() -> Iterator[tuple[dict[str, int], tuple[float, float, float]]]:
    """(degrees and micro-batch, how far off allocated and reserved bytes and tokens/s are) of every
    run."""
    with RUNS.open(encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        for row in csv.DictReader(file):
            run = {key: int(row[key]) for key in ("data", "tensor", "pipeline", "micro_batch")}
            gpus = run["data"] * run["tensor"] * run["pipeline"]
            path = Path(folder) / "config.yaml"
            path.write_text(yaml.safe_dump(configuration(run)), encoding="utf-8")
            given = {"job": [str(path)], "gpus": f"{gpus}xh100", "stack": "nanotron-2024"}
            nodes = {"nodes": gpus // GPUS_A_NODE} if gpus > GPUS_A_NODE else {}
            (found,) = priced(with_job_file(given | nodes, []), [])
            whole = found.throughput
            assert whole is not None
            yield (
                run,
                (
                    found.replay.peak_allocated / MIB / float(row["peak_allocated_mib"]) - 1,
                    found.replay.peak_reserved / MIB / float(row["peak_reserved_mib"]) - 1,
                    whole.tokens_per_s_per_gpu / float(row["tokens_per_s_per_gpu"]) - 1,
                ),
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The table on the terminal, or in a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="write the table into this file")
    given = parser.parse_args(arguments)
    found = list(errors())
    lines = [
        f"| {' | '.join(str(n) for n in run.values())} | {' | '.join(f'{e:+.1%}' for e in off)} |"
        for run, off in found
    ]
    few = [off for run, off in found if run["pipeline"] <= 2 and run["micro_batch"] <= 8]
    words = " | ".join(f"{median(abs(off[i]) for _, off in found):.1%}" for i in range(3))
    lines.append(f"| median of the size | | | | {words} |")
    last = f"{median(abs(off[2]) for off in few):.1%}"
    text = f"{HEADER}{chr(10).join(lines)}\n\nAt most two stages and micro-batches of at most 8: tokens/s {last} at the median.\n"
    if given.out:
        Path(given.out).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
