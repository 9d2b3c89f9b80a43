"""Published steps of reinforcement learning re-estimated: seconds of a whole step, rollouts,
log-probabilities and training together.

    python benchmarks/accuracy/rl_steps.py [--json]

benchmarks/data/rl_steps.csv has NeMo-RL 0.6's table (docs/about/performance-summary.md at 7ea279ab)
and what its recipes say (examples/configs/recipes/llm/performance); rows 18 to 25 are the dense
models of 0.5's table (the same file at 108bffda). The tables do not say how long prompts are, how the
lengths are spread, nor the parts of the step. Here the first 200 tokens are the prompt, sequences are
trained on at their mean length (NeMo-RL packs them), completions are spread as evenly as mean and
maximum allow (a truncated exponential), and a reference runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "estimator"))

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.rollouts import rollouts_of
from napkinmath.base.errors import InputError
from napkinmath.estimate import estimate
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.rollouts import clock_of, rollout_time

TABLE = Path(__file__).resolve().parents[1] / "data" / "rl_steps.csv"
PROMPT = 200


def rows() -> list[dict[str, str]]:
    """The published rows."""
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def options(row: dict[str, str]) -> dict[str, Any]:
    """A row as options of `estimate`; the sequences of a rank are its micro-steps."""
    apart, tp, cp, pp = (int(row[key]) for key in ("rollout_gpus", "tp", "cp", "pp"))
    trained = int(row["n_gpus"]) - apart
    ranks = trained // (tp * cp * pp)
    length = int(row["mean_tokens"]) // (2 * cp) * 2 * cp
    found: dict[str, Any] = {
        "workload": "grpo",
        "rollout_trainer": "nemo-rl",
        "gpus": f"{trained}x{row['gpu']}",
        "nodes": trained // int(row["gpus_per_node"]),
        "stack": "nemo-rl",
        "data_parallel": "zero1",
        "bs": 1,
        "grad_accum": int(row["sequences"]) // ranks,
        "ctx": length,
        "completion": length - PROMPT,
        "checkpointing": row["recompute"],
        "rollout_tp": int(row["rollout_tp"]),
        "rollout_group": int(row["group"]),
        "rollout_memory": float(row["share"]),
        "reference_at": "offload",
        **{key: size for key, size in (("tp", tp), ("cp", cp), ("pp", pp)) if size > 1},
        "ep": int(row["ep"]),
    }
    if apart:
        found |= {"rollout_gpus": f"{apart}x{row['gpu']}", "rollout_staleness": row["staleness"]}
    return found


def priced(row: dict[str, str]) -> Estimate:
    """The estimate of a row. Raises InputError for one that is not priced."""
    return estimate(row["model"], **options(row))


def spread(low: int, high: int, mean: float, count: int = 256) -> list[int]:
    """Quantiles of the most even distribution between two lengths that has this mean."""
    width, wanted = high - low, (mean - low) / (high - low)

    def mean_at(rate: float) -> float:
        return 1 / rate - 1 / math.expm1(rate) if abs(rate) > 1e-6 else 0.5

    below, above = -500.0, 500.0
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if mean_at(middle) > wanted else (below, middle)
    shares = [(i + 0.5) / count for i in range(count)]
    if abs(below) < 1e-5:
        return [low + round(width * share) for share in shares]
    return [
        low + round(-width * math.log1p(share * math.expm1(-below)) / below) for share in shares
    ]


def step_s(row: dict[str, str]) -> float:
    """Seconds of the whole step, its completions uneven."""
    e = priced(row)
    found, time = rollouts_of(e), e.time
    assert found is not None and time is not None and e.hardware is not None
    if found.plan.staleness:
        return time.seconds
    longest, mean = int(row["max_tokens"]), float(row["mean_tokens"])
    plan = found.plan.replace(lengths=tuple(sorted(spread(PROMPT + 1, longest, mean))))
    clock = clock_of(plan, default_efficiency(e.hardware.gpu))
    each = int(str(options(row)["grad_accum"]))
    uneven = rollout_time(plan, clock, each, PROMPT, longest - PROMPT)
    return time.seconds + uneven.seconds - found.time.seconds


def compared() -> list[dict[str, object]]:
    """Every row with the seconds that the rules give it, or why there are none."""
    found: list[dict[str, object]] = []
    for row in rows():
        measured = float(row["step_s"])
        line: dict[str, object] = {"row_id": row["row_id"], "measured_s": measured}
        try:
            seconds = step_s(row)
        except InputError as error:
            found.append({**line, "why": str(error)})
            continue
        error = 100 * (seconds / measured - 1)
        found.append({**line, "priced_s": round(seconds, 1), "error_pct": round(error, 1)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="as JSON")
    asked = parser.parse_args()
    found = compared()
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    for line in found:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    errors = [abs(float(str(line["error_pct"]))) for line in found if "error_pct" in line]
    print(f"{len(errors)} of {len(found)} rows, median error {median(errors):.0f}%")


if __name__ == "__main__":
    main()
