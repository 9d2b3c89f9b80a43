"""Published steps of reinforcement learning re-estimated: seconds of a whole step, rollouts,
log-probabilities and training together.

    python benchmarks/accuracy/rl_steps.py [--json]

benchmarks/data/rl_steps.csv has NeMo-RL 0.6's table (docs/about/performance-summary.md at 7ea279ab)
and what its recipes say (examples/configs/recipes/llm/performance at v0.6.0, also where the table has
other expert ranks); rows 18 to 25 are the dense models of 0.5's table (the same file at 108bffda). The
tables do not say how long prompts are, how the lengths are spread, nor the parts of the step. Here the
first 200 tokens are the prompt. Completions are spread as evenly as mean and maximum allow (a truncated
exponential), and the longest of them reach the maximum.

A micro-step is one pack of max_total_sequence_length tokens (sequence_packing, grpo_math_1B.yaml), filled
first fit decreasing, and counts as sequences of equal length. In a pipeline each pack is padded to the
longest (models/megatron/data.py _get_pack_sequence_parameters_for_megatron). Row by row a step is one
update, where NeMo-RL makes four of 2,048 sequences.

Rows 26 to 29 are NeMo-RL 0.3's (nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3, 200 tokens of a
prompt added; recipes at v0.3.0), which say the parts of a step: what an engine's host takes is made
from their generation, and shown on the others.
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
from napkinmath.ir.ledger import Phase
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.rollouts import clock_of, rollout_time

TABLE = Path(__file__).resolve().parents[1] / "data" / "rl_steps.csv"
PROMPT = 200
_SAMPLE = 256  # lengths of a distribution
RELEASES = (("NeMo-RL 0.6", 1, 17), ("NeMo-RL 0.5", 18, 25), ("NeMo-RL 0.3", 26, 29))


def rows() -> list[dict[str, str]]:
    """The published rows."""
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def options(row: dict[str, str]) -> dict[str, Any]:
    """A row as options of `estimate`; the sequences of a rank are its micro-steps."""
    apart, tp, cp, pp = (int(row[key]) for key in ("rollout_gpus", "tp", "cp", "pp"))
    trained = int(row["n_gpus"]) - apart
    ranks = trained // (tp * cp * pp)
    count, room = int(row["sequences"]), int(row["max_tokens"])
    mean = float(row["mean_tokens"])
    bins = packs(spread(PROMPT + 1, room, mean), room) * count / _SAMPLE
    packed = max(1, round(count / bins))
    tokens = room if pp > 1 else mean * count / bins  # stages pass on packs of one size
    length = int(tokens / packed) // (2 * cp) * 2 * cp
    found: dict[str, Any] = {
        "workload": "grpo",
        "rollout_trainer": "nemo-rl",
        "gpus": f"{trained}x{row['gpu']}",
        "nodes": trained // int(row["gpus_per_node"]),
        "stack": "nemo-rl",
        "data_parallel": "zero1",
        "bs": packed,
        "grad_accum": math.ceil(bins / ranks),
        "ctx": length,
        "completion": length - PROMPT,
        "checkpointing": row["recompute"],
        "rollout_tp": int(row["rollout_tp"]),
        "rollout_group": int(row["group"]),
        "rollout_memory": float(row["share"]),
        **{key: size for key, size in (("tp", tp), ("cp", cp), ("pp", pp)) if size > 1},
        "ep": int(row["ep"]),
    }
    if tp > 1 and int(row["ep"]) > 1:
        found["etp"] = 1  # the recipes' expert_tensor_parallel_size
    if apart:
        found |= {"rollout_gpus": f"{apart}x{row['gpu']}", "rollout_staleness": row["staleness"]}
    return found


def priced(row: dict[str, str]) -> Estimate:
    """The estimate of a row. Raises InputError for one that is not priced."""
    return estimate(row["model"], **options(row))


def packs(lengths: list[int], room: int) -> int:
    """Packs that sequences of these lengths fill, first fit decreasing (NeMo-RL 0.6
    data/packing/algorithms.py)."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, free in enumerate(left) if free >= length), len(left))
        if at == len(left):
            left.append(room)
        left[at] -= length
    return len(left)


def spread(low: int, high: int, mean: float, count: int = _SAMPLE) -> list[int]:
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


def parts_s(row: dict[str, str]) -> dict[str, float]:
    """Seconds of the whole step, its completions uneven, and of its parts: training and
    log-probabilities together, generation, and what weights and states take on their way."""
    e = priced(row)
    found, time = rollouts_of(e), e.time
    assert found is not None and time is not None and e.hardware is not None
    longest, mean = int(row["max_tokens"]), float(row["mean_tokens"])
    lengths = sorted(spread(PROMPT + 1, longest, mean))
    plan = found.plan.replace(lengths=(*lengths[:-1], longest))
    clock = clock_of(plan, default_efficiency(e.hardware.gpu))
    each = int(row["sequences"]) // found.plan.trained_on
    uneven = rollout_time(plan, clock, each, PROMPT, longest - PROMPT).seconds
    if plan.staleness:
        return {"step": max(time.own_s, uneven)}
    rollout = sum(part.device_s for part in time.phases if part.phase is Phase.ROLLOUT)
    return {
        "step": time.seconds + uneven - found.time.seconds,
        "training": time.seconds - rollout,
        "generation": uneven,
        "refit": rollout - found.time.seconds,
    }


def compared() -> list[dict[str, object]]:
    """Every row with the seconds that the rules give it, or why there are none; the parts beside
    what is published of them."""
    found: list[dict[str, object]] = []
    for row in rows():
        measured = float(row["step_s"])
        line: dict[str, object] = {"row_id": row["row_id"], "measured_s": measured}
        try:
            parts = parts_s(row)
        except InputError as error:
            found.append({**line, "why": str(error)})
            continue
        error = 100 * (parts["step"] / measured - 1)
        line |= {"priced_s": round(parts["step"], 1), "error_pct": round(error, 1)}
        for name in ("training", "generation", "refit"):
            if row[f"{name}_s"]:
                line[name] = f"{parts[name]:.0f} of {row[f'{name}_s']}"
        found.append(line)
    return found


def medians(found: list[dict[str, object]]) -> dict[str, float]:
    """Median errors: of all rows, of each release, and of rows without a source's own."""
    errors = [
        (int(str(line["row_id"]).rsplit("-", 1)[1]), abs(float(str(line["error_pct"]))))
        for line in found
        if "error_pct" in line
    ]
    table = {"all": [error for _, error in errors]}
    for name, first, last in RELEASES:
        table[name] = [error for row, error in errors if first <= row <= last]
    made = RELEASES[-1]
    table[f"without {made[0]}"] = [error for row, error in errors if row < made[1]]
    dense = (18, 25)
    table["dense models, without it"] = [
        error for row, error in errors if dense[0] <= row <= dense[1]
    ]
    return {name: median(some) for name, some in table.items()}


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
    for name, error in medians(found).items():
        print(f"{name}: median error {error:.0f}%")


if __name__ == "__main__":
    main()
